from __future__ import annotations

import collections
import re
import sys

import pytest

from lockstep.config import Config, read_base
from lockstep.errors import ConfigError

MODEL = """
    from collections import OrderedDict

    def twice(x):
        return 2 * x

    model = dict(type=OrderedDict, head=dict(width=twice(3), bias=True))
    lr = 0.1
    kind = OrderedDict
"""


@pytest.fixture
def child(write):
    """Return a function that writes a config beside a folder of bases, and reads it."""
    write("_base_/model.py", MODEL)
    write("_base_/data.py", "_base_ = 'sizes.yaml'\ntrain_dataloader = dict(batch_size=_base_.size)\n")
    write("_base_/sizes.yaml", "size: 4\n")

    def child(text, name="configs/child.py"):
        return Config.fromfile(write(name, text))

    return child


def test_registries_that_an_import_brings_are_no_keys(child):
    cfg = child("""
        from lockstep.registry import *
        from lockstep.config import read_base

        with read_base():
            from .._base_.data import size
    """)
    assert cfg == {"size": 4}


def test_a_class_that_is_assigned_in_a_block_or_unpacked_is_a_key(child):
    cfg = child("""
        import collections
        from collections import Counter

        if len("fast"):
            act = collections.OrderedDict
        else:
            act = Counter
        for kind in [Counter]:
            norm = kind
        width, (conv, *_) = 3, [collections.deque]

        def helper():
            Counter = None
    """)
    assert cfg == {
        "act": collections.OrderedDict, "norm": collections.Counter, "width": 3, "conv": collections.deque, "_": [],
    }  # fmt: skip


def test_imported_keys_are_keys_and_can_be_changed_in_place(child):
    cfg = child("""
        import math
        from lockstep.config import read_base

        with read_base():
            from .._base_.model import *
            from .._base_.data import size, train_dataloader, train_dataloader as val_dataloader

        model.head.width += 1
        model.merge(dict(head=dict(depth=2)))
        val_dataloader.update(shuffle=False)
        lr = math.pi
    """)
    assert cfg == {
        "model": {"type": cfg.kind, "head": {"width": 7, "bias": True, "depth": 2}},
        "lr": cfg.lr,
        "kind": cfg.kind,
        "size": 4,
        "train_dataloader": {"batch_size": 4},
        "val_dataloader": {"batch_size": 4, "shuffle": False},
    }
    assert cfg.kind.__name__ == "OrderedDict"
    order = [cfg.text.index(name) for name in ("model.py\n", "sizes.yaml\n", "data.py\n", "child.py\n")]
    assert order == sorted(order)


def test_it_can_be_dumped_and_printed(child, tmp_path):
    cfg = child("with read_base():\n    from .._base_.model import model, kind\n")
    assert cfg.pretty_text == (
        "import collections\n\n"
        "model = dict(type=collections.OrderedDict, head=dict(width=6, bias=True))\n"
        "kind = collections.OrderedDict\n"
    )
    cfg.dump(tmp_path / "dumped.py")
    assert Config.fromfile(tmp_path / "dumped.py") == cfg


def test_generations_and_both_styles_go_together(child, write):
    write("configs/middle.py", "with read_base():\n    from .._base_.model import *\nlr = 0.5\n")
    assert child("with read_base():\n    from .middle import *\nlr *= 2\n").lr == 1.0
    assert child("_base_ = 'middle.py'\nmodel = dict(head=dict(bias=False))\n").model.head.bias is False


def test_a_config_in_an_installed_package_is_found(child, write, monkeypatch):
    write("site/toy_zoo/__init__.py", "")
    path = write("site/toy_zoo/configs/base.py", "lr = 0.25\n")
    monkeypatch.syspath_prepend(path.parents[2])
    assert child("with read_base():\n    from toy_zoo.configs.base import *\n") == {"lr": 0.25}


def test_for_python_the_context_does_nothing():
    before = dict(sys.modules)
    with read_base():
        from json import dumps
    assert dumps(1) == "1"
    assert set(sys.modules) == set(before)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "_base_ = '../_base_/model.py'\nwith read_base():\n    from .._base_.data import *\n",
            "child.py:1: `_base_` must not be in a file with read_base(), whose bases' keys are variables: write `lr`",
        ),
        (
            "with read_base():\n    from .._base_.model import *\nwidth = {{ _base_.model.width }}\n",
            "child.py:3: `_base_` must not be in a file with read_base()",
        ),
        (
            "with read_base():\n    from .._base_.model import *\nname = 'net_{{ _base_.model.width }}'\n",
            "child.py: `{{ _base_.model.width }}` must name a key of the bases, but they have no `model` there. What "
            "read_base() has imported is a variable: write `model.width` without quotes",
        ),
        (
            "\nwith read_base():\n    from .._base_.model import modle\n",
            "child.py:3: `modle` is not a key of {base}/model.py, did you mean `model`?",
        ),
        (
            "with read_base():\n    from .._base_.model import twice\n",
            "child.py:2: `twice` is not a key of {base}/model.py. What is no key (a function, a class, a module) is "
            "imported outside of read_base()",
        ),
        (
            "with read_base():\n    from .._base_.modle import *\n",
            "child.py:2: `read_base()` names a file that is missing: there is no config file `{base}/modle.py`; "
            "did you mean `{base}/model.py`?",
        ),
        ("with read_base():\n    from .child import *\n", "child.py:2: `read_base()` leads in a circle"),
        (
            "with read_base():\n    import json\n",
            "child.py:2: read_base() must hold nothing but imports such as `from .base import *`, but holds "
            "`import json`",
        ),
        ("with read_base():\n    lr = 1\n", "child.py:2: read_base() must hold nothing but imports"),
        ("with read_base():\n    from . import x\n", "child.py:2: read_base() must hold nothing but imports"),
        (
            "def f():\n    with read_base():\n        from .._base_.model import *\n",
            "child.py:2: read_base() must stand at the top level",
        ),
        (
            "with read_base():\n    from base_of_nowhere.x import *\n",
            "child.py:2: there is no package `base_of_nowhere` to import a config from; one beside this file takes a "
            "dot, as in `from .base_of_nowhere import *`",
        ),
        ("with read_base():\n    from .._base_.model import *\nmodel.haed.width\n", "child.py:3: AttributeError"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(child, tmp_path, text, says):
    with pytest.raises(ConfigError, match=re.escape(says.replace("{base}", str(tmp_path / "_base_")))):
        child(text)


def test_a_script_that_reads_its_arguments_is_told_how_to_run_it(tmp_path, capsys):
    file = tmp_path / "script.py"
    file.write_text("import argparse\n\nargparse.ArgumentParser().parse_args(['--lr'])\n")
    with pytest.raises(
        ConfigError, match=r"script.py:3: a config must not exit, .* run it by `python script.py`, or on"
    ):
        Config.fromfile(file)
    capsys.readouterr()
