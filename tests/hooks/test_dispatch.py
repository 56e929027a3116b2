"""Which methods of a hook are called at which points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.hooks import Hook
from lockstep.runner import Run, TrainRun
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

    def after_zzz(self) -> None: ...

    def on_train_batch_end(self, *args) -> None: ...

    def on_validation_end(self, *args) -> None: ...

    def on_fit_start(self, *args) -> None: ...

    def on_save_checkpoint(self, *args) -> None: ...

    def on_before_optimizer_step(self, *args) -> None: ...

    def on_our_own_start(self) -> None: ...

    def state_dict(self) -> None: ...


def test_methods_that_nobody_calls_are_told(tmp_path: Path):
    runner = make_runner(tmp_path, [Misspelt()], train_cfg={"max_epochs": 1})
    runner.train()
    log = (runner.run_dir / "log.txt").read_text()
    says = "of Misspelt is not a hook point, which only your own `call_hook` calls:"
    assert f"`after_train_itr` {says} did you mean `after_train_iter`?" in log
    of_callbacks = [name for name in vars(Misspelt) if name.startswith("on_") and name != "on_our_own_start"]
    for name in (*of_callbacks, "state_dict"):
        assert f"`{name}` {says} see docs/side-by-side.md" in log
    assert "on_our_own_start" not in log
    assert "after_zzz" not in log


class TakesTooLittle(Hook):
    main_only = True

    def after_train_epoch(self, *args, **kwargs) -> None: ...

    def after_val_iter(self, runner, batch_idx, **others) -> None: ...

    def after_test_iter(self, runner, index) -> None: ...


@ranks(1, 2)
def test_a_method_that_cannot_take_what_its_point_gives_is_refused_before_the_training(tmp_path):
    says = (
        r"`after_test_iter` of TakesTooLittle must be after_test_iter\(self, runner, batch_idx, data_batch, outputs\), "
        r"but its parameters are \(runner, index\)"
    )
    with pytest.raises(TypeError, match=says):
        make_runner(tmp_path, [TakesTooLittle()], train_cfg={"max_epochs": 1}).train()


class OfItsOwnPoint(Hook):
    """Calls hooks at a point of the project's own, and can't be closed."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_train_epoch(self, runner) -> None:
        runner.call_hook("my_point", what=runner.epoch)
        runner.call_hook("my_other_point")
        runner.call_hook("after_train_epochs")

    def my_point(self, runner, what: int) -> None:
        self.seen.append(what)

    def close(self) -> None:
        self.seen.append("closed")
        raise OSError("it can't be closed")


class Failing(Hook):
    def before_train(self, runner) -> None:
        raise ValueError("the run's own")


def test_a_project_has_points_of_its_own_and_a_hook_that_fails_to_close_leaves_none_open(tmp_path: Path):
    first, second = OfItsOwnPoint(), OfItsOwnPoint()
    runner = make_runner(tmp_path, [first, second], train_cfg={"max_epochs": 1})
    with pytest.raises(OSError, match="it can't be closed"):
        runner.train()
    assert first.seen == second.seen == [0, 0, "closed"]
    assert runner.run.records._file is None
    log = (runner.run_dir / "log.txt").read_text()
    assert (
        log.count("`call_hook` calls `after_train_epochs`, which no hook has: did you mean `after_train_epoch`?") == 1
    )
    assert "my_other_point" not in log
    failing = make_runner(tmp_path, [OfItsOwnPoint(), Failing()])
    with pytest.raises(ValueError, match="the run's own"):  # not the error of a hook that can't be closed
        failing.train()
    assert "not everything can be closed: OSError: it can't be closed" in (failing.run_dir / "log.txt").read_text()


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


class Registering(Hook):
    """Registers another hook in the first iteration."""

    def __init__(self, other: Hook, priority: str) -> None:
        self.other, self.chosen = other, priority

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == 0:
            runner.register_hook(self.other, priority=self.chosen)


def test_a_hook_that_is_registered_during_a_run_is_called_from_then_on(tmp_path: Path):
    late = InAllModes()
    runner = make_runner(tmp_path, [Registering(late, "HIGHEST")], train_cfg={"max_epochs": 1})
    runner.train()
    # Not at the point at which it is registered; at the next ones in its order.
    assert late.seen[:2] == [("after_iter 0", "train"), ("before_iter 1", "train")]
    assert next(iter(runner.hooks)) is late
    last = InAllModes()
    runner.register_hook(last)
    assert last in list(runner.hooks)


class OfTheRun(Hook):
    def before_run(self, runner) -> None:
        self.run = runner


def test_a_hook_gets_the_run_and_a_runner_has_its_parts(tmp_path: Path):
    hook = OfTheRun()
    runner = make_runner(tmp_path, [hook], train_cfg={"max_epochs": 1})
    runner.train()
    assert hook.run is runner.run
    for name in ("model", "optim_wrapper", "train_loop", "val_loop", "message_hub", "work_dir", "logger", "cfg"):
        assert getattr(hook.run, name) is getattr(runner, name) or name == "work_dir"
    assert (hook.run.epoch, hook.run.iter, hook.run.max_iters) == (runner.epoch, runner.iter, runner.max_iters)
    assert isinstance(runner.run, TrainRun)


def test_a_run_that_trains_nothing_has_no_optim_wrapper(tmp_path: Path):
    hook = OfTheRun()
    runner = make_runner(tmp_path, [hook], Scripted([1.0]))
    runner.val()
    assert type(hook.run) is Run
    assert (hook.run.epoch, hook.run.iter, hook.run.max_iters, hook.run.param_schedulers) == (0, 0, 0, [])
    assert not hasattr(hook.run, "optim_wrapper")
    with pytest.raises(AttributeError, match="`optim_wrapper` is built by train"):
        _ = runner.optim_wrapper


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
