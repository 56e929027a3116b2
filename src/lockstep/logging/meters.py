"""Values that are collected during a run, and read from their device only when needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = float | Tensor


def require_whole(name: str, value: object) -> None:
    """Refuse a value of which each rank has a part, as the mean of a sharded parameter is one.

    torch reads such a `DTensor` as this rank's part alone, and a mean of these parts is no norm and no maximum.

    Raises:
        TypeError: it is one.
    """
    if not all(placement.is_replicate() for placement in getattr(value, "placements", ())):
        raise TypeError(
            f"`{name}` must be a number or a plain tensor to be recorded, but is a DTensor, of which each rank has a "
            "part. Hand in value.full_tensor(), which every rank must call"
        )


def kept_scalar(name: str, value: Any) -> Scalar:
    """Return what to keep of a value that is read later: a copy of a tensor, without its graph, or a float.

    Raises:
        TypeError: it is neither a real number nor a tensor of one, or each rank has a part of it.
    """
    require_whole(name, value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    number = value.item() if getattr(value, "size", None) == 1 else value  # an array of numpy
    if isinstance(number, Real):
        return float(number)
    what = f"of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else repr(value)
    raise TypeError(f"`{name}` must be a number or a scalar tensor to be recorded, but is {what}")


def _whole(value: Scalar) -> Scalar:
    """Return a value as a plain tensor or a number: torch lists the numbers of no `DTensor`."""
    require_whole("value", value)
    own: Scalar = value.to_local() if hasattr(value, "to_local") else value
    return own


def read_scalars(values: Iterable[Scalar]) -> list[float]:
    """Convert numbers and one-element tensors to numbers, with one read of an accelerator for each dtype."""
    return Reading(values)()


class Reading:
    """Numbers that are under way from an accelerator.

    Tensors are copied to the host behind the work that is queued there now. A call an iteration later waits for that
    work only, and not for what has been queued since.

    Args:
        values: numbers and one-element tensors.
    """

    def __init__(self, values: Iterable[Scalar]) -> None:
        self._values = list(map(_whole, values))
        self._read: dict[int, float] = {}
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # a common dtype might round a value
        for value in self._values:
            if isinstance(value, Tensor) and value.is_cpu:
                self._read[id(value)] = float(value.item())  # ten of these take a quarter of the time of a stack
            elif isinstance(value, Tensor):
                alike.setdefault((value.device, value.dtype), []).append(value)
        self._under_way = [(tensors, *_copy_to_host(tensors, device)) for (device, _), tensors in alike.items()]

    def is_ready(self) -> bool:
        """Return whether a call would not wait."""
        return all(event.query() for *_, event in self._under_way)

    def __call__(self) -> list[float]:
        """Wait, and return the numbers."""
        for tensors, numbers, event in self._under_way:
            if not event.query():  # the tests' device counts each call of `synchronize` as a wait
                event.synchronize()
            self._read.update(zip(map(id, tensors), numbers.tolist(), strict=True))
        return [self._read[id(value)] if isinstance(value, Tensor) else float(value) for value in self._values]


def _copy_to_host(tensors: list[Tensor], device: torch.device) -> tuple[Tensor, torch.Event]:
    numbers = torch.stack([tensor.detach().reshape(()) for tensor in tensors]).to("cpu", non_blocking=True)
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return numbers, event


class HistoryBuffer:
    """The last values of one quantity.

    Tensors stay on their device, so adding a value never waits for an accelerator; reading does.

    Args:
        max_length: the maximum number of values to keep.

    Attributes:
        values: the stored values, the latest last.
        counts: what each of them is the sum of, as MMEngine has it: 1 for a value of its own.
        updates: number of all values so far.
    """

    def __init__(self, max_length: int = 1000) -> None:
        self.values: deque[Scalar] = deque(maxlen=max_length)
        self.counts: deque[int] = deque(maxlen=max_length)
        self.updates = 0

    def __len__(self) -> int:
        return len(self.values)

    def update(self, value: Scalar, count: int = 1) -> None:
        """Add a number or a detached one-element tensor, or with `count` the sum of so many."""
        self.values.append(value)
        self.counts.append(count)
        self.updates += 1

    def clear(self) -> None:
        """Forget the stored values."""
        self.values.clear()
        self.counts.clear()

    def keep(self, max_length: int) -> None:
        """Keep up to so many values from now on."""
        self.values, self.counts = deque(self.values, max_length), deque(self.counts, max_length)

    def tail(self, count: int) -> list[Scalar]:
        """Return the last `count` values, or as many as there are, the latest first."""
        return list(islice(reversed(self.values), count))

    def current(self) -> float:
        """Return the last value."""
        return float(self._last(1)[0])

    @property
    def data(self) -> tuple[list[float], list[int]]:
        """The stored values, the latest last, and their counts."""
        return read_scalars(self.values), list(self.counts)

    def min(self, window_size: int | None = None) -> float:
        """Return the minimum of the last `window_size` values, or of all stored values."""
        return min(read_scalars(self._last(window_size)))

    def max(self, window_size: int | None = None) -> float:
        """Return the maximum of the last `window_size` values, or of all stored values."""
        return max(read_scalars(self._last(window_size)))

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> float:
        """Call `current`, `mean`, `min` or `max` by name, with its arguments, and return the result."""
        if method_name not in ("current", "mean", "min", "max"):
            raise KeyError(f"`method_name` must be current, mean, min or max, but is {method_name!r}")
        return float(getattr(self, method_name)(*args, **kwargs))

    def mean(self, window_size: int | None = None) -> float:
        """Return the sum of the last `window_size` values, or of all stored values, divided by that of their counts."""
        values = read_scalars(self._last(window_size))
        return sum(values) / sum(islice(reversed(self.counts), len(values)))

    def _last(self, count: int | None) -> list[Scalar]:
        """Return the last values, the latest first."""
        if not self.values:
            raise ValueError("the buffer must hold a value to be read, but is empty")
        return self.tail(len(self.values) if count is None else max(1, count))


class MessageHub:
    """A store in which the parts of one run share values by name.

    Scalars have a history; infos keep only the latest value, of any type.

    Args:
        name: the hub's name.

    Attributes:
        max_length: the maximum number of values of a history.
    """

    _current: ClassVar[MessageHub | None] = None

    def __init__(self, name: str = "lockstep") -> None:
        self.name = name
        self.max_length = 1000
        self._scalars: dict[str, HistoryBuffer] = {}
        self._infos: dict[str, Any] = {}
        self._sources: dict[str, Callable[[], Any]] = {}

    @classmethod
    def get_current_instance(cls) -> MessageHub:
        """Return the hub of the current run, or of the last one, or a new one if there was no run."""
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def keep(self, count: int) -> None:
        """Let all histories, also those that have begun, keep at least their last `count` values."""
        self.max_length = max(self.max_length, count)
        for history in self._scalars.values():
            history.keep(self.max_length)

    def make_current(self) -> None:
        """Let `get_current_instance` return this hub from now on."""
        MessageHub._current = self

    @property
    def log_scalars(self) -> Mapping[str, HistoryBuffer]:
        """All histories by name."""
        return self._scalars

    @property
    def runtime_info(self) -> dict[str, Any]:
        """All infos by name, with their current values."""
        return {**{key: source() for key, source in self._sources.items()}, **self._infos}

    def update_scalar(self, key: str, value: Scalar, count: int = 1, resumed: bool = True) -> None:
        """Add a value to the history of `key`.

        Args:
            key: the name of the history.
            value: a real number or a tensor of one, of which a copy is kept: it is read later, when it may have been
                written again.
            count: of how many values it is the sum, for their mean.
            resumed: from MMEngine; has no effect, because a resumed run starts new histories.

        Raises:
            TypeError: it is neither, or a `DTensor` of which each rank has a part.
        """
        kept = kept_scalar(key, value)
        if key not in self._scalars:
            self._scalars[key] = HistoryBuffer(self.max_length)
        self._scalars[key].update(kept, count)

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Add one value to each of several histories; a value may be a dict with `value` and maybe `count`."""
        for key, value in log_dict.items():
            given = value if isinstance(value, Mapping) else {"value": value}
            self.update_scalar(key, given["value"], given.get("count", 1))

    def get_scalar(self, key: str) -> HistoryBuffer:
        """Return the history of `key`.

        Raises:
            KeyError: there is none.
        """
        if key not in self._scalars:
            raise KeyError(f"no scalar is called {key!r}; there are {sorted(self._scalars)}")
        return self._scalars[key]

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set the info `key`; `resumed` is from MMEngine and has no effect."""
        self._infos[key] = value

    def update_info_dict(self, info_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Set several infos."""
        self._infos.update(info_dict)

    def provide_info(self, key: str, source: Callable[[], Any]) -> None:
        """Let `get_info` call `source` for the info `key` if it has not been set."""
        self._sources[key] = source

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return the info `key`, or `default`."""
        if key not in self._infos and key in self._sources:
            return self._sources[key]()
        return self._infos.get(key, default)

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Remove the info `key` and return it, or `default`."""
        return self._infos.pop(key, default)
