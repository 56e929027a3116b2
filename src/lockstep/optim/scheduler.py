"""The base classes of schedules: a window of epochs or batches, and a formula of the time since it began."""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.errors import ConfigError, wrong_type
from lockstep.registry import PARAM_SCHEDULERS

_logger = logging.getLogger(__name__)
_Schedule = TypeVar("_Schedule", bound="ParamScheduler")

WINDOW: Any = None
"""The default of a length: the length of the window."""

# Arguments that are the length of the whole schedule, and by how much it is shorter than the window by default: a ramp
# reaches its end value in the window's last count.
LENGTHS = {"T_max": 0, "total_iters": 1, "total_steps": 0}
# What tensors of parameter groups hold, and their version then: to read one would wait for its device in each step.
_held: Any = WeakTensorKeyDictionary()


@dataclass(eq=False, repr=False)
class ParamScheduler(ABC):
    """Base class: changes one value of every parameter group, such as the learning rate, from `begin` up to `end`.

    Schedules on one optimizer may follow each other, such as a warm-up of 100 batches and then a cosine; where their
    windows overlap, their effects multiply. A subclass implements `advance`, which sets the values for each count.

    Args:
        optimizer: the optimizer whose parameter groups are changed.
        by_epoch: count epochs; otherwise batches.
        begin: the count at which the schedule starts, from the value that the group has then.
        end: the count from which the schedule no longer changes the value; None for never.
        param_name: what is changed: `"lr"`, `"momentum"` (for Adam, the first beta), or another number that the groups
            have, such as `"weight_decay"`.
        last_step: for compatibility with MMEngine; must be -1, because a run resumes from the state of its schedules.
        verbose: for compatibility with MMEngine; True only logs a warning, as every record of a run has the values.
    """

    # Arguments that are durations: a conversion from epochs to batches multiplies them.
    durations: ClassVar[tuple[str, ...]] = (*LENGTHS, "step_size", "milestones", "periods")
    # Whether it always lasts for the window, as all of lockstep-mmengine: `end` defaults to the end of the training.
    needs_end: ClassVar[bool] = False
    # The attributes in the state, without their leading underscore; their values are JSON values.
    kept: ClassVar[tuple[str, ...]] = ("count",)
    # The key of the state under which it has the counts so far; those of lockstep-mmengine have another one.
    count_key: ClassVar[str] = "count"

    optimizer: Optimizer
    by_epoch: bool = field(default=True, kw_only=True)
    begin: int = field(default=0, kw_only=True)
    end: int | None = field(default=None, kw_only=True)
    param_name: str = field(default="lr", kw_only=True)
    last_step: int = field(default=-1, kw_only=True)
    verbose: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        # An optim wrapper is accepted. One of several optimizers is not: the value to change would be ambiguous.
        self.optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(self.optimizer, Optimizer):
            raise wrong_type("optimizer", "an optimizer or the optim wrapper of one", self.optimizer)
        if self.last_step != -1:
            raise ConfigError(
                f"{self.title}: `last_step` must be -1, but is {self.last_step}. To continue a run, give the "
                "Runner resume=True, or call load_state_dict()"
            )
        if self.verbose:
            _logger.warning("%s: `verbose` does nothing: the values are in every record of a run", self.title)
        self.end = None if self.end == math.inf else self.end
        window = self.begin, math.inf if self.end is None else self.end
        if not all(map(is_in_range, window)) or window[0] >= window[1]:
            raise ConfigError(
                f"{self.title}: `begin` must be a number of at least 0 and less than `end`, but they are "
                f"{self.begin!r} and {self.end!r}"
            )
        for name in self.durations:
            if hasattr(self, name):
                setattr(self, name, self._duration(name))
        self._count = 0
        self.get_last_value()  # raises if the groups have no such value
        if self.begin == 0:
            self.advance(0)

    @abstractmethod
    def advance(self, t: int) -> None:
        """Set the values for the count that begins.

        Args:
            t: counts since `begin`: 0, 1, 2, ...
        """

    def step(self) -> None:
        """Count one epoch or batch, and set the values for the next one."""
        self._count += 1
        if self.is_active:
            self.advance(self._count - self.begin)

    def restart(self) -> None:
        """Begin anew, from the values that the groups have now."""
        self._count = 0
        if self.begin == 0:
            self.advance(0)

    @property
    def is_active(self) -> bool:
        """Whether the current count lies in the window."""
        return self.begin <= self._count and (self.end is None or self._count < self.end)

    @property
    def ramp_end(self) -> int | None:
        """The count at which a gradual change is complete; None if there is none, as of a value that changes in steps.

        A training that ends before leaves the value on its way.
        """
        if (length := self._ramp_length()) is None:
            return None
        return self.begin + length if self.end is None else min(self.begin + length, self.end)

    @property
    def title(self) -> str:
        """The schedule's name in errors and logs."""
        return type(self).__name__

    @classmethod
    def stretched(cls, arguments: Mapping[str, Any], epoch_length: int) -> dict[str, Any]:
        """Return the arguments, converted from epochs to batches."""
        names = [name for name in ("begin", "end", *cls.durations) if arguments.get(name) is not None]
        least = {name: 0 if name == "begin" else 1 for name in names}  # a part of an epoch lasts a batch
        return {**arguments, **{name: _in_batches(arguments[name], epoch_length, least[name]) for name in names}}

    def get_last_value(self) -> list[float]:
        """Return the current value of every parameter group."""
        return [self._read(group) for group in self.optimizer.param_groups]

    def set_values(self, values: Sequence[float]) -> None:
        """Set the value of every parameter group."""
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            self._write(group, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, in JSON values."""
        return {name: getattr(self, f"_{name}") for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a scheduler with the same arguments.

        The values are part of the optimizer's state; load that afterwards.
        """
        for name in self.kept:
            present, saved = getattr(self, f"_{name}"), state[name]
            if isinstance(present, list):
                wanted, fits = "a list of numbers", isinstance(saved, list) and all(map(_is_number, saved))
            elif type(present) is int:
                wanted, fits = "a whole number", type(saved) is int
            else:
                wanted, fits = "a number or None", saved is None or _is_number(saved)
            if not fits:
                raise ValueError(f"`{name}` of {self.title} must be {wanted}, but is {saved!r:.100}")
            setattr(self, f"_{name}", saved)

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Restore how far a scheduler with other arguments was. A subclass whose state has arguments overrides this."""
        self.load_state_dict(state)

    def __repr__(self) -> str:
        unit = "epochs" if self.by_epoch else "batches"
        window = f"{unit} {self.begin}..{'' if self.end is None else self.end}"
        return f"{self.title}({', '.join([window, *self._shown()])})"

    def _ramp_length(self) -> int | None:
        if self.needs_end and self.end is not None:
            return self.end - self.begin
        return next((getattr(self, name) for name in LENGTHS if hasattr(self, name)), None)

    def _shown(self) -> list[str]:
        """Return the subclass's own arguments, as `name=value`."""
        own = {field.name: getattr(self, field.name) for field in fields(self)[len(fields(ParamScheduler)) :]}
        return [f"{name}={value!r}" for name, value in own.items() if value is not None]

    def _duration(self, name: str) -> Any:
        """Return an argument that is a duration; if it is not given, the default for the window."""
        given = getattr(self, name)
        if given is None:
            if self.end is None:
                raise ConfigError(f"{self.title}: `{name}` or `end` must be given, but neither is")
            return window_length(name, self.begin, int(self.end))
        if name in LENGTHS or not isinstance(given, Sequence):  # a list is checked by its own class
            self._require(name, above_0=True)
        return given

    def _require(self, *names: str, above_0: bool = False) -> None:
        """Refuse arguments that are not numbers of at least 0, or above 0."""
        for name in names:
            given = getattr(self, name)
            if not is_in_range(given, above_0):
                bound = "above 0" if above_0 else "of at least 0"
                raise ConfigError(f"{self.title}: `{name}` must be a number {bound}, but is {given!r}")

    def _require_list(self, *names: str, or_one: bool = False) -> None:
        """Make arguments lists; refuse those that are not numbers of at least 0, or, with `or_one`, one such number."""
        for name in names:
            given = getattr(self, name)
            is_list = isinstance(given, Collection) and all(map(is_in_range, given))
            if is_list:
                setattr(self, name, list(given))
            elif not (or_one and is_in_range(given)):
                or_number = "a number of at least 0, or " if or_one else ""
                raise ConfigError(
                    f"{self.title}: `{name}` must be {or_number}a list of numbers of at least 0, but is {given!r}"
                )

    def _by_group(self, name: str) -> list[float]:
        """Return an argument as a list with one number per parameter group; it may be given as one number."""
        given, groups = getattr(self, name), len(self.optimizer.param_groups)
        values = given if isinstance(given, list) else [given] * groups
        if len(values) != groups:
            raise ConfigError(
                f"{self.title}: `{name}` must be one number, or {groups}, one for each parameter group, but has "
                f"{len(values)}"
            )
        return values

    def _read(self, group: Mapping[str, Any]) -> float:
        return number_in(self._value(group))

    def _value(self, group: Mapping[str, Any]) -> Any:
        if _is_option(value := group.get(self.param_name)):
            return value
        if self.param_name == "momentum" and "betas" in group:
            return group["betas"][0]
        if self.param_name in group and value is None:
            raise ConfigError(
                f"{self.title} changes `{self.param_name}`, which this optimizer sets itself: it is None in its "
                "groups. Give the optimizer a number, or leave out the schedule"
            )
        known = ", ".join(sorted(name for name, option in group.items() if _is_option(option)))
        raise ConfigError(
            f"{self.title}: the optimizer must have a `{self.param_name}` that is a number, but of "
            f"{type(self.optimizer).__name__} only {known} are"
        )

    def _write(self, group: dict[str, Any], value: float) -> None:
        present = self._value(group)
        if isinstance(present, Tensor):  # a compiled or captured step reads this tensor
            present.fill_(value)
            _held[present] = present._version, torch.tensor(value, dtype=present.dtype, device="cpu").item()
        elif self.param_name in group:
            group[self.param_name] = value
        else:
            group["betas"] = (value, *group["betas"][1:])


def number_in(value: float | Tensor | None) -> float:
    """Return the number in an option of a parameter group. A tensor is read only if others than schedules changed it.

    It is NaN for None, as the rate of an optimizer that sets it itself.

    **Source**: torch counts the writes to a tensor in its `_version`.
    """
    if not isinstance(value, Tensor):
        return math.nan if value is None else float(value)
    version, number = _held.get(value, (None, 0.0))
    if version != value._version:
        number = float(value)
        _held[value] = value._version, number
    return float(number)


def is_in_range(value: object, above_0: bool = False) -> bool:
    """Return whether a value is a number of at least 0, or above 0; NaN is none."""
    return isinstance(value, Real) and (float(value) > 0 if above_0 else float(value) >= 0)


def _is_option(value: object) -> bool:
    """Return whether an option of a parameter group has a value that a schedule can change."""
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(eq=False, repr=False)
class FormulaScheduler(ParamScheduler):
    """A schedule whose value is a formula of the time since it began and of the value that it began with.

    Nothing accumulates over time, so rounding errors do not grow. If something else has changed the value in the
    meantime, such as a schedule whose window overlaps, the formula continues from the changed value.

    A subclass implements `multiplier`, the factor of the first value, and may override `floor`, the limit of the fall.
    """

    kept: ClassVar[tuple[str, ...]] = ("count", "base", "last")

    def __post_init__(self) -> None:
        self._base: list[float] = []
        self._last: list[float] = []
        super().__post_init__()

    @abstractmethod
    def multiplier(self, t: int) -> float:
        """Return the fraction of the first value's distance to the floor that remains after `t` counts."""

    def floor(self) -> tuple[float, float]:
        """Return the limit of the fall as a number and as a fraction of the first value; at least one of them is 0."""
        return 0.0, 0.0

    def first_values(self) -> list[float]:
        """Return the value of each group that multipliers refer to; called when the schedule begins."""
        return self.get_last_value()

    def advance(self, t: int) -> None:
        """Set the values that the formula gives."""
        slope, offset = self._line(t)
        if not self._base:
            self._base = self.first_values()
        elif (slope, offset) == self._line(t - 1):
            return
        else:
            self._base = self._moved(t - 1)
        self.set_values([slope * base + offset for base in self._base])
        self._last = self.get_last_value()  # a tensor in the optimizer rounds it

    def restart(self) -> None:
        """Begin anew, from the values that the groups have now."""
        self._base, self._last = [], []
        super().restart()

    def rescale(self, group: Mapping[str, Any], factor: float) -> None:
        """Multiply what the formula continues from, for a group of its own whose value has been multiplied."""
        for index, own in enumerate(self.optimizer.param_groups[: len(self._base)]):
            if own is group:
                self._base[index] *= factor
                self._last[index] = self._read(group)

    def _moved(self, t: int) -> list[float]:
        """Return the first values for which the formula gives the current values at `t`.

        A group that the optimizer has got since then goes on from its value, as one whose value was changed.
        """
        slope, offset = self._line(t)
        return [
            (now if base is None else base) if now == last or slope == 0 else (now - offset) / slope
            for base, last, now in zip_longest(self._base, self._last, self.get_last_value())
        ]

    def _line(self, t: int) -> tuple[float, float]:
        """Return the factor of the first value at `t`, and the number that is added."""
        above, (number, part) = self.multiplier(t), self.floor()
        return part + (1 - part) * above, number * (1 - above)


@dataclass(eq=False, repr=False)
class FloorScheduler(FormulaScheduler):
    """A schedule with a floor: `eta_min`, or `eta_min_ratio` as a fraction of the first value."""

    eta_min: float | None = field(default=None, kw_only=True)
    eta_min_ratio: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.eta_min is not None and self.eta_min_ratio is not None:
            raise ConfigError(f"{self.title}: either `eta_min` or `eta_min_ratio` may be given, but both are")
        self._require(*(name for name in ("eta_min", "eta_min_ratio") if getattr(self, name) is not None))
        super().__post_init__()

    def floor(self) -> tuple[float, float]:
        """Return the limit of the fall as a number and as a fraction of the first value; at least one of them is 0."""
        return self.eta_min or 0.0, self.eta_min_ratio or 0.0


def _in_batches(epochs: Any, epoch_length: int, least: int) -> Any:
    """Return numbers of epochs in batches, those above 0 as `least` at least; what is refused later, as it is."""
    if isinstance(epochs, Collection) and not isinstance(epochs, str | Tensor):
        return [_in_batches(item, epoch_length, least) for item in epochs]
    if isinstance(epochs, Integral | Tensor):
        return epochs * epoch_length
    if isinstance(epochs, Real) and 0 < float(epochs) < math.inf:
        return max(least, round(float(epochs) * epoch_length))  # 0.55 * 100 is a little more than 55
    return epochs


def window_length(name: str, begin: int, end: int) -> int:
    """Return the default of an argument that is the length of a schedule, for the window from `begin` to `end`."""
    return max(end - begin - LENGTHS.get(name, 0), 1)


def length_argument(schedule: Any) -> str | None:
    """Return the name of the argument that is the length of a schedule of lockstep or torch; None if it has none."""
    if not isinstance(schedule, type):
        return None
    if not issubclass(schedule, ParamScheduler) and schedule.__module__ != LRScheduler.__module__:
        return None
    return next((name for name in LENGTHS if name in inspect.signature(schedule).parameters), None)


@dataclass_transform(field_specifiers=(field,))
def for_rates(schedule: type[_Schedule]) -> type[_Schedule]:
    """Make a learning rate schedule a dataclass and register it, also as MMEngine's `...ParamScheduler`."""
    names = [schedule.__name__, schedule.__name__.removesuffix("LR") + "ParamScheduler"]
    return PARAM_SCHEDULERS.register_module(name=names, module=dataclass(eq=False, repr=False)(schedule))


def for_momentum(schedule: type[_Schedule]) -> type[_Schedule]:
    """Return and register a learning rate schedule's variant for momentum; for Adam that is the first beta."""
    names = {
        "__module__": schedule.__module__,
        "__doc__": f"`{schedule.__name__}` for momentum.",
        "__annotations__": {"param_name": "str"},
        "param_name": field(default="momentum", kw_only=True),
    }
    made = type(schedule.__name__.removesuffix("LR") + "Momentum", (schedule,), names)
    return PARAM_SCHEDULERS.register_module(module=dataclass(eq=False, repr=False)(made))
