"""Consistency across ranks: all make the same calls, and all learn of a failure on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.dist.groups import Comm, GroupLike, get_local_group, resolve
from lockstep.dist.header import (
    CALL_HEADER_BYTES,
    TENSOR_HEADER_BYTES,
    all_gather_header,
    broadcast_header,
    decode_failure,
    report_failure,
    require_no_failure,
)
from lockstep.errors import CollectiveMismatchError

CheckMode: TypeAlias = Literal["off", "sample", "always"]

_MODES = ("off", "sample", "always")
_SAMPLE_FIRST, _SAMPLE_EVERY = 20, 100
_NO_FAILURE = bytes(TENSOR_HEADER_BYTES)
_UNREPORTED: Final = nullcontext()

_mode: CheckMode = "off"
_calls: WeakKeyDictionary[ProcessGroup, count[int]] = WeakKeyDictionary()


def check_collectives(mode: CheckMode = "always") -> None:
    """Choose how often ranks compare their calls of collectives before they run them.

    Ranks that call different collectives, or the same one with different shapes, abort or hang. A check turns that into
    a `CollectiveMismatchError` on every rank, which lists the call of each rank.

    Args:
        mode: ``"off"`` (the initial mode), ``"always"``, or ``"sample"``: the first 20 calls of each group and every
            hundredth after. The environment variable ``LOCKSTEP_CHECK`` sets the mode when `init_dist` is called.

    **Collective**: every rank, at the same point of the program; nothing is sent. **Cost**: for each checked call, one
    message of 256 bytes from every rank to every rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce, check_collectives, get_rank
        >>> check_collectives("always")
        >>> try:
        ...     all_reduce(torch.ones(2 + get_rank()))
        ... except CollectiveMismatchError as error:
        ...     "rank 1: all_reduce(float32[3], sum)" in str(error)
        True
        >>> check_collectives("off")
    """
    global _mode
    if mode not in _MODES:
        raise ValueError(f"`mode` must be one of {', '.join(_MODES)}, but is {mode!r}")
    _mode = mode


def check_mode() -> CheckMode:
    """Return the mode that `check_collectives` has set."""
    return _mode


def check_call(name: str, comm: Comm, *arguments: object) -> None:
    """Compare this call with those of all ranks, if the mode requires it.

    **Raises**: CollectiveMismatchError, on every rank.
    """
    if _mode != "off":
        _compare(f"{name}({', '.join(map(_described, arguments))})", comm)


def report_refusals(name: str, comm: Comm) -> AbstractContextManager[None]:
    """Return a context that runs the checks of a call's arguments, before `check_call`.

    If they refuse the call on this rank, the other ranks learn of it in their `check_call`, if the mode requires a
    comparison.
    """
    return _UNREPORTED if _mode == "off" else _reporting_refusals(name, comm)


@contextmanager
def fail_together(comm: Comm) -> Iterator[None]:
    """Run a block on every rank; if it raises on one rank, all ranks raise.

    The block itself must not call collectives.

    **Collective**: every rank. **Raises**: a failing rank raises its own error; the others raise PeerError, which names
    the first failing rank.
    """
    with report_failure(comm, kind=BaseException):
        yield
    require_no_failure([decode_failure(header) for header in all_gather_header(_NO_FAILURE, comm)], comm)


@contextmanager
def main_process_first(group: GroupLike = None) -> Iterator[None]:
    """Let rank 0 run a block before the others do, for instance to download a file that they then find in the cache.

    **Collective**: every rank of the group. The others wait at most for the group's timeout.

    **Raises**: on rank 0, the block's own error; on the others, PeerError, without running the block.

    **Example (2 ranks)**::

        >>> from lockstep.dist import main_process_first
        >>> with main_process_first():
        ...     data = "loaded, or found in the cache"
    """
    comm = resolve(group)
    if comm.rank != 0:
        require_no_failure([decode_failure(broadcast_header(_NO_FAILURE, 0, comm))], comm, ranks=[0])
        yield
        return
    with report_failure(comm, partial(broadcast_header, src=0), kind=BaseException):
        yield
    broadcast_header(_NO_FAILURE, 0, comm)


@contextmanager
def local_main_process_first() -> Iterator[None]:
    """Let the first rank of each node run a block before the others of that node do; see `main_process_first`.

    **Collective**: every rank of the node. On several nodes it needs `init_local_group` first.

    **Example (2 ranks)**::

        >>> from lockstep.dist import local_main_process_first
        >>> with local_main_process_first():
        ...     data = "unpacked to this node's disk, or found there"
    """
    with main_process_first(get_local_group()):
        yield


@contextmanager
def _reporting_refusals(name: str, comm: Comm) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        with suppress(CollectiveMismatchError):  # this rank raises its own error
            _compare(f"{name}, refused: {type(error).__name__}: {error}", comm)
        raise


def _compare(call: str, comm: Comm) -> None:
    if comm.pg is None or not _is_due(comm.pg):
        return
    header = call.encode(errors="replace")[:CALL_HEADER_BYTES].ljust(CALL_HEADER_BYTES, b"\0")
    calls = [other.rstrip(b"\0").decode(errors="replace") for other in all_gather_header(header, comm)]
    if len(set(calls)) > 1:
        table = "\n".join(f"  rank {rank}: {other}" for rank, other in enumerate(calls))
        raise CollectiveMismatchError(
            f"all ranks must call the same collective with matching arguments, but call\n{table}"
        )


def _is_due(pg: ProcessGroup) -> bool:
    if _mode == "always":
        return True
    number = next(_calls.setdefault(pg, count()))
    return number < _SAMPLE_FIRST or number % _SAMPLE_EVERY == 0


def _described(argument: object) -> str:
    if isinstance(argument, Tensor):
        dims = ", ".join(map(str, argument.shape))
        return f"{str(argument.dtype).removeprefix('torch.')}[{dims}]"
    return str(argument)
