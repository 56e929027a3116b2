from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent

import pytest
import torch  # noqa: F401 - so that commands in this process do not say that they load it
from typer.testing import CliRunner

from lockstep.cli.main import app

# A package beside the config, as a user would have it.
TOY = """
    import torch
    from torch import nn
    from torch.utils.data import Dataset
    from lockstep.model import BaseModel

    class Points(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor([float(index)]), torch.tensor([2.0 * index])

    class Line(BaseModel):
        def __init__(self, width=1):
            super().__init__()
            self.layer = nn.Linear(width, 1)

        def forward(self, x, y=None, mode="tensor"):
            return {"loss": (self.layer(x) - y).square().mean()}
"""
CONFIG = """
    model = dict(type="toy.Line")
    train_dataloader = dict(dataset=dict(type="toy.Points"), batch_size=2)
    optim_wrapper = dict(optimizer=dict(type="SGD", lr=1e-3))
    train_cfg = dict(by_epoch=True, max_epochs=1)
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a config, and the module that it names."""
    (tmp_path / "toy.py").write_text(dedent(TOY))
    (tmp_path / "line.py").write_text(dedent(CONFIG))
    return tmp_path


@pytest.fixture
def here(folder, monkeypatch):
    """Return a function that runs `lockstep` in this process, in the folder, and returns exit code, output, errors.

    It is for what ends before anything is trained; a process of its own would take seconds to import torch.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def here(*words):
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    yield here
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def lockstep(folder):
    """Return a function that runs `lockstep` in the folder, and returns its exit code, output, errors."""

    def lockstep(*words, before=(sys.executable, "-m", "lockstep"), env=None):
        done = subprocess.run(
            [*before, *words],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    return lockstep


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("jobs")
