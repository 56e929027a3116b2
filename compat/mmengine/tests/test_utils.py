"""Small functions: MMEngine's documented behaviour."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import mmengine.utils as utils
from mmengine.utils import dl_utils


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.0.0", "1.0.1"),
        ("1.0.0rc1", "1.0.0"),
        ("1.0.0rc1", "1.0.0rc2"),
        ("1.0.0a1", "1.0.0b1"),
        ("1.0.0.dev1", "1.0.0a1"),
        ("1.0", "1.0.0.1"),
        ("1.0.0", "1.0.0.post1"),
        ("0.9", "0.10.7"),
    ],
)
def test_versions_sort_as_versions_do(older, newer):
    assert utils.digit_version(older) < utils.digit_version(newer)


def test_versions_are_those_of_mmengine(both):
    names = ["1.2.3", "2.0.0rc4", "1.0a2", "1.13.0+cu117", "2.1.0.dev3", "1.0.post2", "0.10.7"]
    ours, theirs = both(
        f"from mmengine.utils import digit_version\nanswers = {{name: digit_version(name) for name in {names}}}"
    )
    assert ours == theirs


def test_sequences():
    assert utils.to_2tuple(3) == (3, 3)
    assert utils.to_2tuple((1, 2)) == (1, 2)
    assert utils.to_3tuple("ab") == ("ab", "ab", "ab")
    assert utils.is_list_of([1, 2], int)
    assert not utils.is_tuple_of([1], int)
    assert utils.is_seq_of((1, "a"), (int, str))
    assert utils.list_cast(("1", "2"), int) == [1, 2]
    assert utils.concat_list([[1], [2, 3]]) == [1, 2, 3]
    assert utils.slice_list([1, 2, 3], [2, 1]) == [[1, 2], [3]]
    with pytest.raises(ValueError, match="add up"):
        utils.slice_list([1, 2, 3], [2])
    with pytest.raises(TypeError):
        utils.iter_cast(1, str)
    assert utils.apply_to({"a": (1, [2])}, lambda x: isinstance(x, int), str) == {"a": ("1", ["2"])}


def test_an_argument_that_was_renamed_still_works():
    @utils.deprecated_api_warning({"old": "new"}, cls_name="Net")
    def forward(x, new=0):
        return x + new

    with pytest.warns(DeprecationWarning, match="old"):
        assert forward(1, old=2) == 3
    with pytest.warns(DeprecationWarning, match="old"), pytest.raises(AssertionError):
        forward(1, old=2, new=3)


def test_modules_by_name():
    assert utils.import_modules_from_strings("json").__name__ == "json"
    assert [one.__name__ for one in utils.import_modules_from_strings(["json", "os"])] == ["json", "os"]
    with pytest.raises(ImportError):
        utils.import_modules_from_strings("no_such_module")
    with pytest.warns(UserWarning, match="no_such_module"):
        assert utils.import_modules_from_strings(["no_such_module"], allow_failed_imports=True) == [None]
    assert utils.get_object_from_string("torch.nn.Linear") is torch.nn.Linear
    assert utils.get_object_from_string("torch.nn.Nothing") is None


def test_progress_is_shown_and_results_come_back():
    file = io.StringIO()
    assert utils.track_progress(abs, [-1, -2, -3], file=file) == [1, 2, 3]
    assert "3/3" in file.getvalue()
    assert list(utils.track_iter_progress((iter([1, 2]), 2), file=io.StringIO())) == [1, 2]
    assert utils.track_parallel_progress(abs, [-1, -2, -3], 2, file=io.StringIO()) == [1, 2, 3]
    assert utils.track_progress_rich(pow, [(2, 3), (3, 2)]) == [8, 9]
    with pytest.raises(TypeError):
        utils.track_progress(abs, 3)


def test_managers_have_one_instance_for_each_name():
    class Shared(utils.ManagerMixin):
        def __init__(self, name="", size=1):
            super().__init__(name)
            self.size = size

    with pytest.raises(RuntimeError):
        Shared.get_current_instance()
    assert Shared.get_instance("a", size=3) is Shared.get_instance("a")
    Shared.get_instance("b")
    assert Shared.get_current_instance().instance_name == "b"
    assert Shared.check_instance_created("a")
    assert not Shared.check_instance_created("c")


def test_paths(tmp_path):
    utils.mkdir_or_exist(tmp_path / "a" / "b")
    utils.mkdir_or_exist(tmp_path / "a" / "b")
    with pytest.raises(FileNotFoundError):
        utils.check_file_exist(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("x")
    utils.symlink(tmp_path / "a.txt", tmp_path / "link")
    utils.symlink(tmp_path / "a.txt", tmp_path / "link")
    assert (tmp_path / "link").read_text() == "x"
    assert utils.is_abs("s3://a")
    assert not utils.is_abs("a")


def test_timers():
    timer = utils.Timer(start=False)
    with pytest.raises(utils.TimerError):
        timer.since_start()
    timer.start()
    assert timer.since_start() >= 0
    assert timer.since_last_check() >= 0


def test_what_needs_a_program_or_a_package_says_so():
    @utils.requires_package("no_such_package")
    def run():
        return 1

    with pytest.raises(RuntimeError, match="no_such_package"):
        run()
    assert utils.requires_executable("python3")(lambda: 1)() == 1


def test_around_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "mmcv._ext", None)  # other tests put a stand-in there
    assert dl_utils.is_norm(torch.nn.GroupNorm(1, 2))
    assert not dl_utils.is_norm(torch.nn.BatchNorm2d(2), exclude=torch.nn.BatchNorm2d)
    assert dl_utils.has_batch_norm(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    assert not dl_utils.mmcv_full_available()
    (image,) = dl_utils.tensor2imgs(torch.zeros(1, 3, 2, 2), mean=(1, 2, 3), std=(1, 1, 1))
    assert image[0, 0].tolist() == [3, 2, 1]
    assert "lockstep" in dl_utils.collect_env()["MMEngine"]
