"""What all ranks do together: steps that fail on all or on none, and the reading of bytes that each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lockstep.dist import all_gather_object, broadcast, gather_object, get_rank, get_world_size, scatter_object_list
from lockstep.errors import CheckpointError, ConfigError, DistError, caused_by, error_in_words, message_of
from lockstep.groups import resolve
from lockstep.location import Location, disk_remedy

T = TypeVar("T")
U = TypeVar("U")
_KINDS = {kind.__name__: kind for kind in (CheckpointError, ConfigError, OSError)}  # that other ranks raise as they are


class Failure(NamedTuple):
    """Why a rank failed, in plain values, from which any rank can raise an error.

    Attributes:
        rank: the rank.
        kind: name of the error's class; "" for any that all ranks raise as a DistError.
        text: its message.
        number: `errno` of an OSError, if the operating system has given one, which also says its class.
        file: `filename` of such an error.
    """

    rank: int
    kind: str
    text: str
    number: int | None = None
    file: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return why this rank failed."""
        kinds = () if isinstance(error, DistError) else _KINDS.values()  # CollectiveTimeoutError is an OSError, too
        kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), "")
        if isinstance(error, OSError) and kind and isinstance(error.errno, int):
            file = None if error.filename is None else str(error.filename)
            return cls(get_rank(), kind, str(error.strerror), error.errno, file)
        return cls(get_rank(), kind, message_of(error) if kind else error_in_words(error))

    def raised(self, what: str) -> Exception:
        """Return the error to raise on every rank; `what` begins the message if that does not say it itself."""
        text = f"{what}: rank {self.rank}: {self.text}"
        error: Exception = DistError(text)
        if self.number is not None:
            error = OSError(self.number, text, self.file)
        elif self.kind == "OSError":
            error = OSError(text)
        elif self.kind:
            where = f" (rank {self.rank} of {get_world_size()})" if get_world_size() > 1 else ""
            error = _KINDS[self.kind](self.text + where)
        return caused_by(error, [self.rank])


class Exchange(Protocol):
    """A way from every rank to rank 0, and back."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None on the others."""

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's entry of the values that rank 0 gives."""


class _Collectives:
    """The exchange by collectives of the default group."""

    def gather(self, value: Any) -> list[Any] | None:
        return gather_object(value)

    def scatter(self, values: Sequence[Any] | None) -> Any:
        own: list[Any] = [None]
        scatter_object_list(own, None if values is None else list(values))
        return own[0]


def run_then_complete(
    what: str,
    on_all: Callable[[], T],
    on_main: Callable[[list[T]], Sequence[U]],
    undo: Callable[[], object] | None = None,
    exchange: Exchange | None = None,
    place: Location | None = None,
) -> U:
    """Run a step on every rank, then one on rank 0 with all results; return each rank's entry of what that returns.

    Args:
        what: begins the message if a step fails.
        on_all: runs on every rank, without collectives.
        on_main: runs on rank 0, without collectives; returns an entry for each rank. That of rank 0 stays there as it
            is.
        undo: runs on rank 0 if a step has failed, before any rank raises. An error of its own is the cause of what rank
            0 raises, unless a step has failed there.
        exchange: how results and entries go from rank to rank; by default, by collectives.
        place: where the steps write; if the disk refuses that, the error says what to do.

    **Collective**: every rank.

    Raises:
        ConfigError: a step on any rank raised one.
        OSError: the same, with its number and file.
        DistError: a step on any rank raised anything else.
        BaseException: on the rank where it was raised, such as KeyboardInterrupt; on the others, DistError.
    """
    exchange = exchange or _Collectives()
    result, error = attempt(on_all)
    outcomes = exchange.gather((result, None if error is None else Failure.of(error)))
    replies: list[tuple[Any, Failure | None]] | None = None
    entries: Sequence[Any] | None = None
    if outcomes is not None:
        # An exchange may bring the values as a list.
        failed = next((Failure(*failed) for _, failed in outcomes if failed is not None), None)
        if failed is None:
            entries, error = attempt(lambda: on_main([found for found, _ in outcomes]))
            failed = None if error is None else Failure.of(error)
        if failed is not None and undo is not None:
            _, undone = attempt(undo)
            error = undone if error is None else error
        if (
            failed is not None
            and isinstance(place, Path)
            and (remedy := disk_remedy(failed.number, Path(failed.file or place)))
        ):
            failed = failed._replace(text=f"{failed.text}. {remedy}")
        sent = [None] * len(outcomes) if entries is None else [None, *entries[1:]]
        replies = [(entry, failed) for entry in sent]
    entry, failed = exchange.scatter(replies)
    if failed is not None:
        raise _raised(Failure(*failed), what, error)
    return entry if entries is None else entries[0]  # type: ignore[no-any-return]


def on_all(what: str, step: Callable[[], T]) -> T:
    """Run a step on every rank, and return its own result; if it fails on one, all ranks raise.

    **Collective**: every rank; see `run_then_complete`.
    """
    result, error = attempt(step)
    failures = all_gather_object(None if error is None else Failure.of(error))
    for failure in failures:
        if failure is not None:
            raise _raised(failure, what, error)
    return result  # type: ignore[no-any-return]


def read_once(sizes: Sequence[int], read: Callable[[int, Tensor], None], place: Callable[[int, Tensor], None]) -> None:
    """Read what every rank needs: each rank reads some buckets of bytes, and sends them to the others.

    If a rank can't read a bucket, it sends one without meaning, so that nobody waits for it.

    Args:
        sizes: the bytes of each bucket, the same on every rank.
        read: fills bytes in CPU memory from the bucket of a number. No collective.
        place: takes the bytes of the bucket of a number, on the group's device. No collective.

    **Collective**: every rank. **Cost**: a broadcast of each bucket; memory for one on the host, and one on the device.

    Raises:
        BaseException: the first error of this rank. The caller tells the others of it, as `on_all` does.
    """
    comm = resolve()
    own, error = list[Tensor](), None
    for number, size in enumerate(sizes):
        src = number % comm.size
        if src == 0 and number + comm.rank < len(sizes):  # all ranks read at the same time
            own.append(torch.empty(sizes[number + comm.rank], dtype=torch.uint8, device="cpu"))
            if error is None:
                _, error = attempt(partial(read, number + comm.rank, own[0]))
        if src == comm.rank:
            sent = own.pop().to(comm.comm_device)
        else:
            sent = torch.empty(size, dtype=torch.uint8, device=comm.comm_device)
        broadcast(sent, src)
        if error is None:
            _, error = attempt(partial(place, number, sent))
        del sent  # before there is memory for the next one
    if error is not None:
        raise error


def attempt(step: Callable[[], T]) -> tuple[Any, BaseException | None]:
    """Return the result of a step, or None and its error: also an interrupt, since the other ranks wait."""
    try:
        return step(), None
    except BaseException as error:
        return None, error


def _raised(failure: Failure, what: str, own: BaseException | None) -> BaseException:
    """Return what this rank raises, whose own error is not hidden if it is an interrupt or an exit."""
    if own is not None and not isinstance(own, Exception):
        return own
    error = failure.raised(what)
    error.__cause__ = own
    return error
