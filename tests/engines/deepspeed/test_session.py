"""Loops written by hand under DeepSpeed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import Session
from lockstep.errors import ConfigError
from lockstep.testing import ranks

from ..own_loops import X, losses_by_hand, losses_of_two_models, losses_with_penalty

EXAMPLES = Path(__file__).parents[3] / "examples" / "own_loop"
STAGES = [{"type": "deepspeed", "zero_optimization": {"stage": stage}} for stage in (1, 2, 3)]


@pytest.mark.parametrize("strategy", STAGES, ids=["zero1", "zero2", "zero3"])
@ranks(1, 2)
def test_every_stage_computes_what_torch_does(tmp_path, strategy):
    for number, options in enumerate(({}, {"accumulative_counts": 2, "clip_grad": {"max_norm": 0.1}})):
        expected, outputs = losses_by_hand(tmp_path / f"torch_{number}", None, **options)
        losses, others = losses_by_hand(tmp_path / f"engine_{number}", strategy, **options)
        assert losses == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(others, outputs, rtol=0, atol=1e-5)


@ranks(2)
def test_a_loop_goes_on_under_another_strategy(tmp_path):
    expected, _ = losses_by_hand(tmp_path / "whole", None, 3)
    losses_by_hand(tmp_path / "moved", STAGES[1], 1)
    losses_by_hand(tmp_path / "moved", "fsdp", 2, resume=True)
    (last,), _ = losses_by_hand(tmp_path / "moved", STAGES[2], 3, resume=True)
    assert last == pytest.approx(expected[-1], abs=1e-6)


@ranks(2)
def test_several_optimizers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="one optimizer"):
        losses_of_two_models(tmp_path, STAGES[0])


@ranks(2)
def test_an_iteration_without_a_backward_pass_says_so(tmp_path):
    session = Session(tmp_path, strategy=STAGES[0], log_level="ERROR")
    model: nn.Module = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    _, _, batches = session.prepare(model, optimizer, torch.utils.data.DataLoader(X, batch_size=4))
    next(session.epochs(1))
    with pytest.raises(RuntimeError, match="must run its backward pass by"):
        list(batches)


@pytest.mark.parametrize("strategy", STAGES, ids=["zero1", "zero2", "zero3"])
@ranks(2)
def test_a_penalty_on_gradients_is_refused(tmp_path, strategy):
    with pytest.raises(ConfigError, match=r"must not be differentiated again .* because DeepSpeed's engine"):
        losses_with_penalty(tmp_path, strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
@pytest.mark.parametrize(("example", "accuracy"), [("huggingface", 0.9), ("lora", 0.6)])
def test_loops_over_models_of_transformers_and_peft_learn(tmp_path, example, accuracy, strategy):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "launch", str(EXAMPLES / f"{example}.py"), "--nproc", "2", strategy],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"^result +accuracy ([\d.]+)", done.stdout, re.MULTILINE)[0]) >= accuracy
