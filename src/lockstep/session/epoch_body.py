"""`EpochBody`: what the user's code does around the batches of an epoch, which a resumed training may run once more.

A loop of a Session is the user's own code: it may validate, step schedules, and call `log_metrics`, before the batches
of an epoch and after them. A training that stops there, or whose checkpoint is saved there, goes through this body of
the epoch once more when it is resumed, without its batches. So it must begin the body with the rates that were there
the first time, and pass over calls of `log_metrics` that have been recorded then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.dist import run_on_main
from lockstep.runner.options import as_text
from lockstep.runner.resumed_options import set_option
from lockstep.runner.run import TrainRun

_PLACE = ("mode", "epoch", "iter", "utc")  # of a record
_BODIES_ENDED = ".bodies_ended"  # in the folder of a run: a line for each epoch whose body has come to its end


class Rates:
    """The states of all schedules, and the options of the optimizers' groups, as they are now.

    Args:
        run: the run whose they are.
    """

    def __init__(self, run: TrainRun) -> None:
        self._run = run
        self._groups = run.optim_wrapper.param_groups
        # Not switches: a schedule-free optimizer has one for the weights that its parameters hold now.
        options = [{k: v for k, v in g.items() if k != "params" and not isinstance(v, bool)} for g in self._groups]
        self._values: tuple[list[dict[str, Any]], list[dict[str, Any]]] = deepcopy(
            (options, [schedule.state_dict() for schedule in run.param_schedulers])
        )

    @property
    def have_changed(self) -> bool:
        """Whether they are others by now. **Cost**: it waits for options that are on a device."""
        return Rates(self._run)._as_text() != self._as_text()

    def restore(self) -> bool:
        """Undo all changes since, but leave groups that were added since; return whether there were any."""
        before = Rates(self._run)._as_text()
        options, states = deepcopy(self._values)
        for group, values in zip(self._groups, options, strict=False):
            for key, value in values.items():
                set_option(group, key, value)
        for schedule, state in zip(self._run.param_schedulers, states, strict=True):
            schedule.load_state_dict(state)
        return Rates(self._run)._as_text() != before

    def _as_text(self) -> str:
        return as_text(self._values, reads_device=True)


class EpochBody:
    """Where the user's code is in the body of an epoch, and what a training that is resumed there must know.

    Args:
        run: the run.

    Attributes:
        is_running: whether the user's code is in a body.
        counts: once the batches are over, the loop's counts from before this epoch was counted; empty until then.
        has_ended: whether hooks have been told that the epoch has ended, by the training that is resumed.
        has_stopped: whether the training stops here, within a validation of the user's code.
        rest_follows: whether the epoch has been counted and saved, and the rest of its body is to follow.
    """

    def __init__(self, run: TrainRun) -> None:
        self._run = run
        self.is_running = self.has_ended = self.has_stopped = self.rest_follows = False
        self.counts: dict[str, Any] = {}
        self._rates: Rates | None = None  # when this part of the body began: before the batches, or after them
        self._logged = 0  # calls of `log_metrics` in this part of the body
        self._logged_before = [0.0, 0.0]  # those before the stop: in this part, and in the part after it

    def begin(self) -> None:
        """Begin the body of an epoch."""
        self.is_running, self._rates = True, Rates(self._run)

    def begin_batches(self, *, are_resumed: bool) -> bool:
        """Begin the epoch's batches; after a stop in them, with the rates of the checkpoint.

        Returns:
            Whether this has undone changes that the body has made once more.
        """
        assert self._rates is not None
        return are_resumed and self._rates.restore()

    def end_first_part(self) -> None:
        """Count calls of `log_metrics` anew, for the part of the body after the batches, which follow now."""
        self._logged, self._logged_before = 0, self._logged_before[1:] or [0]

    def end_batches(self) -> None:
        """Note the rates with which the part after the batches begins."""
        self._rates = Rates(self._run)

    def take_counts(self) -> dict[str, Any]:
        """Return `counts`, which the loop takes back to tell hooks of the end of the epoch; there are none then."""
        counts, self.counts, self._logged = self.counts, {}, 0
        return counts

    @property
    def has_changed(self) -> bool:
        """Whether this part of the body has logged or changed rates, which a checkpoint from before it lacks."""
        return bool(self._logged) or (self._rates is not None and self._rates.have_changed)

    def end(self) -> None:
        """End the body of an epoch."""
        self.counts, self._logged, self._logged_before = {}, 0, [0, 0]
        self.rest_follows = False

    def note_end(self, epochs: int) -> None:
        """Note in the folder of the run that the body of this epoch, counted from 1, has come to its end, and how."""
        if self._run.rank == 0 and self._rates is not None:
            noted = {"epochs": epochs, **self.done_in_rest()}
            file = self._run.run_dir / _BODIES_ENDED
            with suppress(OSError), file.open("a", encoding="utf-8") as lines:  # else the rest would run once more
                lines.write(f"{json.dumps(noted)}\n")

    def done_in_rest(self) -> dict[str, Any]:
        """Return what the rest of the body has done by now, which a training that is resumed here must know."""
        return {"logged": self._logged, "has_changed": self._rates is not None and self._rates.have_changed}

    def go_back(self) -> None:
        """Undo what this part of the body has changed, since a resumed training runs it once more after the stop."""
        if self.is_running and self._rates is not None:
            self._rates.restore()
            if self._logged:  # what has been saved at the end of the epoch before does not count it
                self._run.saving.saved_iter = 0

    def position(self, *, has_ended: bool = False) -> dict[str, Any]:
        """Return what a training that is resumed here must know; the loop's position holds it."""
        before, *after = self._logged_before
        logged = int(after[0]) if before == math.inf else max(self._logged, int(before))
        return {"logged": logged, "ended": self.has_ended or has_ended}

    def restore(self, position: Mapping[str, Any], *, in_batches: bool) -> None:
        """Pass over what has been logged in this body before the stop.

        Args:
            position: what `position` has returned.
            in_batches: whether the training stopped within the batches, or after them.
        """
        logged, self.has_ended = int(position.get("logged", 0)), bool(position.get("ended"))
        self._logged_before = [math.inf, logged] if in_batches else [logged, 0]

    def passes_over_metrics(self) -> bool:
        """Count a call of `log_metrics`, and return whether it was made before the stop."""
        if self.is_running:
            self._logged += 1
        return self.is_running and self._logged <= self._logged_before[0]

    @contextmanager
    def as_resumed(self) -> Iterator[None]:
        """Have inside the schedules and options of optimizers from which the rest of the body runs once more."""
        assert self._rates is not None
        now = Rates(self._run)
        self._rates.restore()
        try:
            yield
        finally:
            now.restore()


class RestOfBody(NamedTuple):
    """What the training that is resumed did in the rest of its last epoch's body, after it had saved the checkpoint.

    Attributes:
        logged: what `log_metrics` was given there.
        is_left: whether the rest is to run once more: it had not come to its end, as by a kill, or it had changed
            options of optimizers, which the checkpoint lacks.
    """

    logged: list[dict[str, Any]]
    is_left: bool


def rest_of_body(run: TrainRun, epochs: int, before: Mapping[str, Any]) -> RestOfBody:
    """Return what the records of the training that is resumed have of the rest of its last epoch's body.

    Where its folder is not there, only what the rest had changed before is known.

    **Collective**: every rank.

    Args:
        run: the run that resumes.
        epochs: the number of the epoch, counted from 1.
        before: what the checkpoint says of the rest: how many calls of `log_metrics` were `logged` in it by then,
            whether it `has_changed` options, and how many calls after this iteration hooks were `told` of in all.
    """
    source = run.resume_from
    folder = None if source is None else run.work_dir / source.parent.name
    if folder is None or folder == run.run_dir:  # a run of another work_dir may have the same name
        return RestOfBody([], is_left=before["has_changed"])

    def read() -> RestOfBody:
        logged = _validations(folder / "metrics.jsonl", run.iter)[before["told"] :]
        if not (folder / "log.txt").exists():
            return RestOfBody(logged, is_left=before["has_changed"])
        is_left = True
        for noted in _objects(folder / _BODIES_ENDED):
            if noted.get("epochs") == epochs:  # what was logged later was at the beginning of the next body
                since = int(noted.get("logged", 0)) - before["logged"]
                return RestOfBody(logged[: max(0, since)], is_left=bool(noted.get("has_changed")))
            is_left = is_left and int(noted.get("epochs", 0)) < epochs
        return RestOfBody(logged, is_left)

    return RestOfBody(*run_on_main(read))


def _validations(path: Path, iteration: int) -> list[dict[str, Any]]:
    found = [one for one in _objects(path) if (one.get("mode"), one.get("iter")) == ("val", iteration)]
    return [{name: _number(value) for name, value in one.items() if name not in _PLACE} for one in found]


def _objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON Lines; none if there is no such file."""
    found = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):  # a kill may have torn the last one
                if isinstance(one := json.loads(line), dict):
                    found.append(one)
    return found


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
