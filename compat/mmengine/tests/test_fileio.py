"""Files by path and URL: MMEngine's documented behaviour."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import mmengine
from mmengine import fileio


@pytest.mark.parametrize("ending", ["json", "yaml", "yml", "pkl", "pickle"])
def test_what_is_dumped_is_loaded_again(tmp_path, ending):
    file = tmp_path / "new" / f"a.{ending}"
    mmengine.dump({"a": [1, 2.5], "b": "c"}, file)
    assert mmengine.load(file) == mmengine.load(str(file)) == {"a": [1, 2.5], "b": "c"}


def test_json_takes_arrays_and_sets_and_files_may_be_open():
    text = mmengine.dump({"a": np.arange(2), "b": {3}, "c": np.float32(1.5), "d": range(2)}, file_format="json")
    assert mmengine.load(io.StringIO(text), file_format="json") == {"a": [0, 1], "b": [3], "c": 1.5, "d": [0, 1]}


def test_yaml_keeps_tuples_and_makes_no_objects(tmp_path):
    mmengine.dump({"a": (1, 2)}, tmp_path / "a.yaml")
    assert mmengine.load(tmp_path / "a.yaml") == {"a": (1, 2)}
    (tmp_path / "b.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(Exception, match="python/object/apply"):
        mmengine.load(tmp_path / "b.yaml")


def test_unknown_formats_raise(tmp_path):
    with pytest.raises(TypeError, match="file_format"):
        mmengine.load(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="file_format"):
        mmengine.dump(1)


def test_lines_as_lists_and_dicts(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a\nb\nc\n")
    assert mmengine.list_from_file(file) == ["a", "b", "c"]
    assert mmengine.list_from_file(file, prefix="x/", offset=1, max_num=1) == ["x/b"]
    file.write_text("1 cat\n2 dog cow\n")
    assert mmengine.dict_from_file(file) == {"1": "cat", "2": ["dog", "cow"]}
    assert mmengine.dict_from_file(file, key_type=int) == {1: "cat", 2: ["dog", "cow"]}


def test_a_folder_is_listed_without_hidden_entries(tmp_path):
    for name in ("a.txt", "b.jpg", ".hidden", "in/c.txt", "in/deep/d.txt"):
        fileio.put_text("x", tmp_path / name)
    assert set(fileio.list_dir_or_file(tmp_path)) == {"a.txt", "b.jpg", "in"}
    assert set(fileio.list_dir_or_file(tmp_path, list_file=False, recursive=True)) == {"in", "in/deep"}
    only = set(fileio.list_dir_or_file(tmp_path, list_dir=False, suffix=".txt", recursive=True))
    assert only == {"a.txt", "in/c.txt", "in/deep/d.txt"}
    assert set(mmengine.scandir(tmp_path, ".txt", recursive=True)) == only
    with pytest.raises(TypeError):
        list(fileio.list_dir_or_file(tmp_path, list_dir=True, suffix=".txt"))


def test_a_url_is_read_written_and_listed():
    fileio.put(b"1\n2", "memory://bucket/in/a.txt")
    assert fileio.get("memory://bucket/in/a.txt") == b"1\n2"
    assert mmengine.list_from_file("memory://bucket/in/a.txt") == ["1", "2"]
    assert fileio.exists("memory://bucket/in/a.txt")
    assert fileio.isdir("memory://bucket/in")
    assert not fileio.isfile("memory://bucket/in")
    assert list(fileio.list_dir_or_file("memory://bucket", recursive=True)) == ["in", "in/a.txt"]
    with fileio.get_local_path("memory://bucket/in/a.txt") as path:
        assert Path(path).read_bytes() == b"1\n2"
    assert not Path(path).exists()
    fileio.remove("memory://bucket/in/a.txt")
    assert not fileio.exists("memory://bucket/in/a.txt")


def test_files_and_folders_are_copied_and_removed(tmp_path):
    fileio.put_text("x", tmp_path / "a" / "b.txt")
    assert fileio.copyfile(tmp_path / "a" / "b.txt", tmp_path) == str(tmp_path / "b.txt")
    fileio.copytree(tmp_path / "a", tmp_path / "c")
    assert fileio.get_text(tmp_path / "c" / "b.txt") == "x"
    assert fileio.copy_if_symlink_fails(tmp_path / "b.txt", tmp_path / "link") is True
    fileio.rmtree(tmp_path / "c")
    assert not fileio.exists(tmp_path / "c")
    with pytest.raises(IsADirectoryError):
        fileio.remove(tmp_path / "a")


def test_a_backend_of_ones_own_serves_its_protocol():
    @fileio.register_backend("shelf", prefixes="shelf", force=True)
    class Shelf(fileio.BaseStorageBackend):
        def get(self, filepath):
            return filepath.encode()

        def get_text(self, filepath, encoding="utf-8"):
            return filepath

    assert fileio.get("shelf://x") == b"shelf://x"
    assert fileio.FileClient.infer_client(uri="shelf://x").get_text("y") == "y"
    assert fileio.get_file_backend("a", backend_args={"backend": "shelf"}).name == "Shelf"
    with pytest.raises(ValueError, match="shelf"):
        fileio.register_backend("shelf", Shelf)
    with pytest.raises(ValueError, match="backend"):
        fileio.FileClient("nowhere")


def test_older_arguments_warn_and_work(tmp_path):
    mmengine.dump([1], tmp_path / "a.json")
    with pytest.warns(DeprecationWarning, match="backend_args"):
        assert mmengine.load(tmp_path / "a.json", file_client_args={"backend": "disk"}) == [1]
