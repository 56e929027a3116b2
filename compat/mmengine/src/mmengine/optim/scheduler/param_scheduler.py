"""Schedules that go from value to value, as MMEngine's do, with lockstep's base class.

lockstep's own schedules are formulas of the time since they began. These compute each value from the one before, by the
rules of torch's chainable schedulers, and so give the same bits as MMEngine; and users' subclasses define `_get_value`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from torch.optim import Optimizer

from lockstep.optim import ParamScheduler
from lockstep.optim import ReduceOnPlateauLR as ReduceOnPlateauParamScheduler
from mmengine.logging import print_log
from mmengine.registry import PARAM_SCHEDULERS

INF = int(1e9)
"""The `end` of a schedule that has none."""

# What a schedule counts and notes.
_PROGRESS = frozenset({"base_values", "last_step", "_global_step", "_last_value"})
# Beside it, what is no argument of a schedule, or what its text says anyhow.
_NOT_SHOWN = _PROGRESS | {"optimizer", "begin", "end", "by_epoch", "verbose"}
# Of a `OneCycleParamScheduler`, what follows from the arguments; here and in MMEngine.
_PHASES = ("_phases", "_schedule_phases", "_cycle")

__all__ = [
    "INF",
    "ConstantParamScheduler",
    "CosineAnnealingParamScheduler",
    "CosineRestartParamScheduler",
    "ExponentialParamScheduler",
    "LinearParamScheduler",
    "MultiStepParamScheduler",
    "OneCycleParamScheduler",
    "PolyParamScheduler",
    "ReduceOnPlateauParamScheduler",
    "StepParamScheduler",
    "_ParamScheduler",
]


class _ParamScheduler(ParamScheduler):
    """Base class: a subclass returns the next value of each parameter group from `_get_value`.

    Args:
        optimizer: the optimizer, or the optim wrapper of one.
        param_name: what is changed, such as `"lr"`.
        begin: the count at which the schedule starts.
        end: the count from which the schedule no longer changes the value.
        last_step: the count that was reached, if the optimizer's groups have the values of an earlier run; -1 to start.
        by_epoch: count epochs; otherwise batches.
        verbose: print each value.

    Attributes:
        base_values: the value that each group had before any schedule.
        last_step: counts within the window so far.
    """

    # `end` defaults to the end of the training.
    needs_end: ClassVar[bool] = True
    count_key: ClassVar[str] = "_global_step"

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"`optimizer` must be an Optimizer or an OptimWrapper, but is {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.param_name = param_name
        end = INF if end is None or math.isinf(end) else end
        if end <= begin:
            raise ValueError(f"`end` must be above `begin`, but they are {end} and {begin}")
        self.begin, self.end, self.by_epoch, self.verbose = begin, end, by_epoch, verbose
        self._begin(last_step)

    def _begin(self, last_step: int) -> None:
        """Begin at the values that the groups have now."""
        first = f"initial_{self.param_name}"
        for index, group in enumerate(self.optimizer.param_groups):
            if last_step == -1:
                group.setdefault(first, self._read(group))
            elif first not in group:
                raise KeyError(f"parameter group {index} must have `{first}` to continue at `last_step` {last_step}")
        self.base_values = [group[first] for group in self.optimizer.param_groups]
        self.last_step = last_step
        self._global_step = -1
        self._last_value: list[float] = []
        self.step()

    def _get_value(self) -> list[float]:
        """Return the value of each parameter group at `last_step`."""
        raise NotImplementedError

    def advance(self, t: int) -> None:
        """Set the values that `_get_value` returns."""
        for index, (group, value) in enumerate(zip(self.optimizer.param_groups, self._get_value(), strict=True)):
            self._write(group, value)
            self.print_value(self.verbose, index, value)

    def step(self) -> None:
        """Count one epoch or batch, and set the values for the next one."""
        self._global_step += 1
        if self.is_active:
            self.last_step += 1
            self.advance(self.last_step)
        self._last_value = super().get_last_value()

    def restart(self) -> None:
        """Begin anew, from the values that the groups have now."""
        self._begin(-1)

    @property
    def is_active(self) -> bool:
        """Whether the current count lies in the window."""
        return self.begin <= self._global_step < int(self.end or INF)

    def get_last_value(self) -> list[float]:
        """Return the value of every parameter group after the last step."""
        return self._last_value

    def print_value(self, is_verbose: bool, group: int, value: float) -> None:
        """Print a value, if it is wanted."""
        if is_verbose:
            print_log(f"`{self.param_name}` of group {group} is {value:.4e}", logger="current")

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the optimizer, and functions, which no checkpoint holds."""
        return {name: value for name, value in vars(self).items() if name != "optimizer" and not callable(value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update({name: value for name, value in state.items() if not callable(value)})

    def _shown(self) -> list[str]:
        """Return what the arguments have set, as `name=value`."""
        return [f"{name}={value!r}" for name, value in sorted(vars(self).items()) if name not in _NOT_SHOWN]

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Restore the counts and values of a scheduler with other arguments."""
        self.load_state_dict({**self.state_dict(), **{name: state[name] for name in _PROGRESS if name in state}})

    @classmethod
    def build_iter_from_epoch(
        cls,
        *args: Any,
        begin: int = 0,
        end: int = INF,
        by_epoch: bool = True,
        epoch_length: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return a schedule that counts batches, from arguments that are in epochs.

        Args:
            *args: arguments of the class; the optimizer comes first.
            begin: in epochs.
            end: in epochs.
            by_epoch: must be True.
            epoch_length: batches in an epoch.
            **kwargs: further arguments, those that are durations in epochs.
        """
        if not by_epoch:
            raise AssertionError("`by_epoch` must be True for a schedule that is to be converted, but is False")
        if not isinstance(epoch_length, int) or epoch_length <= 0:
            raise AssertionError(f"`epoch_length` must be an int above 0, but is {epoch_length!r}")
        given: dict[str, Any] = {"begin": begin, **kwargs}
        if end != INF:
            given["end"] = end
        return cls(*args, **{**cls.stretched(given, epoch_length), "by_epoch": False})

    def _values(self) -> list[float]:
        return [self._read(group) for group in self.optimizer.param_groups]

    def _window(self) -> int:
        return int(self.end or INF) - self.begin


@PARAM_SCHEDULERS.register_module()
class ConstantParamScheduler(_ParamScheduler):
    """Multiply the value by a factor until the window ends, and divide it by the factor then.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        factor: from 0 to 1.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(self, optimizer: Any, param_name: str, factor: float = 1.0 / 3, **kwargs: Any) -> None:
        if not 0 <= factor <= 1:
            raise ValueError(f"`factor` must be from 0 to 1, but is {factor}")
        self.factor = factor
        self.total_iters = _length(kwargs) - 1
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self) -> list[float]:
        if self.last_step == 0:
            return [value * self.factor for value in self._values()]
        if self.last_step != self.total_iters:
            return self._values()
        return [value * (1.0 / self.factor) for value in self._values()]


@PARAM_SCHEDULERS.register_module()
class CosineAnnealingParamScheduler(_ParamScheduler):
    """Follow half a cosine from the first value down to `eta_min`.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        T_max: counts until the minimum; by default the window's length.
        eta_min: the lowest value; by default 0.
        eta_min_ratio: the lowest value as a fraction of the first one, in place of `eta_min`.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        T_max: int | None = None,  # noqa: N803 - torch's and MMEngine's name
        eta_min: float | None = None,
        eta_min_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        if eta_min is None and eta_min_ratio is None:
            eta_min = 0.0
        if (eta_min is None) == (eta_min_ratio is None):
            raise AssertionError("either `eta_min` or `eta_min_ratio` may be given, but both are")
        self.T_max = T_max or _length(kwargs)
        self.eta_min, self.eta_min_ratio = eta_min, eta_min_ratio
        super().__init__(optimizer, param_name, **kwargs)

    def _get_eta_min(self, base_value: float) -> float:
        if self.eta_min_ratio is None:
            assert self.eta_min is not None
            return self.eta_min
        return base_value * self.eta_min_ratio

    def _get_value(self) -> list[float]:
        if self.last_step == 0:
            return self._values()
        pairs = [
            (value, base, self._get_eta_min(base)) for value, base in zip(self._values(), self.base_values, strict=True)
        ]
        if (self.last_step - 1 - self.T_max) % (
            2 * self.T_max
        ) == 0:  # the minimum is behind: a ratio to it has no sense
            return [value + (base - low) * (1 - math.cos(math.pi / self.T_max)) / 2 for value, base, low in pairs]
        ratio = (1 + math.cos(math.pi * self.last_step / self.T_max)) / (
            1 + math.cos(math.pi * (self.last_step - 1) / self.T_max)
        )
        return [ratio * (value - low) + low for value, _, low in pairs]


@PARAM_SCHEDULERS.register_module()
class ExponentialParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` at each count.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        gamma: the factor.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(self, optimizer: Any, param_name: str, gamma: float, **kwargs: Any) -> None:
        self.gamma = gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self) -> list[float]:
        return self._values() if self.last_step == 0 else [value * self.gamma for value in self._values()]


@PARAM_SCHEDULERS.register_module()
class LinearParamScheduler(_ParamScheduler):
    """Go in a line from `start_factor` times the value to `end_factor` times it, at the last count of the window.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        start_factor: above 0 and at most 1.
        end_factor: from 0 to 1.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(
        self, optimizer: Any, param_name: str, start_factor: float = 1.0 / 3, end_factor: float = 1.0, **kwargs: Any
    ) -> None:
        if not 0 < start_factor <= 1:
            raise ValueError(f"`start_factor` must be above 0 and at most 1, but is {start_factor}")
        if not 0 <= end_factor <= 1:
            raise ValueError(f"`end_factor` must be from 0 to 1, but is {end_factor}")
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = _length(kwargs) - 1
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self) -> list[float]:
        if self.last_step == 0:
            return [value * self.start_factor for value in self._values()]
        rise = self.end_factor - self.start_factor
        before = self.total_iters * self.start_factor + (self.last_step - 1) * rise
        return [value * (1.0 + rise / before) for value in self._values()]


@PARAM_SCHEDULERS.register_module()
class MultiStepParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` at each milestone.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        milestones: counts.
        gamma: the factor.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(
        self, optimizer: Any, param_name: str, milestones: Sequence[int], gamma: float = 0.1, **kwargs: Any
    ) -> None:
        self.milestones: Counter[int] = Counter(milestones)
        self.gamma = gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self) -> list[float]:
        times = self.milestones[self.last_step]
        return [value * self.gamma**times for value in self._values()] if times else self._values()

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the optimizer; the milestones as a list."""
        return {**super().state_dict(), "milestones": sorted(self.milestones.elements())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, or MMEngine's, in which the milestones are a Counter."""
        super().load_state_dict({**state, "milestones": Counter(state["milestones"])})


@PARAM_SCHEDULERS.register_module()
class StepParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` after each `step_size` counts.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        step_size: counts from one change to the next.
        gamma: the factor.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(self, optimizer: Any, param_name: str, step_size: int, gamma: float = 0.1, **kwargs: Any) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self) -> list[float]:
        if self.last_step == 0 or self.last_step % self.step_size:
            return self._values()
        return [value * self.gamma for value in self._values()]


@PARAM_SCHEDULERS.register_module()
class PolyParamScheduler(_ParamScheduler):
    """Fall to `eta_min` as a power of the time that is left in the window.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        power: the power.
        eta_min: the lowest value.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(self, optimizer: Any, param_name: str, power: float = 1, eta_min: float = 0, **kwargs: Any) -> None:
        self.power, self.eta_min = power, eta_min
        self.total_iters = _length(kwargs) - 1
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self) -> list[float]:
        if self.last_step == 0:
            return self._values()
        ratio = (1 - 1 / (self.total_iters - self.last_step + 1)) ** self.power  # of what is left to what was left
        return [(value - self.eta_min) * ratio + self.eta_min for value in self._values()]


@PARAM_SCHEDULERS.register_module()
class CosineRestartParamScheduler(_ParamScheduler):
    """Follow half a cosine in each of several periods, each from the first value times a weight.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        periods: the length of each period.
        restart_weights: the weight of each period.
        eta_min: the lowest value.
        eta_min_ratio: the lowest value as a fraction of the first one, in place of `eta_min`.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        periods: Sequence[int],
        restart_weights: Sequence[float] = (1,),
        eta_min: float | None = None,
        eta_min_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        if (eta_min is None) == (eta_min_ratio is None):
            raise AssertionError("one of `eta_min` and `eta_min_ratio` must be given")
        if len(periods) != len(restart_weights):
            counts = f"{len(periods)} and {len(restart_weights)}"
            raise AssertionError(f"`periods` and `restart_weights` must be equally many, but are {counts}")
        self.periods, self.restart_weights = list(periods), list(restart_weights)
        self.eta_min, self.eta_min_ratio = eta_min, eta_min_ratio
        self.cumulative_periods = [sum(self.periods[: index + 1]) for index in range(len(self.periods))]
        super().__init__(optimizer, param_name, **kwargs)

    def _get_value(self) -> list[float]:
        if self.last_step >= self.cumulative_periods[-1]:
            raise ValueError(
                f"the {self.cumulative_periods[-1]} counts of all `periods` are over. Set `end`, or add one"
            )
        index = next(index for index, last in enumerate(self.cumulative_periods) if self.last_step < last)
        begun = self.cumulative_periods[index - 1] if index else 0
        at, period = self.last_step - begun, self.periods[index]
        if at == 0:
            return [base * self.restart_weights[index] for base in self.base_values]
        ratio = (1 + math.cos(math.pi * at / period)) / (1 + math.cos(math.pi * (at - 1) / period))
        lows = [
            (self.eta_min or 0.0) if self.eta_min_ratio is None else base * self.eta_min_ratio
            for base in self.base_values
        ]
        return [ratio * (value - low) + low for value, low in zip(self._values(), lows, strict=True)]


@PARAM_SCHEDULERS.register_module()
class OneCycleParamScheduler(_ParamScheduler):
    """Rise to `eta_max` and fall far below the first value, once.

    Args:
        optimizer: as for `_ParamScheduler`.
        param_name: as for `_ParamScheduler`.
        eta_max: the highest value, or one for each group.
        total_steps: counts of the cycle; by default the window's length.
        pct_start: the fraction in which the value rises.
        anneal_strategy: `"cos"` or `"linear"`.
        div_factor: the highest value divided by the first one.
        final_div_factor: the first value divided by the last one.
        three_phase: fall to the first value as long as it rose, and only then to the last.
        **kwargs: further arguments of `_ParamScheduler`.
    """

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        eta_max: float | Sequence[float] = 0,
        total_steps: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        **kwargs: Any,
    ) -> None:
        if not 0 <= pct_start <= 1:
            raise ValueError(f"`pct_start` must be from 0 to 1, but is {pct_start}")
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"`anneal_strategy` must be cos or linear, but is {anneal_strategy!r}")
        if total_steps is not None and total_steps <= 0:
            raise ValueError(f"`total_steps` must be above 0, but is {total_steps}")
        self.total_steps = total_steps or _length(kwargs)
        self.anneal_strategy = anneal_strategy
        rise = float(pct_start * self.total_steps) - 1
        self._phases = [(rise, "initial", "max"), (self.total_steps - 1, "max", "min")]
        if three_phase:
            second = float(2 * pct_start * self.total_steps) - 2
            self._phases = [
                (rise, "initial", "max"),
                (second, "max", "initial"),
                (self.total_steps - 1, "initial", "min"),
            ]
        self._cycle = (eta_max, div_factor, final_div_factor)
        super().__init__(optimizer, param_name, **kwargs)

    def _begin(self, last_step: int) -> None:
        eta_max, div_factor, final_div_factor = self._cycle
        groups = self.optimizer.param_groups if last_step == -1 else []
        highs = list(eta_max) if isinstance(eta_max, Sequence) else [eta_max] * len(groups)
        for group, high in zip(groups, highs, strict=last_step == -1):
            group[f"initial_{self.param_name}"] = high / div_factor
            group[f"max_{self.param_name}"] = high
            group[f"min_{self.param_name}"] = group[f"initial_{self.param_name}"] / final_div_factor
        super()._begin(last_step)

    def _get_value(self) -> list[float]:
        if self.last_step > self.total_steps:
            raise ValueError(f"the {self.total_steps} counts of `total_steps` are over")
        begin = 0.0
        for end, start, target in self._phases:
            if self.last_step <= end or end == self._phases[-1][0]:
                part = (self.last_step - begin) / (end - begin)
                return [self._between(group, start, target, part) for group in self.optimizer.param_groups]
            begin = end
        raise AssertionError("the last phase has no end")

    def _between(self, group: dict[str, Any], start: str, target: str, part: float) -> float:
        first, last = group[f"{start}_{self.param_name}"], group[f"{target}_{self.param_name}"]
        if self.anneal_strategy == "linear":
            return float((last - first) * part + first)
        return float(last + (first - last) / 2.0 * (math.cos(math.pi * part) + 1))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the phases follow from the arguments."""
        super().load_state_dict({name: value for name, value in state.items() if name not in _PHASES})

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the optimizer and the phases."""
        return {name: value for name, value in super().state_dict().items() if name not in _PHASES}


def _length(arguments: Mapping[str, Any]) -> int:
    """Return the length of the window that the arguments of a schedule give."""
    end = arguments.get("end")
    return int((INF if end is None or math.isinf(end) else end) - arguments.get("begin", 0))
