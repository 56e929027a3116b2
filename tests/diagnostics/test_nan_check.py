"""A loss that is not finite on one rank ends the training of all, with its cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.checkpoint import find_last_checkpoint
from lockstep.diagnostics import nan_check
from lockstep.diagnostics.nan_check import _first_fault, _losses_in, _NonFinite
from lockstep.dist import all_gather_object, get_rank
from lockstep.hooks import NaNCheckHook
from lockstep.logging import read_scalars
from lockstep.testing import ranks

from ..hooks.runs import make_runner


class Fragile(nn.Module):
    """Its loss breaks in one iteration, on one rank, and recovers."""

    breaks_at, broken_rank, value = 3, 1, "nan"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 1))
        self.steps = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        broken = self.steps == self.breaks_at and get_rank() == self.broken_rank
        loss = (x @ self.weight - y).square().mean()
        # Added outside the graph, so that the weights of all ranks stay sound.
        return {"loss_cls": loss + float(self.value) if broken else loss, "loss_box": loss, "acc": loss * float("nan")}


class Infinite(Fragile):
    breaks_at, broken_rank, value = 6, 0, "inf"


class Sound(Fragile):
    breaks_at = -1


MESSAGES = {
    Fragile: "is not in iteration 3, counted from 1: rank 1 of 2: loss = nan, loss_cls = nan. Lower",
    Infinite: "is not in iteration 6, counted from 1: rank 0 of 2: loss = inf, loss_cls = inf. Lower",
}


@ranks(2)
@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("interval", [1, 2, 100])
@pytest.mark.parametrize("kind", MESSAGES)
def test_every_rank_raises_with_iteration_rank_and_losses(tmp_path: Path, kind, interval, by_epoch):
    checkpoint = None if by_epoch else {"type": "CheckpointHook", "by_epoch": False, "interval": 2}
    runner = make_runner(
        tmp_path, [NaNCheckHook(interval)], kind=kind, default_hooks={"checkpoint": checkpoint or {}},
        train_cfg={"max_epochs": 3} if by_epoch else {"max_iters": 12},
    )  # fmt: skip
    with pytest.raises(FloatingPointError, match=MESSAGES[kind]):
        runner.train()
    assert all_gather_object(get_rank()) == [0, 1]  # the group is usable, nobody waits
    if get_rank() == 0:  # what was saved was saved before
        found = find_last_checkpoint(tmp_path)
        saved = None if found is None else int(found.name.split("_")[1])
        assert saved == {(True, 3): None, (True, 6): 1, (False, 3): 2, (False, 6): 4}[by_epoch, kind.breaks_at]


@ranks(1, 2)
def test_a_sound_run_is_left_alone_whatever_else_is_logged(tmp_path: Path):
    runner = make_runner(tmp_path, [{"type": "NaNCheckHook", "interval": 3}], kind=Sound)
    runner.train()
    assert runner.iter == 8


@ranks(1, 2)
def test_a_batch_that_counts_for_nothing_may_have_any_loss(tmp_path: Path):
    def half(batch: Any) -> int:
        return 0 if runner.iter % 2 else len(batch[0])

    class EverySecond(Fragile):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            loss = super().forward(x, y)["loss_box"]
            return {"loss": loss + float("nan") if self.steps % 2 == 0 else loss}

    runner = make_runner(
        tmp_path, [NaNCheckHook(1)], kind=EverySecond, train_cfg={"max_epochs": 2, "batch_size_of": half}
    )
    runner.train()
    assert runner.iter == 8


@ranks(2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_check_goes_on_beside_iterations(tmp_path: Path, device: str):
    hook, iterations = NaNCheckHook(4), list[int]()
    check = hook._check_in_parts

    def noted(runner: Any) -> Iterator[None]:
        for _ in check(runner):
            iterations.append(runner.iter + 1)
            yield
        iterations.append(runner.iter + 1)

    with patch.object(nan_check, "get_device", lambda: device), patch.object(hook, "_check_in_parts", noted):
        make_runner(
            tmp_path, [hook], kind=Sound, train_cfg={"max_iters": 11}, default_hooks={"checkpoint": None}
        ).train()
    # The losses are copied, the result is exchanged, and it is there.
    assert iterations[:6] == ([4, 4, 5, 8, 8, 9] if device == "cpu" else [4, 5, 6, 8, 9, 10])


def train_until_infinite(session: Session) -> None:
    data = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2)
    model = nn.Linear(2, 1)
    with session:
        model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for _ in session.epochs(1):
            for (x,) in batches:
                session.step(model(x).mean() + (float("inf") if session.iter == 1 else 0.0))
                if session.iter == 2 or (session.world_size == 1 and session.iter == 1):
                    session.save("bad")


@ranks(1, 2)
def test_a_session_saves_nothing_when_it_closes_after_the_error(tmp_path: Path):
    session = Session(tmp_path, custom_hooks=[NaNCheckHook(2)], log_level="CRITICAL")
    with pytest.raises(FloatingPointError, match="is not in iteration 2"):
        train_until_infinite(session)
    assert not (session.run_dir / "bad").exists()


def seen(*values: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(place // 2 + 1, {f"loss_{place}": value}) for place, value in enumerate(values)]


def fault_in(values: list[tuple[int, dict[str, Any]]]) -> _NonFinite | None:
    losses = _losses_in(values)
    return _first_fault(losses, read_scalars(value for _, _, value in losses))


def test_values_of_any_kind_are_read():
    half, single, double = (torch.tensor([1.0], dtype=d) for d in (torch.float16, torch.float32, torch.float64))
    assert fault_in([]) is None
    assert fault_in(seen(1.0, half, single[0], double * 1e300, torch.tensor(3))) is None
    fault = fault_in(seen(half, 2.0, single / 0, float("nan"), double * float("nan")))
    assert fault.iteration == 2
    assert list(fault.values) == ["loss_2", "loss_3"]
    assert fault.values["loss_2"] == float("inf")


def test_a_wrong_interval_is_refused():
    with pytest.raises(ValueError, match="`interval` must be an int of at least 1, but is 0"):
        NaNCheckHook(0)
