"""The schedules that the code of a Session's user steps: where they are, and what is said of those that stay behind."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import ceil
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import ConstantLR, SequentialLR

from lockstep.errors import listed
from lockstep.optim.build_schedulers import steps_in
from lockstep.optim.scheduler import LENGTHS
from lockstep.runner.run import TrainRun

At: TypeAlias = tuple[int, str, int]
"""The place of a schedule among those of the run, its name, and its count of steps."""


def schedules_some(schedule: Any, groups: Iterable[dict[str, Any]]) -> bool:
    """Return whether a schedule changes some of these groups of optimizers, or does not tell which it changes."""
    own = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    return own is None or any(one is other for one in own for other in groups)


def schedules_at(run: TrainRun) -> set[At]:
    """Return where each schedule of the run is that counts its steps."""
    schedules = [(type(one).__name__, steps_in(one.state_dict())) for one in run.param_schedulers]
    return {(place, name, count) for place, (name, count) in enumerate(schedules) if count is not None}


def warn_of_rest(run: TrainRun, begun_at: set[At]) -> None:
    """Warn of schedules that are where they were when the training began."""
    if resting := begun_at & schedules_at(run):
        run.logger.warning(
            "no step of %s since the training began: call scheduler.step(), after each epoch or each "
            "session.step(), as the schedule counts. The learning rates stay as they are",
            listed(name for _, name, _ in sorted(resting)),
        )


def warn_of_length(run: TrainRun, begun_at: set[At], done: int, left: int) -> None:
    """Warn of schedules that will be short of their end by an epoch's steps or more when the training ends.

    Args:
        run: the run.
        begun_at: where the schedules were when the training began.
        done: epochs since then.
        left: epochs from now to the end.
    """
    now = {place: count for place, _, count in schedules_at(run)}
    windows = Fraction(done * run.train_loop.epoch_length, getattr(run.optim_wrapper, "accumulative_counts", 1))
    for place, name, begun in sorted(begun_at):
        made, length = now[place] - begun, _length_of(run.param_schedulers[place])
        if not made or length is None:
            continue
        # A schedule that counts updates has not counted the window that is open.
        an_epoch = (windows if 0 <= windows - made < 1 else Fraction(made)) / done
        planned = begun + an_epoch * (done + left)
        if planned + an_epoch > length:
            continue
        run.logger.warning(
            "%s ends after %d steps, but makes %d until the training ends: the rates stop on their way. An epoch "
            "has %d batches on %s; len() of a loader that prepare() has not returned is another number on several "
            "ranks, and `accumulative_counts` batches make an update",
            name, length, ceil(planned), run.train_loop.epoch_length,
            "1 rank" if run.world_size == 1 else f"each of {run.world_size} ranks",
        )  # fmt: skip


def _length_of(schedule: Any) -> int | None:
    """Return after how many steps a gradual change of a schedule of torch's or transformers' is complete.

    None if it does not say so, or if it has no gradual change.
    """
    if isinstance(schedule, SequentialLR):
        last = _length_of(schedule._schedulers[-1])
        return None if last is None else int(schedule.state_dict()["_milestones"][-1]) + last
    if isinstance(schedule, ConstantLR):
        return None
    given = [getattr(schedule, name, None) for name in LENGTHS]
    keywords = [getattr(function, "keywords", {}) for function in getattr(schedule, "lr_lambdas", ())]
    given += [arguments.get("num_training_steps") for arguments in keywords]  # of transformers'
    return next((length for length in given if isinstance(length, int)), None)
