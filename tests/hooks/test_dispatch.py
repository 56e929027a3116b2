"""Which methods of a hook are called at which points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.hooks import Hook
from lockstep.testing import ranks

from .runs import Scripted, make_runner


class InAllModes(Hook):
    """Does the same in all modes, but for the iterations of training."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def _before_epoch(self, runner, mode: str = "train") -> None:
        self.seen.append(("before_epoch", mode))

    def _after_epoch(self, runner, mode: str = "train") -> None:
        self.seen.append(("after_epoch", mode))

    def _before_iter(self, runner, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        assert len(data_batch) == 2
        self.seen.append((f"before_iter {batch_idx}", mode))

    def _after_iter(self, runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode="train") -> None:
        assert outputs is not None
        self.seen.append((f"after_iter {batch_idx}", mode))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if batch_idx == 0:
            super().after_train_iter(runner, batch_idx, data_batch, outputs)


@ranks(1, 2)
def test_a_method_for_all_modes_is_called_where_none_is_for_one(tmp_path: Path):
    hook = InAllModes()
    make_runner(tmp_path, [hook], Scripted([1.0]), train_cfg={"max_epochs": 1}).train()
    training = [("before_iter 0", "train"), ("after_iter 0", "train")]
    training += [(f"before_iter {index}", "train") for index in (1, 2, 3)]
    validation = [(f"{when}_iter {index}", "val") for index in range(4) for when in ("before", "after")]
    assert hook.seen == [
        *[("before_epoch", "train"), *training, ("after_epoch", "train")],
        *[("before_epoch", "val"), *validation, ("after_epoch", "val")],
    ]


class Misspelt(Hook):
    def after_train_itr(self, runner, batch_idx) -> None: ...

    def before_epoch(self, runner) -> None: ...

    def after_zzz(self) -> None: ...


def test_methods_that_nobody_calls_are_told(tmp_path: Path):
    runner = make_runner(tmp_path, [Misspelt()], train_cfg={"max_epochs": 1})
    runner.train()
    log = (runner.run_dir / "log.txt").read_text()
    assert (
        "`after_train_itr` of Misspelt is no point of a run, and is never called: did you mean `after_train_iter`"
        in log
    )
    assert "`before_epoch` of Misspelt" in log
    assert "after_zzz" not in log


def test_hooks_can_be_looked_through_and_get_a_priority(tmp_path: Path):
    first, second = InAllModes(), InAllModes()
    runner = make_runner(tmp_path, [first], train_cfg={"max_epochs": 1})
    runner.register_hook(second, priority="VERY_HIGH")
    runner.register_hook({"type": "EmptyCacheHook"}, priority=1)
    runner.train()
    names = [type(hook).__name__ for hook in runner.hooks]
    assert len(runner.hooks) == len(names)
    assert names[:2] == ["EmptyCacheHook", "InAllModes"]
    assert list(runner.hooks)[1] is second


@pytest.mark.parametrize(("start", "due"), [(0, [2, 4, 6]), (3, [3, 5, 7])])
def test_counting_may_start_later(start: int, due: list[int]):
    class Place:
        epoch = iter = 0

    counted = []
    for Place.epoch in range(7):
        Place.iter = Place.epoch
        assert Hook.every_n_epochs(Place, 2, start) == Hook.every_n_train_iters(Place, 2, start)  # type: ignore[arg-type]
        if Hook.every_n_epochs(Place, 2, start):  # type: ignore[arg-type]
            counted.append(Place.epoch + 1)
    assert counted == due
    assert [Hook.end_of_epoch([1, 2, 3], index) for index in range(3)] == [False, False, True]
