"""Steps of all ranks that fail together: work on each rank, then on rank 0 with what all have brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from lockstep.dist import all_gather_object, gather_object, get_rank, get_world_size, scatter_object_list
from lockstep.errors import CheckpointError, ConfigError, DistError, caused_by, error_in_words, message_of

T = TypeVar("T")
U = TypeVar("U")
_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (CheckpointError, ConfigError, OSError)}


class Failure(NamedTuple):
    """Why a rank failed, in plain values, from which any rank can raise an error.

    Attributes:
        rank: the rank.
        kind: name of the error's class.
        text: its message.
        errno: its number, if it is of the operating system.
    """

    rank: int
    kind: str
    text: str
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return why this rank failed."""
        for name, kind in _KINDS.items():
            if isinstance(error, kind):
                return cls(get_rank(), name, message_of(error), getattr(error, "errno", None))
        return cls(get_rank(), "", error_in_words(error))

    def raised(self, what: str) -> Exception:
        """Return the error to raise on every rank; `what` begins the message if that does not say it itself."""
        kind = _KINDS.get(self.kind, DistError)
        if issubclass(kind, ConfigError):
            error: Exception = kind(f"{self.text} (rank {self.rank} of {get_world_size()})")
        else:
            error = kind(f"{what}: rank {self.rank}: {self.text}")
        if isinstance(error, OSError):
            error.errno = self.errno
        return caused_by(error, [self.rank])


class Exchange(Protocol):
    """A way from every rank to rank 0, and back."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None on the others."""

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's entry of the values that rank 0 gives."""


def run_then_complete(
    what: str,
    on_all: Callable[[], T],
    on_main: Callable[[list[T]], Sequence[U]],
    undo: Callable[[], object] | None = None,
    exchange: Exchange | None = None,
) -> U:
    """Run a step on every rank, then one on rank 0 with all results; return each rank's entry of what that returns.

    Args:
        what: begins the message if a step fails.
        on_all: runs on every rank, without collectives.
        on_main: runs on rank 0, without collectives; returns an entry for each rank. That of rank 0 stays there as it
            is.
        undo: runs on rank 0 if a step has failed, before any rank raises.
        exchange: how results and entries go from rank to rank; by default, by collectives.

    **Collective**: every rank.

    Raises:
        ConfigError: a step on any rank raised one.
        OSError: the same.
        DistError: a step on any rank raised anything else.
    """
    result, error = _attempt(on_all)
    outcome = (result, None if error is None else Failure.of(error))
    outcomes = gather_object(outcome) if exchange is None else exchange.gather(outcome)
    replies: list[tuple[Any, Failure | None]] | None = None
    entries: Sequence[Any] | None = None
    if outcomes is not None:
        failure = next((Failure(*failed) for _, failed in outcomes if failed is not None), None)
        if failure is None:
            entries, error = _attempt(lambda: on_main([found for found, _ in outcomes]))
            failure = None if error is None else Failure.of(error)
        if failure is not None and undo is not None:
            undo()
        sent = [None] * len(outcomes) if entries is None else [None, *entries[1:]]
        replies = [(entry, failure) for entry in sent]
    if exchange is None:
        own: list[Any] = [None]
        scatter_object_list(own, replies)
        entry, failed = own[0]
    else:
        entry, failed = exchange.scatter(replies)
    if failed is not None:
        raise Failure(*failed).raised(what) from error
    return entry if entries is None else entries[0]  # type: ignore[no-any-return]


def on_all(what: str, step: Callable[[], T]) -> T:
    """Run a step on every rank, and return its own result; if it fails on one, all ranks raise.

    **Collective**: every rank; see `run_then_complete`.
    """
    result, error = _attempt(step)
    failures = all_gather_object(None if error is None else Failure.of(error))
    for failure in failures:
        if failure is not None:
            raise failure.raised(what) from error
    return result  # type: ignore[no-any-return]


def _attempt(step: Callable[[], T]) -> tuple[Any, Exception | None]:
    """Return the result of a step, or None and its error."""
    try:
        return step(), None
    except Exception as error:
        return None, error
