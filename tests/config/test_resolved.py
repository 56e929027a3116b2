"""A config handed to another process: equal values there, with what its files import, or nothing at all."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from lockstep.config import Config, ResolvedConfig


def test_another_process_gets_equal_values_without_the_files(write, monkeypatch):
    monkeypatch.setattr(sys, "registered", False, raising=False)
    write("zoo/registering.py", "import sys\nsys.registered = True\n")
    write("zoo/base.py", "import registering\nfrom collections import OrderedDict\nseed = 1\n")
    file = write(
        "config.py",
        """
        from __future__ import annotations
        from torch.optim import AdamW
        _base_ = "zoo/base.py"
        work_dir = "runs/{{ fileBasenameNoExtension }}"
        optimizer = dict(type=AdamW, betas=(0.9, 0.95))
        hooks = []
        for name in ("a", "b"):
            hooks.append(dict(name=name))
        """,
    )
    cfg = Config.fromfile(file)
    cfg.merge_from_dict({"optimizer.lr": 0.5})
    resolved = ResolvedConfig.of(cfg)
    assert resolved is not None
    file.write_text("raise RuntimeError('read again')")
    code = (
        "import json, sys\n"
        "from lockstep.config import ResolvedConfig\n"
        "cfg = ResolvedConfig(**json.loads(sys.argv[1])).config()\n"
        "print(cfg.pretty_text, cfg.filename, sys.registered)"
    )
    words = [sys.executable, "-c", code, json.dumps(asdict(resolved))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{cfg.pretty_text} {file} True\n"
    assert resolved.config() == cfg
    assert resolved.config().text == cfg.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.py", "scale = lambda: 2\nscales = [scale]\n"),  # no source form
        ("config.py", "class Own: ...\nmodel = dict(type=Own)\n"),
        ("config.py", "class Own: ...\n"),  # its bases may register it
        ("config.py", "import functools\n@functools.cache\ndef own(): ...\nlr = 1\n"),
        ("config.py", "import sys\nsys.setrecursionlimit(1000)\nlr = 1\n"),
        ("config.py", "try:\n    import apex\nexcept ImportError:\n    apex = None\n"),
        ("config.py", "if True:\n    import math\nlr = 1\n"),
    ],
)
def test_what_does_more_than_give_values_is_read_by_each_process(write, name: str, text: str):
    assert ResolvedConfig.of(Config.fromfile(write(name, text))) is None


def test_data_files_and_plain_functions_give_values_alone(write):
    assert ResolvedConfig.of(Config.fromfile(write("config.yaml", "lr: 1\n"))) is not None
    file = write("config.py", "def half(x):\n    return x / 2\nlr = half(1)\ncfg = dict(a=1)\ncfg.update(b=2)\n")
    resolved = ResolvedConfig.of(Config.fromfile(file))
    assert resolved is not None
    assert resolved.config() == {"lr": 0.5, "cfg": {"a": 1, "b": 2}}


def test_a_config_without_a_file_is_not_handed_on():
    assert ResolvedConfig.of(Config({"lr": 1})) is None
