from __future__ import annotations

import re

import pytest

from lockstep.config import Config
from lockstep.errors import ConfigError

MODEL = "model = dict(type='Net', head=dict(type='Linear', width=3), stages=[1, 2])\nlr = 0.1\n"


def test_dicts_are_merged_and_all_else_replaced(write):
    write("base/model.py", MODEL)
    cfg = Config.fromfile(
        write(
            "child.py",
            "_base_ = 'base/model.py'\nmodel = dict(head=dict(width=5, bias=False), stages=[9])\nepochs = 3\n",
        )
    )
    assert cfg == {
        "model": {
            "type": "Net",
            "head": {"type": "Linear", "width": 5, "bias": False},
            "stages": [9],
        },
        "lr": 0.1,
        "epochs": 3,
    }


def test_delete_replaces_a_dict_and_is_no_key_of_the_result(write):
    write("base.py", MODEL)
    cfg = Config.fromfile(write("child.py", "_base_ = './base.py'\nmodel = dict(head=dict(_delete_=True, type='Id'))"))
    assert cfg.model.head == {"type": "Id"}
    assert cfg.model.stages == [1, 2]
    cfg = Config.fromfile(write("all.py", "_base_ = 'base.py'\n_delete_ = True\nx = dict(y=1)"))
    assert cfg == {"x": {"y": 1}}


def test_delete_without_a_base_does_nothing(write):
    assert Config.fromfile(write("c.py", "a = dict(_delete_=True, b=1)")) == {"a": {"b": 1}}


def test_several_bases_in_several_formats_and_generations(write):
    write("grand.yaml", "lr: 0.1\nmodel: {type: Net}\n")
    write("one.json", '{"_base_": "grand.yaml", "lr": 0.2}')
    write("sub/two.yaml", "_base_: two_base.py\nepochs: 3\n")
    write("sub/two_base.py", "epochs = 1\nseed = 0\n")
    cfg = Config.fromfile(write("child.py", "_base_ = ['one.json', 'sub/two.yaml']\nlr = 0.3\n"), trusted=True)
    assert cfg == {"lr": 0.3, "model": {"type": "Net"}, "epochs": 3, "seed": 0}
    order = [cfg.text.index(name) for name in ("grand.yaml\n", "one.json\n", "two_base.py\n")]
    assert order == sorted(order)


def test_a_python_config_can_use_what_its_base_says(write):
    write("base.py", MODEL)
    cfg = Config.fromfile(
        write(
            "child.py",
            "_base_ = 'base.py'\nlr = _base_.lr * 2\nstages = _base_.model.stages + [3]\n",
        )
    )
    assert cfg.lr == 0.2
    assert cfg.stages == [1, 2, 3]
    assert cfg.model.stages == [1, 2]


def test_a_base_may_be_named_in_several_strings(write):
    write("long_name.py", "lr = 1\n")
    assert Config.fromfile(write("child.py", "_base_ = ['long_' + 'na' +\n 'me.py']\n")).lr == 1
    assert Config.fromfile(write("child.py", "_base_ = 'long' '_' + 'name.py'\n")).lr == 1
    with pytest.raises(ConfigError, match="must be a plain string or list of strings"):
        Config.fromfile(write("child.py", "_base_ = 'long_' + str(1)\n"))


def test_a_python_config_can_change_what_its_base_says(write):
    write("base.py", MODEL)
    write("middle.py", "_base_ = 'base.py'\n_base_.model.head.width = 5\n_base_['lr'] *= 3\n")
    cfg = Config.fromfile(
        file := write(
            "child.py",
            "_base_ = 'middle.py'\n"
            "_base_.update(epochs=3)\n"
            "{{_base_.model.head}}.bias = False\n"
            "model = dict(type='Own')\n"  # the file's own keys are merged into the changed ones
            "head = _base_.model.head\n"
            "head.type = 'Conv'\n"
            "_base_.model.stages.append(3)\n"
            "del _base_.lr\n"
            "said = '{{_base_.model.head.type}}'\n",
        )
    )
    head = {"type": "Conv", "width": 5, "bias": False}
    assert cfg == {
        "model": {"type": "Own", "head": head, "stages": [1, 2, 3]},
        "epochs": 3,
        "head": head,
        "said": "Conv",
    }
    assert cfg.where("epochs") == f"{file}:2"
    assert cfg.where("model.head.bias") == f"{file}:3"
    assert cfg.where("model.head.width") == f"{file.with_name('middle.py')}:2"
    assert cfg.where("model.head") == f"{file.with_name('base.py')}:1"
    assert "epochs" not in cfg.helpers  # set, not read
    cfg.head.type = "Linear"
    assert cfg.model.head.type == "Conv"  # no part of the result is shared


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("_base_ = 'base.py'\n\nlr = dict(x=1)", "child.py:3: `lr` is a dict, but was 0.1"),
        (
            "_base_ = 'base.py'\nmodel = dict(\n  type=dict(x=1))",
            "child.py:3: `model.type` is a dict, but was 'Net' in the base; add _delete_=True",
        ),
        ("_base_ = 'base.py'\nmodel = dict(_delete_=1)", "`model._delete_` must be True or False"),
        ("_base_ = ['base.py', 'copy.py']", "child.py:1: `_base_` gives `model` twice"),
        ("_base_ = 'bose.py'", "child.py:1: `_base_` names a file that is missing"),
        ("_base_ = 'child.py'", "child.py:1: `_base_` leads in a circle"),
        ("_base_ = 'base.py'\n{{_base_.lr}} = 1", "child.py:2: cannot assign to set display"),
        (
            "from lockstep.config import read_base\nwith read_base():\n    from .base import *\n_base_.lr = 1",
            "child.py:4: `lr` is set in `_base_`, which a file with read_base() lacks; set `lr` itself",
        ),
    ],
)
def test_contradictions_are_named_with_file_line_and_key(write, text, says):
    write("base.py", MODEL)
    write("copy.py", MODEL)
    with pytest.raises(ConfigError, match=re.escape(says)):
        Config.fromfile(write("child.py", text))


def test_a_circle_of_two_names_both(write):
    write("a.py", "_base_ = 'b.py'")
    with pytest.raises(ConfigError, match=r"circle: .*a\.py -> .*b\.py -> .*a\.py"):
        Config.fromfile(write("b.py", "_base_ = 'a.py'").with_name("a.py"))


def test_a_base_may_lie_in_an_installed_package(write, tmp_path, monkeypatch):
    write("shelf/__init__.py", "")
    write("shelf/nets/model.py", MODEL)
    write("shelf/.mim/configs/_base_/data.py", "batch = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    child = write("configs/child.py", "_base_ = ['shelf::nets/model.py', 'shelf::_base_/data.py']\nlr = 0.2\n")
    cfg = Config.fromfile(child)
    assert (cfg.lr, cfg.batch, cfg.model.type) == (0.2, 8, "Net")
    assert cfg.model._scope_ == "shelf"  # there its names have their meaning
    with pytest.raises(ConfigError, match=r"wrong\.py:1: `_base_` .* no package `nowhere`"):
        Config.fromfile(write("wrong.py", "_base_ = 'nowhere::a.py'\n"))
