"""`FormulaScheduler`: schedules whose value is a formula of the time since they began."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import ConfigError
from lockstep.optim.scheduler import ParamScheduler


@dataclass(eq=False, repr=False)
class FormulaScheduler(ParamScheduler):
    """A schedule whose value is a formula of the time since it began, and of the value that it began with.

    Nothing is added up over time, so that rounding errors do not grow. Where something else has changed the value in
    the meantime, such as a schedule whose window overlaps, the formula goes on from there.

    A subclass says in `multiplier` by what the first value is multiplied, and may have a floor towards which it falls.
    """

    def __post_init__(self) -> None:
        self._base: list[float] = []
        self._last: list[float] = []
        super().__post_init__()

    @abstractmethod
    def multiplier(self, t: int) -> float:
        """Return which part of the first value's height above the floor is left after `t` counts."""

    def floor(self) -> tuple[float, float]:
        """Return what the value falls towards: a number, or a part of the first value."""
        return 0.0, 0.0

    def first_values(self) -> list[float]:
        """Return the value of each group that multipliers refer to, when the schedule begins."""
        return self.get_last_value()

    def advance(self, t: int) -> None:
        """Set the values of the formula."""
        slope, offset = self._line(t)
        if not self._base:
            self._base = self.first_values()
        elif (slope, offset) == self._line(t - 1):
            return
        else:
            self._base = self._moved(t - 1)
        self.set_values([slope * base + offset for base in self._base])
        self._last = self.get_last_value()  # as the optimizer rounds it, where it keeps a tensor

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands, in JSON values."""
        return {**super().state_dict(), "base": self._base, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another scheduler of the same arguments stood."""
        super().load_state_dict(state)
        self._base, self._last = list(state["base"]), list(state["last"])

    def _moved(self, t: int) -> list[float]:
        """Return first values from which the formula would have come to the present values at `t`."""
        slope, offset = self._line(t)
        return [
            base if now == last or slope == 0 else (now - offset) / slope
            for base, last, now in zip(self._base, self._last, self.get_last_value(), strict=True)
        ]

    def _line(self, t: int) -> tuple[float, float]:
        """Return by what the first value is multiplied at `t`, and what is added."""
        above, (number, part) = self.multiplier(t), self.floor()
        return part + (1 - part) * above, number * (1 - above)

    def _length(self, name: str, less: int = 0) -> int:
        """Return an argument that is a length of time; where it is not given, that of the window."""
        given = getattr(self, name)
        if given is None:
            if self.end is None:
                raise ConfigError(f"{self.title}: `{name}` or `end` must be given, but neither is")
            return max(int(self.end) - self.begin - less, 1)
        if not given > 0:
            raise ConfigError(f"{self.title}: `{name}` must be above 0, but is {given!r}")
        length: int = given
        return length


@dataclass(eq=False, repr=False)
class FloorScheduler(FormulaScheduler):
    """A schedule with a floor: `eta_min`, or `eta_min_ratio` as a part of the first value."""

    eta_min: float | None = field(default=None, kw_only=True)
    eta_min_ratio: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.eta_min is not None and self.eta_min_ratio is not None:
            raise ConfigError(f"{self.title}: either `eta_min` or `eta_min_ratio` may be given, but both are")
        super().__post_init__()

    def floor(self) -> tuple[float, float]:
        """Return what the value falls towards: a number, or a part of the first value."""
        return self.eta_min or 0.0, self.eta_min_ratio or 0.0
