"""One loss curve: by hand, by a Runner, and by each strategy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from lockstep.strategy import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lockstep.testing import run_ranks

from .transformer import STEPS, mean_over_ranks, train_by_hand, train_by_runner, train_by_strategy


def by_strategy(strategy, counts: int, clip: bool) -> tuple[list[float], list[float]]:
    losses, norms = train_by_strategy(strategy, counts, clip)
    return mean_over_ranks(losses), norms


@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "ddp")])
def test_a_runner_trains_bit_by_bit_as_a_loop_by_hand(size: int, strategy: str, tmp_path: Path):
    by_hand = [losses for losses, _ in run_ranks(size, train_by_hand)]
    by_runner = run_ranks(size, train_by_runner, tmp_path, strategy=strategy)
    assert by_runner == by_hand
    assert len(by_hand[0]) == STEPS
    assert by_hand[0][-1] < by_hand[0][0]


@pytest.mark.parametrize(("size", "kind"), [(1, SingleDeviceStrategy), (2, DDPStrategy)])
def test_accumulation_and_clipping_are_bit_by_bit_those_by_hand(size: int, kind: type):
    by_hand = run_ranks(size, train_by_hand, 1, True)
    assert run_ranks(size, train_by_strategy, kind(), 1, True) == by_hand
    if size == 1:  # by hand, DDP would also need no_sync
        assert run_ranks(size, train_by_strategy, kind(), 2, True) == run_ranks(size, train_by_hand, 2, True)


@cache
def in_one_process(counts: int) -> tuple[list[float], list[float]]:
    return run_ranks(1, train_by_hand, counts, True)[0]


@pytest.mark.parametrize(
    ("size", "counts", "options"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (2, 2, {}),
        (2, 2, {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True}),
        (2, 1, {"sharding_strategy": "NO_SHARD"}),
        (2, 2, {"activation_checkpointing": ["TransformerEncoderLayer"], "cpu_offload": True}),
        (4, 1, {}),
        (4, 2, {"device_mesh": (2, 2)}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "full" if isinstance(value, dict) else str(value),
)
def test_fsdp_has_the_losses_and_global_gradient_norms_of_one_process(size: int, counts: int, options: dict):
    losses, norms = in_one_process(counts)
    for rank_losses, rank_norms in run_ranks(size, by_strategy, FSDPStrategy(**options), counts, True):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        # The first norm is of equal weights; the later ones are of weights that differ in their last bits.
        assert rank_norms[0] == pytest.approx(norms[0], rel=1e-6)
        assert rank_norms == pytest.approx(norms, rel=1e-5)
        assert len(rank_norms) == STEPS


def test_a_runner_trains_under_fsdp_by_its_name(tmp_path: Path):
    (by_hand, _) = run_ranks(1, train_by_hand)[0]
    by_runner = run_ranks(2, train_by_runner, tmp_path, strategy="fsdp")
    means = [sum(step) / 2 for step in zip(*by_runner, strict=True)]
    assert means == pytest.approx(by_hand, rel=1e-5)
