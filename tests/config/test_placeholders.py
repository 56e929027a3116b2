"""`{{ ... }}` in texts of configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config import Config
from lockstep.errors import ConfigError

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


def test_custom_imports_may_fail_where_the_config_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "net.py"
    file.write_text("custom_imports = dict(imports=['no_such_module'], allow_failed_imports=True)\n")
    Config.fromfile(file)
    assert "`no_such_module`, which cannot be imported" in caplog.text
    file.write_text("custom_imports = dict(imports=['no_such_module'], allow_failed_imports=False)\n")
    with pytest.raises(ConfigError, match="`no_such_module`, which cannot be imported"):
        Config.fromfile(file)
    assert Config.fromfile(file, import_custom_modules=False).custom_imports.imports == ["no_such_module"]
