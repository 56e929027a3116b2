"""Values collected while a run goes on, and read only when somebody wants to see them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = float | Tensor


class HistoryBuffer:
    """The last values of one quantity.

    Tensors are kept as they are, on their device, so that adding a value never waits for an accelerator; reading does.

    Args:
        max_length: number of values to remember.
    """

    def __init__(self, max_length: int = 1000) -> None:
        self._values: deque[Scalar] = deque(maxlen=max_length)

    def __len__(self) -> int:
        return len(self._values)

    def update(self, value: Scalar) -> None:
        """Add a number or a tensor of one element, detached."""
        self._values.append(value)

    def current(self) -> float:
        """Return the last value."""
        self._must_have_values()
        return float(self._values[-1])

    def mean(self, window_size: int | None = None) -> float:
        """Return the mean of the last `window_size` values, or of all that are remembered."""
        values = self._last(window_size)
        tensors = [value.reshape(()) for value in values if isinstance(value, Tensor)]
        if len(tensors) == len(values):
            return float(torch.stack(tensors).double().mean())
        return sum(float(value) for value in values) / len(values)

    def weighted_mean(self, weights: Sequence[float]) -> float:
        """Return the mean of as many last values as there are weights, the last of which is that of the last value.

        Where the buffer holds fewer values, it is the mean of these.
        """
        values = self._last(len(weights))
        weights = weights[-len(values) :]
        tensors = [value.reshape(()) for value in values if isinstance(value, Tensor)]
        numbers = torch.stack(tensors).tolist() if len(tensors) == len(values) else [float(value) for value in values]
        pairs = zip(reversed(weights), numbers, strict=True)
        return float(sum(weight * number for weight, number in pairs if weight) / (sum(weights) or 1.0))

    def _last(self, count: int | None) -> list[Scalar]:
        """Return the last values, the latest first."""
        self._must_have_values()
        length = len(self._values)
        return list(islice(reversed(self._values), length if count is None else max(1, min(count, length))))

    def _must_have_values(self) -> None:
        if not self._values:
            raise ValueError("the buffer must hold a value to be read, but is empty")


class MessageHub:
    """Where the parts of one run leave values for each other, by name.

    Scalars have a history; infos are the latest of anything.
    """

    def __init__(self) -> None:
        self._scalars: dict[str, HistoryBuffer] = {}
        self._infos: dict[str, Any] = {}

    @property
    def log_scalars(self) -> Mapping[str, HistoryBuffer]:
        """All histories by name."""
        return self._scalars

    @property
    def runtime_info(self) -> dict[str, Any]:
        """All infos by name."""
        return self._infos

    def update_scalar(self, key: str, value: Scalar) -> None:
        """Add a value to the history of `key`."""
        buffer = self._scalars.get(key)
        if buffer is None:
            buffer = self._scalars[key] = HistoryBuffer()
        buffer.update(value)

    def update_scalars(self, log_dict: Mapping[str, Scalar]) -> None:
        """Add one value to each of several histories."""
        for key, value in log_dict.items():
            self.update_scalar(key, value)

    def get_scalar(self, key: str) -> HistoryBuffer:
        """Return the history of `key`.

        Raises:
            KeyError: there is none.
        """
        if key not in self._scalars:
            raise KeyError(f"no scalar is called {key!r}; there are {sorted(self._scalars)}")
        return self._scalars[key]

    def update_info(self, key: str, value: Any) -> None:
        """Set the info `key`."""
        self._infos[key] = value

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return the info `key`, or `default`."""
        return self._infos.get(key, default)
