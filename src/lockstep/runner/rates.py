"""`Rates`: what schedules and optimizers have at one moment, to undo what the user's code changes after it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lockstep.optim import OptimWrapperDict
from lockstep.runner.run import TrainRun


class Rates:
    """The states of all schedules, and the options of the optimizers' groups, as they are now.

    Args:
        run: the run whose they are.
    """

    def __init__(self, run: TrainRun) -> None:
        wrapper = run.optim_wrapper
        wrappers = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        self._run = run
        self._groups = [group for one in wrappers for group in one.param_groups]
        # Not switches: a schedule-free optimizer has one for the weights that its parameters hold now.
        options = [{k: v for k, v in g.items() if k != "params" and not isinstance(v, bool)} for g in self._groups]
        self._values: tuple[list[dict[str, Any]], list[dict[str, Any]]] = deepcopy(
            (options, [schedule.state_dict() for schedule in run.param_schedulers])
        )

    @property
    def have_changed(self) -> bool:
        """Whether they are others now. **Cost**: it waits for options that are on a device."""
        return repr(Rates(self._run)._values) != repr(self._values)

    def restore(self) -> bool:
        """Undo all changes since; return whether there were any."""
        is_changed = self.have_changed
        options, states = deepcopy(self._values)
        for group, values in zip(self._groups, options, strict=True):
            group.update(values)
        for schedule, state in zip(self._run.param_schedulers, states, strict=True):
            schedule.load_state_dict(state)
        return is_changed
