"""Steps of all ranks that fail together: work on each rank, then on rank 0 with what all have brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from lockstep.dist import all_gather_object, gather_object, get_rank, get_world_size, scatter_object_list
from lockstep.errors import CheckpointError, ConfigError, caused_by, error_in_words, message_of

T = TypeVar("T")
U = TypeVar("U")
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, OSError, RuntimeError)
}


class Failure(NamedTuple):
    """Why a rank failed, in a form that any rank can raise."""

    rank: int
    kind: type[Exception]
    text: str
    errno: int | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return why this rank failed."""
        if isinstance(error, ConfigError):
            kind = CheckpointError if isinstance(error, CheckpointError) else ConfigError
            return cls(get_rank(), kind, message_of(error))
        if isinstance(error, OSError):
            return cls(get_rank(), OSError, message_of(error), error.errno)
        return cls(get_rank(), RuntimeError, error_in_words(error))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**self._asdict(), "kind": self.kind.__name__}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Failure:
        """Return what `to_json` of another rank has returned."""
        return cls(**{**said, "kind": _KINDS.get(said["kind"], RuntimeError)})

    def raised(self, what: str) -> Exception:
        """Return the error to raise on every rank."""
        if issubclass(self.kind, ConfigError):
            error: Exception = self.kind(f"{self.text} (rank {self.rank} of {get_world_size()})")
        else:
            error = self.kind(f"{what}: rank {self.rank}: {self.text}")
        if isinstance(error, OSError):
            error.errno = self.errno
        return caused_by(error, [self.rank])


def on_all_then_main(
    what: str, on_all: Callable[[], T], on_main: Callable[[list[T]], Sequence[U]], undo: Callable[[], None]
) -> U:
    """Run a step on every rank, then one on rank 0 with all results; return each rank's entry of what that returns.

    Args:
        what: begins the message if a step fails.
        on_all: runs on every rank, without collectives.
        on_main: runs on rank 0, without collectives; returns an entry for each rank.
        undo: runs on rank 0 if a step has failed, before any rank raises.

    **Collective**: every rank.

    Raises:
        ConfigError: a step on any rank raised one.
        OSError: the same.
        RuntimeError: a step on any rank raised anything else.
    """
    result, error = _attempt(on_all)
    outcomes = gather_object((result, None if error is None else Failure.of(error)))
    replies: list[tuple[Any, Failure | None]] | None = None
    if outcomes is not None:
        failure = next((failed for _, failed in outcomes if failed is not None), None)
        entries: Sequence[Any] | None = None
        if failure is None:
            entries, error = _attempt(lambda: on_main([found for found, _ in outcomes]))
            failure = None if error is None else Failure.of(error)
        if failure is not None:
            undo()
        replies = [(None if entries is None else entries[rank], failure) for rank in range(get_world_size())]
    output: list[Any] = [None]
    scatter_object_list(output, replies)
    entry, failure = output[0]
    if failure is not None:
        raise failure.raised(what) from error
    return entry  # type: ignore[no-any-return]


def on_all(what: str, step: Callable[[], T]) -> T:
    """Run a step on every rank, and return its own result; if it fails on one, all ranks raise.

    **Collective**: every rank; see `on_all_then_main`.
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
