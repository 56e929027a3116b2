"""How a count grows with the number of ranks: which law fits it, and what it says of more ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

_TERMS: Mapping[str, Callable[[float], float]] = {
    "1": lambda n: 1.0,
    "log n": math.log2,
    "n": lambda n: n,
    "n log n": lambda n: n * math.log2(n),
    "n^2": lambda n: n * n,
}
# The terms of each law, from the slowest law on; what all ranks but one send to all but one is n^2 - n.
_LAWS = {"1": ("1",), "log n": ("log n", "1"), "n": ("n", "1"), "n log n": ("n log n", "n"), "n^2": ("n^2", "n", "1")}
_SLACK = 0.02  # of the largest count: a law that is more negative at 2 ranks only imitates a faster one
_EXACT = 0.005


@dataclass(frozen=True)
class Law:
    """A law with its coefficients.

    Attributes:
        name: of its fastest term; "0" where nothing was counted.
        terms: its coefficients.
        error: of the fit, relative: root of the mean square.
    """

    name: str
    terms: Mapping[str, float]
    error: float

    def at(self, size: int) -> float:
        """Return the count that it gives for a number of ranks."""
        return max(0.0, sum(factor * _TERMS[term](size) for term, factor in self.terms.items()))


def law_of(counts: Mapping[int, float], noise: float) -> Law:
    """Return the slowest law that fits counts by number of ranks.

    Where none does, a faster law is taken for a slower one only if its error is less than half as large. Counts that
    jump, as those of a tree do at powers of two, are n^2 only if they also grow faster than n^1.5, or n^1 where n^2
    is exact.

    Args:
        counts: by number of ranks.
        noise: relative error up to which a law fits.
    """
    if not any(counts.values()):
        return Law("0", {}, 0.0)
    best, *faster = [_fit(name, counts) for name in _LAWS]
    for fit in faster if len(counts) > 1 else []:
        is_steep = fit.name != "n^2" or _growth(counts) > (1.0 if fit.error <= _EXACT else 1.5)
        if best.error > noise and fit.error < best.error / 2 and is_steep:
            best = fit
    return best


def _growth(counts: Mapping[int, float]) -> float:
    """Return with which power of the number of ranks counts grow, from the first one to the last."""
    (first, least), *_, (last, most) = counts.items()
    return math.log(max(most, 1) / max(least, 1)) / math.log(last / first)


def _fit(name: str, counts: Mapping[int, float]) -> Law:
    """Fit a law by least squares of relative errors."""
    sizes, values = list(counts), np.array(list(counts.values()), dtype=float)
    weights = 1 / np.maximum(values, 1.0)
    matrix = np.array([[_TERMS[term](size) for term in _LAWS[name]] for size in sizes])
    found, *_ = np.linalg.lstsq(matrix * weights[:, None], values * weights, rcond=None)
    error = float(np.sqrt(np.mean(((matrix @ found - values) * weights) ** 2)))
    least = float(found @ [_TERMS[term](2) for term in _LAWS[name]])
    is_one = found[0] >= 0 and (name == "n^2" or least >= -_SLACK * max(values))
    return Law(name, dict(zip(_LAWS[name], map(float, found), strict=True)), error if is_one else math.inf)
