"""The strategy that CONTRIBUTING.md walks through, examples/local_sgd, as a stranger would write it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.strategy import DDPStrategy, Strategy
from lockstep.testing import run_ranks

from .transformer import own_batches, seeded, train_by_runner

FILE = Path(__file__).parents[2] / "examples" / "local_sgd" / "local_sgd.py"
SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}


def example() -> ModuleType:
    if "local_sgd" not in sys.modules:
        spec = importlib.util.spec_from_file_location("local_sgd", FILE)
        sys.modules["local_sgd"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["local_sgd"])
    return sys.modules["local_sgd"]


def weights_after(name: str, steps: int, **options) -> list[torch.Tensor]:
    """Train a few steps of SGD; return this rank's weights."""
    strategy: Strategy = DDPStrategy() if name == "ddp" else example().LocalSGDStrategy(**options)
    torch.manual_seed(get_rank())  # the strategy has to see to it that all begin alike
    model, wrapper = strategy.prepare(seeded() if get_rank() == 0 else seeded().apply(scramble), SGD)
    for inputs, targets in own_batches()[:steps]:
        wrapper.update_params(model(inputs, targets))
    return [parameter.detach().clone() for parameter in model.parameters()]


def scramble(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def test_the_mean_after_every_update_of_sgd_is_that_of_the_gradients():
    by_ddp, by_mean = run_ranks(2, weights_after, "ddp", 5), run_ranks(2, weights_after, "local_sgd", 5, interval=1)
    for wanted, present in zip(by_ddp[0], by_mean[1], strict=True):
        torch.testing.assert_close(present, wanted)


def test_ranks_go_apart_between_two_means_and_agree_after_each():
    apart, agreed = (run_ranks(2, weights_after, "local_sgd", steps, interval=4) for steps in (3, 4))
    assert not all(torch.equal(a, b) for a, b in zip(*apart, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*agreed, strict=True))


def save_and_resume(work_dir: Path) -> tuple[list[float], list[float]]:
    saving = {"checkpoint": {"by_epoch": False, "interval": 10}}
    losses = train_by_runner(work_dir, strategy=example().LocalSGDStrategy(interval=4), default_hooks=saving)
    (saved,) = work_dir.glob("*/iter_10")
    return losses, train_by_runner(work_dir / "resumed", strategy="ddp", load_from=saved, resume=True)


def test_its_checkpoint_holds_the_mean_and_is_resumed_under_ddp(tmp_path: Path):
    for losses, resumed in run_ranks(2, save_and_resume, tmp_path):
        assert (len(losses), len(resumed)) == (20, 10)
        # Saving has averaged the weights, so that both go on with the same; then gradients are averaged, or not.
        assert resumed[0] == losses[10]
        assert resumed[1:] == pytest.approx(losses[11:], rel=0.1)
        assert resumed[1:] != losses[11:]


def test_an_interval_must_be_positive():
    with pytest.raises(ConfigError, match="`interval` must be at least 1, but is 0"):
        example().LocalSGDStrategy(interval=0)
