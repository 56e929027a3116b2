"""Blocks of a model of transformers that are compiled one by one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from lockstep.runner import Runner
from lockstep.testing import run_ranks

from .training import WORDS, make, whole_state


def train(folder: Path, compiled: bool) -> tuple[dict[str, Any], float, int]:
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    torch._dynamo.reset()
    counters.clear()
    loader = DataLoader([{"input_ids": row, "labels": row} for row in WORDS[:12]], batch_size=3)
    runner = Runner(
        make("llama"),
        folder,
        train_dataloader=loader,
        val_dataloader=loader,
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.5}},
        train_cfg={"max_epochs": 1},
        strategy="fsdp",
        compile={"backend": "aot_eager"} if compiled else False,
        log_level="WARNING",
    )
    runner.train()
    return whole_state(runner), runner.val()["loss"], counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_equal_blocks_share_what_is_compiled(tmp_path: Path) -> None:
    """Each block sees another state of a cache of keys and values, so that none is kept."""
    state, validated, graphs = run_ranks(2, train, tmp_path / "compiled", True)[0]
    expected, expected_loss, _ = run_ranks(2, train, tmp_path / "plain", False)[0]
    assert graphs == 2  # with gradients, and without
    assert validated == pytest.approx(expected_loss, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
