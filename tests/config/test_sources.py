from __future__ import annotations

import copy

import pytest

from lockstep.config import Config

BASE = """\
width = 3
head = dict(width=width)
model = dict(
    type="Net",
    head=head,
    stages=[
        dict(depth=1),
        dict({"depth": 2}),
    ],
)
lr = 0.1
"""
CHILD = """\
_base_ = "base.py"
rate = _base_.lr * 2
model = dict(
    head=dict(
        bias=False))
hooks = {"a": 1,
         "b": dict(c=1)}
hooks["b"]["c"] = 2
extra: float = 1.0
unused = 5
"""


@pytest.fixture
def cfg(write):
    write("base.py", BASE)
    return Config.fromfile(write("child.py", CHILD))


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("model.head.bias", "child.py:5"),
        ("model.head.width", "base.py:2"),
        ("model.type", "base.py:4"),
        ("model.stages.0.depth", "base.py:7"),
        ("model.stages.1.depth", "base.py:8"),
        ("model.stages.7.depth", "base.py:6"),
        ("model.head.unknown", "child.py:4"),
        ("lr", "base.py:11"),
        ("hooks.a", "child.py:6"),
        ("hooks.b.c", "child.py:8"),
        ("extra", "child.py:9"),
        ("nowhere", ""),
    ],
)
def test_a_key_is_found_where_it_was_written_last(cfg, tmp_path, key, place):
    assert cfg.where(key) == (place and f"{tmp_path}/{place}")


def test_what_an_option_has_set_says_so(cfg, tmp_path):
    cfg.merge_from_dict({"model.head.bias": True, "new": {"x": 1}})
    assert cfg.where("model.head.bias") == "an option"
    assert cfg.where("new.x") == "an option"
    assert cfg.where("model.head") == f"{tmp_path}/child.py:4"
    assert copy.deepcopy(cfg).where("new.x") == "an option"


def test_keys_that_come_by_import_are_found_in_their_file(write, tmp_path):
    write("base.py", BASE)
    cfg = Config.fromfile(
        write(
            "child.py",
            "with read_base():\n    from .base import model as net, lr\nnet.head.width = 7\n"
            "net.update(depth=2)\nnet.stages[0].depth = 5\n",
        )
    )
    assert cfg.where("net.head.width") == f"{tmp_path}/child.py:3"
    assert cfg.where("net.depth") == f"{tmp_path}/child.py:4"
    assert cfg.where("net.stages.0.depth") == f"{tmp_path}/child.py:5"
    assert cfg.where("net.stages.1.depth") == f"{tmp_path}/base.py:8"
    assert cfg.where("lr") == f"{tmp_path}/base.py:11"
    assert cfg.where("model") == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "lr: 1\nmodel:\n  head: {width: 3,\n    bias: 1}\n  stages:\n  - depth: 1\n"),
        ("c.json", '{"lr": 1,\n"model": {\n"head": {"width": 3,\n "bias": 1}, "stages":\n[{"depth": 1}]}}'),
    ],
)
def test_yaml_and_json_are_searched_by_their_own_structure(write, name, text):
    path = write(name, text)
    cfg = Config.fromfile(path)
    lines = {key: cfg.where(key).removeprefix(f"{path}:") for key in ("model.head.bias", "model.stages.0.depth", "lr")}
    assert lines == {"model.head.bias": "4", "model.stages.0.depth": "6" if name == "c.yaml" else "5", "lr": "1"}
    assert cfg.where("x") == ""


def test_json_that_yaml_cannot_read_has_no_lines(write):
    path = write("c.json", '{\n\t"a": 1}')
    assert Config.fromfile(path) == {"a": 1}
    assert Config.fromfile(path).where("a") in ("", f"{path}:2")


def test_helpers_are_what_the_code_of_any_of_the_files_reads(cfg):
    assert {"width", "head", "lr"} <= cfg.helpers
    assert not {"unused", "rate", "model", "extra"} & cfg.helpers


@pytest.mark.parametrize("name", ["dumped.py", "dumped.yaml"])
def test_a_dumped_config_has_nothing_but_helpers_as_its_code_is_gone(cfg, tmp_path, name):
    cfg.dump(tmp_path / name)
    dumped = Config.fromfile(tmp_path / name)
    assert dumped == cfg
    assert dumped.helpers >= dumped.keys()


def test_without_a_file_nothing_is_known(cfg, tmp_path):
    assert (Config({"a": 1}).where("a"), Config({"a": 1}).helpers) == ("", set())
    (tmp_path / "child.py").unlink()
    assert (cfg.where("lr"), cfg.helpers) == ("", set())
