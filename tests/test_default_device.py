"""What lockstep makes for itself lies where it says, also where a script has set torch's default device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
from lockstep.checkpoint import load_state
from lockstep.checkpoint.background import BackgroundSaver
from lockstep.dataset.order import drawn_order

SOURCES = Path(lockstep.__file__).parent
NAMES = "arange empty eye full linspace ones rand randint randn randperm range tensor tril_indices triu_indices zeros"
MAKE = {f"torch.{name}" for name in NAMES.split()}
OF_A_MODEL = {"model/image.py"}  # its buffers are made where its parameters are


def calls_without_device() -> Iterator[str]:
    for file in sorted(SOURCES.rglob("*.py")):
        place = file.relative_to(SOURCES).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in MAKE or place in OF_A_MODEL:
                continue
            if all(keyword.arg != "device" for keyword in node.keywords):
                yield f"{place}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_is_made_on_a_device_that_is_named():
    assert list(calls_without_device()) == []


@pytest.fixture
def _elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")  # where nothing can be read
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_elsewhere")
def test_a_state_is_copied_and_read_in_memory_of_the_host(tmp_path: Path):
    weight = torch.arange(6.0, device="cpu").reshape(2, 3)
    saver = BackgroundSaver()
    saver.start(tmp_path / "checkpoint", {"weight": weight, "part": weight[:, 1]}, {"epoch": 1, "iter": 1})
    saver.wait()
    into = {"weight": torch.zeros(3, 2, device="cpu").t(), "part": torch.zeros(2, device="cpu")}
    loaded = load_state(tmp_path / "checkpoint", into)
    assert loaded["weight"].tolist() == weight.tolist()
    assert loaded["part"].tolist() == weight[:, 1].tolist()


@pytest.mark.usefixtures("_elsewhere")
def test_an_order_is_drawn_by_the_host():
    order = drawn_order(5, torch.Generator().manual_seed(0))
    assert sorted(order(np.arange(5))) == [0, 1, 2, 3, 4]
