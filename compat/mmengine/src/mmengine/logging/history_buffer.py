"""`HistoryBuffer`: the values of one quantity, with counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

_Array: TypeAlias = "np.ndarray[Any, Any]"

__all__ = ["HistoryBuffer"]


class HistoryBuffer:
    """The last values of one quantity, each a sum over as many samples as its count says.

    Args:
        log_history: first values.
        count_history: their counts.
        max_length: the most values that are kept.

    Example:
        >>> buffer = HistoryBuffer([1.0, 2.0], [1, 3])
        >>> buffer.mean(), buffer.max(), buffer.current()
        (0.75, 2.0, 2.0)
    """

    _named: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(
        self, log_history: Sequence[float] = (), count_history: Sequence[int] = (), max_length: int = 1_000_000
    ) -> None:
        if len(log_history) != len(count_history):
            raise AssertionError(
                "`log_history` and `count_history` must be equally long, but have "
                f"{len(log_history)} and {len(count_history)} values"
            )
        self.max_length = max_length
        self._log_history: _Array = np.array(log_history, dtype=float)[-max_length:]
        self._count_history: _Array = np.array(count_history, dtype=float)[-max_length:]

    @property
    def data(self) -> tuple[_Array, _Array]:
        """The values and their counts."""
        return self._log_history, self._count_history

    def update(self, log_val: float, count: int = 1) -> None:
        """Add a value.

        Raises:
            TypeError: the value or the count is no number.
        """
        if not isinstance(log_val, int | float | np.number) or not isinstance(count, int | float | np.number):
            raise TypeError(f"`log_val` and `count` must be numbers, but are {log_val!r} and {count!r}")
        self._log_history = np.append(self._log_history, log_val)[-self.max_length :]
        self._count_history = np.append(self._count_history, count)[-self.max_length :]

    @classmethod
    def register_statistics(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Let `statistics` call a function, which gets the buffer first, by its name; as a decorator."""
        cls._named[method.__name__] = method
        return method

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `mean`, `min`, `max`, `current` or a registered function by name.

        Raises:
            KeyError: there is no such function.
        """
        if method_name in self._named:
            return self._named[method_name](self, *args, **kwargs)
        if method_name not in ("mean", "min", "max", "current"):
            raise KeyError(f"`method_name` must be registered, but {method_name!r} is not")
        return getattr(self, method_name)(*args, **kwargs)

    def mean(self, window_size: int | None = None) -> float:
        """Return the sum of the last values divided by that of their counts; of all without `window_size`."""
        values, counts = self._last(window_size)
        return float(values.sum() / counts.sum())

    def max(self, window_size: int | None = None) -> float:
        """Return the largest of the last values."""
        return float(self._last(window_size)[0].max())

    def min(self, window_size: int | None = None) -> float:
        """Return the smallest of the last values."""
        return float(self._last(window_size)[0].min())

    def current(self) -> float:
        """Return the last value.

        Raises:
            ValueError: there is none.
        """
        if len(self._log_history) == 0:
            raise ValueError("the buffer must hold a value to be read, but is empty")
        return float(self._log_history[-1])

    def _last(self, window_size: int | None) -> tuple[_Array, _Array]:
        if window_size is not None and not isinstance(window_size, int):
            raise TypeError(f"`window_size` must be an int or None, but is {window_size!r}")
        self.current()
        window = len(self._log_history) if window_size is None else max(window_size, 1)
        return self._log_history[-window:], self._count_history[-window:]
