"""Axes: from values to positions, and the round values at the ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_ROOM = 0.06  # of the axis, left free above and below the values
_EXPONENT_FROM = 1e7
_LOG_FROM = 20  # minimum ratio of maximum to minimum for a log axis


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`, in equal steps or in equal ratios."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value, from 0 at `low` to 1 at `high`."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round values on the axis, about `most` of them."""
        return self._powers(most) if self.log else self._steps(most)

    def _steps(self, most: int) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]

    def _powers(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = math.log10(self.high / self.low)
        factors = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3.5 else (1,)
        every = max(1, math.ceil((last - first) / most))
        values = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
        return [value for value in values if self.low <= value <= self.high]


def fitted(values: Iterable[float], *, from_zero: bool = False) -> Scale:
    """Return an axis for the finite values, with a margin.

    It starts at zero if `from_zero` is set, or if the minimum is less than 0.4 times the maximum; never with negative
    values.
    """
    low, high = _range(values)
    if low >= 0 and (from_zero or low < 0.4 * high):
        return Scale(0.0, high * (1 + _ROOM) or 1.0)
    room = (high - low) * _ROOM or abs(high) * 0.1 or 1.0
    return Scale(low - room, high + room)


def fitted_log(values: Iterable[float]) -> Scale | None:
    """Return a logarithmic axis for positive values with a wide range; None for others."""
    low, high = _range(values)
    if low <= 0 or high / low < _LOG_FROM:
        return None
    room = (high / low) ** _ROOM
    return Scale(low / room, high * room, log=True)


def shown(value: float) -> str:
    """Return a number in readable form, with about four digits.

    Example:
        >>> shown(2342.7), shown(98.886), shown(0.01818), shown(1.4e-7), shown(30.0)
        ('2,343', '98.89', '0.01818', '1.4e-7', '30')
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < _EXPONENT_FROM:
        return f"{int(value):,}"
    if abs(value) < 1e-3 or abs(value) >= _EXPONENT_FROM:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def _range(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    return min(finite), max(finite)
