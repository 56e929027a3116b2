from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import Config
from lockstep.errors import ConfigError

PYTHON = """
    from __future__ import annotations
    import math
    from collections import OrderedDict
    from pathlib import Path
    from typing import Optional
    from dataclasses import dataclass

    @dataclass
    class Size:
        width: int

    def twice(x: Optional[int]) -> int:
        return 2 * x

    lr = 0.1
    here = Path(__file__).name
    model: dict = dict(type=OrderedDict, size=Size(twice(4)), make=twice)
"""


def test_a_python_file_gives_what_it_assigns(write):
    path = write("config.py", PYTHON)
    cfg = Config.fromfile(path)
    assert list(cfg) == ["lr", "here", "model"]
    assert cfg.here == "config.py"
    assert cfg.model.size.width == 8
    assert cfg.model.type.__name__ == "OrderedDict"
    assert cfg.model.make(3) == 6
    assert cfg.filename == str(path)
    assert cfg.text == f"# {path}\n{path.read_text()}"


def test_classes_of_a_config_can_be_pickled_in_its_process(write):
    cfg = Config.fromfile(write("config.py", PYTHON))
    assert pickle.loads(pickle.dumps(cfg)) == cfg


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "lr: 0.1\nmodel:\n  type: Net\n  sizes: [1, 2]\n"),
        ("c.yml", "lr: 0.1\nmodel: {type: Net, sizes: [1, 2]}\n"),
        ("c.json", '{"lr": 0.1, "model": {"type": "Net", "sizes": [1, 2]}}'),
        ("c.py", "lr = 0.1\nmodel = dict(type='Net', sizes=[1, 2])\n"),
    ],
)
def test_all_formats_say_the_same(write, name, text):
    assert Config.fromfile(write(name, text)) == {
        "lr": 0.1,
        "model": {"type": "Net", "sizes": [1, 2]},
    }


def test_an_empty_file_is_an_empty_config(write):
    assert Config.fromfile(write("c.yaml", "")) == {}
    assert Config.fromfile(write("c.py", "")) == {}


def test_a_python_config_imports_the_modules_beside_it_and_leaves_the_path_as_it_was(write):
    write("toy_neighbour.py", "class Net: ...\n")
    path = write("c.py", "from toy_neighbour import Net\nmodel = dict(type=Net)\n")
    before = list(sys.path)
    assert Config.fromfile(path).model.type.__name__ == "Net"
    assert sys.path == before


def test_custom_imports_are_imported(write):
    write("toy_registering.py", "")
    path = write("c.yaml", "custom_imports: {imports: [toy_registering]}")
    Config.fromfile(path, trusted=True)
    assert "toy_registering" in sys.modules
    with pytest.raises(ConfigError, match=r"`custom_imports` names `not_there`.*No module"):
        Config.fromfile(write("d.py", "custom_imports = dict(imports='not_there')"))
    with pytest.raises(ConfigError, match="`custom_imports` must be dict"):
        Config.fromfile(write("e.py", "custom_imports = dict(imports=[3])"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("c.py", "a = 1\nb = = 2\n", "c.py:2: invalid syntax"),
        ("c.py", "a = 1\nb = nothing\n", "c.py:2: NameError: name 'nothing' is not defined"),
        ("c.py", "def f(x):\n  return 1 / x\n\nb = f(0)\n", "c.py:2: ZeroDivisionError"),
        ("c.py", "import json\nb = json.loads('')\n", "c.py:2: JSONDecodeError"),
        (
            "c.py",
            "from __future__ import nothing\n",
            "SyntaxError: future feature nothing is not defined (c.py, line 1)",
        ),
        ("c.py", "a = 1\n_base_ = 3\n", "c.py:2: `_base_` must be a path or a list of paths"),
        ("c.py", "x = 'a'\n_base_ = x\n", "c.py:2: `_base_` must be a plain string"),
        ("c.py", "if True:\n  _base_ = 'x.py'\n", "`_base_` must be assigned at the top level"),
        ("c.yaml", "a: 1\nb: [1\n", "c.yaml:3: expected ',' or ']'"),
        ("c.yaml", "a: 1\nb: {c: 1\nd: 2\n", "while parsing a flow mapping, which begins in line 2"),
        ("c.yaml", "- 1\n- 2\n", "c.yaml: must hold one mapping"),
        ("c.yaml", "1: 2\n", "c.yaml: must hold one mapping with strings as keys"),
        ("c.yaml", "on: 2\n", "but has the key True, as YAML reads on, yes and true without quotes. Quote it"),
        ("c.yaml", "a: 1\n_base_: 3\n", "c.yaml:2: `_base_` must be a path"),
        ("c.yaml", "a:\n  b: 1\n  c: 2\n  b: 3\n", "c.yaml:4: the key `b` is there twice, first in line 2"),
        ("c.json", '{"a": 1,\n "b": }', "c.json:2: Expecting value"),
        ("c.json", '{"a": {"b": 1,\n "b": 2}}', "c.json: the key `b` is there twice in an object"),
        ("c.toml", "a = 1\n", "must end in one of .py, .yaml, .yml, .json"),
        ("c.py", "filename = 1\n", "`filename` cannot be a key"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(write, name, text, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Config.fromfile(write(name, text))


def test_a_key_may_override_one_that_is_merged(write):
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n"
    assert Config.fromfile(write("c.yaml", text)) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_what_is_merged_may_have_been_merged_itself(write):
    text = "top:\n  base: &base {x: 1}\n  b: &b {<<: *base, x: 2}\nc: {<<: *b, y: 3}\n"
    assert Config.fromfile(write("c.yaml", text))["c"] == {"x": 2, "y": 3}


def test_merges_that_stand_for_billions_are_read(write):
    """The search for a key's line must not go through all of them."""
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]
    with pytest.raises(ConfigError, match=r"c\.yaml.*`_base_` must be a path"):
        Config.fromfile(write("c.yaml", "\n".join([*lines, "_base_: 3"])))


def test_names_to_which_objects_of_torch_are_assigned_are_keys(write):
    text = "from torch import nn\nfrom torch.optim import SGD, Adam\n"
    text += "model = nn.Linear(2, 2)\nact = nn.ReLU\na, b = SGD, Adam\n"
    cfg = Config.fromfile(write("c.py", text))
    assert isinstance(cfg["model"], torch.nn.Linear)
    assert (cfg["act"], cfg["a"], cfg["b"]) == (torch.nn.ReLU, torch.optim.SGD, torch.optim.Adam)


def test_only_a_file_of_its_own_will_has_annotations_as_text(write):
    text = "def f(x: int): pass\nkind = f.__annotations__['x']\n"
    assert Config.fromfile(write("c.py", text))["kind"] is int
    assert Config.fromfile(write("d.py", f"from __future__ import annotations\n{text}"))["kind"] == "int"


def test_no_custom_imports_are_none(write):
    assert Config.fromfile(write("c.py", "custom_imports = None\nlr = 1\n"))["lr"] == 1


def test_a_missing_file_suggests_its_neighbour(write):
    path = write("schedule.py", "")
    with pytest.raises(FileNotFoundError, match=r"no config file `.*shedule\.py`; did you mean"):
        Config.fromfile(path.with_name("shedule.py"))


# `{{ ... }}` in texts of configs.


BASE = "depth = 3\nmodel = dict(width=[1, 2])\nname = '{{ fileBasename }}'\n"


def test_a_config_in_python_knows_its_file_and_its_bases(tmp_path: Path):
    (tmp_path / "base.py").write_text(BASE)
    file = tmp_path / "net.py"
    file.write_text(
        "_base_ = '{{ fileDirname }}/base.py'\n"
        "work_dir = 'runs/{{ fileBasenameNoExtension }}'\n"
        "widths = {{_base_.model.width}}\n"
        "layers = [dict(depth={{ _base_.depth }}), '{{_base_.depth}}', 'depth {{ _base_.depth }}',\n"
        "          ('{{fileExtname}}',)]\n"
        "template = '{{ title }} {{x:y}}'\n"
    )
    cfg = Config.fromfile(file)
    assert cfg.work_dir == "runs/net"
    assert cfg.widths == [1, 2]
    assert cfg.layers == [{"depth": 3}, 3, "depth 3", (".py",)]
    assert cfg.name == "base.py"  # of the file that says so
    assert cfg.template == "{{ title }} {{x:y}}"


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_so_does_one_in_yaml_or_json(suffix: str, tmp_path: Path):
    (tmp_path / "base.py").write_text(BASE)
    file = tmp_path / f"net{suffix}"
    file.write_text(
        '{"_base_": "base.py", "widths": "{{_base_.model.width}}", "work_dir": "{{fileBasenameNoExtension}}"}'
    )
    cfg = Config.fromfile(file, trusted=True)
    assert (cfg.widths, cfg.work_dir) == ([1, 2], "net")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr = '{{_base_.model.heigth}}'", "must name a key of the bases, but they have no `heigth` there"),
        ("lr = '{{$NO_SUCH_LR:}}'", "needs the environment variable `NO_SUCH_LR`, which is not set"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(text: str, says: str, tmp_path: Path):
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "net.py").write_text(f"_base_ = 'base.py'\n{text}\n")
    with pytest.raises(ConfigError, match=says):
        Config.fromfile(tmp_path / "net.py")


def test_environment_variables_are_filled_in_where_a_program_could_read_them(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("LOCKSTEP_TEST_RATE", "0.5")
    (tmp_path / "net.py").write_text(
        "rate = {{'$LOCKSTEP_TEST_RATE:1'}}\nname = 'a{{ $LOCKSTEP_TEST_NO:b }}'\n"
        "steps = {{'$LOCKSTEP_TEST_NO:[1, 2]'}}\n"
    )
    cfg = Config.fromfile(tmp_path / "net.py")
    assert (cfg.rate, cfg.name, cfg.steps) == (0.5, "ab", [1, 2])
    (tmp_path / "net.yaml").write_text("rate: '{{ $LOCKSTEP_TEST_RATE:1 }}'\n")
    with pytest.raises(ConfigError, match="a file of data may not read them"):
        Config.fromfile(tmp_path / "net.yaml")


def test_a_module_beside_the_config_that_hides_one_of_custom_imports_is_named(tmp_path: Path, monkeypatch, caplog):
    for folder in ("near", "far"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hiding.py").touch()
        monkeypatch.syspath_prepend(tmp_path / folder)
    file = tmp_path / "c.py"
    file.write_text("custom_imports = dict(imports=['hiding.inner'])\n")
    says = f"`hiding` is {tmp_path}/far/hiding.py, which hides {tmp_path}/near/hiding.py: rename one"
    with pytest.raises(ConfigError, match=f"No module named 'hiding.inner'.*{says}"):
        Config.fromfile(file)
    file.write_text("custom_imports = dict(imports=['hiding'])\n")
    Config.fromfile(file)
    assert says in caplog.text


def test_custom_imports_may_fail_where_the_config_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "net.py"
    file.write_text("custom_imports = dict(imports=['no_such_module'], allow_failed_imports=True)\n")
    Config.fromfile(file)
    assert "`no_such_module`, which cannot be imported" in caplog.text
    file.write_text("custom_imports = dict(imports=['no_such_module'], allow_failed_imports=False)\n")
    with pytest.raises(ConfigError, match="`no_such_module`, which cannot be imported"):
        Config.fromfile(file)
    assert Config.fromfile(file, import_custom_modules=False).custom_imports.imports == ["no_such_module"]


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("failing_name", "x = 1\nundefined\n", r"NameError: name 'undefined' is not defined \(failing_name\.py:2\)"),
        ("failing_syntax", "x = = 1\n", r"SyntaxError: invalid syntax \(failing_syntax\.py, line 1\)"),
        ("failing_import", "import no_such_package\n", r"No module named 'no_such_package' \(failing_import\.py:1\)"),
    ],
)
def test_an_error_within_a_custom_import_names_the_config_the_module_and_the_line(tmp_path: Path, name, source, says):
    (tmp_path / f"{name}.py").write_text(source)
    file = tmp_path / "net.py"
    file.write_text(f"custom_imports = dict(imports=['{name}'], allow_failed_imports=False)\n")
    with pytest.raises(ConfigError, match=rf"net\.py: `custom_imports` names `{name}`, .*{says}"):
        Config.fromfile(file)


def test_a_config_with_the_name_of_a_package_does_not_hide_it(tmp_path: Path, monkeypatch):
    package = tmp_path / "project" / "named_alike"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("is_package = True\n")
    monkeypatch.syspath_prepend(package.parent)
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "named_alike.py"
    file.write_text("custom_imports = dict(imports=['named_alike'])\n")
    Config.fromfile(file)
    assert sys.modules.pop("named_alike").is_package
