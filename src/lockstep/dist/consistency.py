"""Consistency across ranks: all make the same calls, and all learn of a failure on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from torch import Tensor

from lockstep.errors import DistError
from lockstep.groups import Comm, GroupLike, get_local_group, resolve, warn_of_early_call
from lockstep.transport.control import exchange, report_failure
from lockstep.watch.watch import start_watch

CheckMode: TypeAlias = Literal["off", "sample", "always"]

_MODES = ("off", "sample", "always")
FIRST_CALLS = 20  # of a group, which are compared in every mode
_SAMPLE_ONE_OF = 16

_mode: CheckMode = "off"


def check_collectives(mode: CheckMode = "always") -> None:
    """Choose how often ranks compare their calls of collectives before they run them.

    Ranks that call different collectives, or the same one with different shapes, abort, hang, or get wrong numbers. A
    check turns that into a `CollectiveMismatchError` on every rank, which shows the first call that differs, and the
    line of each rank that makes it. A check compares a digest of all calls so far in the group, so it also finds a
    difference between two checks.

    Args:
        mode: ``"off"`` (the initial mode): the first 20 calls of each group, and the first of each kind (operation,
            dtype, shape, arguments). ``"sample"``: also one call in 16, chosen by its number, so that a
            difference is found within 25 calls in nine cases of ten, and within 100 in all.
            ``"always"``: every call. The environment variable ``LOCKSTEP_CHECK`` sets the mode when `init_dist` is
            called.

    Calls with ``async_op=True`` wait for no other rank, so they are compared later. In every mode, digests are also
    compared wherever hosts tell each other something (`all_gather`, `gather`, `scatter`, objects, dicts, `barrier`); by
    a thread every second, and at the end by `destroy_dist`. Not compared: calls of `torch.distributed`'s own functions,
    and what DDP and FSDP call; ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` compares those.

    Between comparisons, ranks that swap two calls may get wrong numbers or wait, until the thread finds it; gloo ends
    the process with SIGABRT where a message is longer than expected (torch 2.13). ``"sample"`` makes that unlikely, and
    ``"always"`` impossible.

    **Collective**: every rank, at the same point of the program; nothing is sent. **Cost**: for each compared call 256
    bytes from each rank to each, over gloo, of more than 8 ranks 2 log n messages one after the other; nothing on an
    accelerator. For others, a microsecond.

    **Example (2 ranks)**::

        >>> from lockstep.dist import CollectiveMismatchError, all_reduce, check_collectives, get_rank
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


def check_call(
    name: str,
    comm: Comm,
    *arguments: object,
    compares: bool = True,
    async_op: bool = False,
    payload: Callable[[], bytes] = bytes,
) -> list[bytes]:
    """Record this call; if a comparison is due, compare it with those of all ranks, and return their payloads.

    Whether one is due depends only on facts that are the same on all ranks of a correct program: the number of the
    call, and the calls before it. The line that makes the call is not one of them.

    Args:
        name: name of the function.
        comm: the group.
        *arguments: those that must be the same on all ranks; of tensors, this is dtype and shape.
        compares: False for a call that makes an exchange itself, which compares, or that must not be compared before it
            begins.
        async_op: the call must not wait for other ranks, so it is not compared now.
        payload: makes what this rank tells the others in a comparison.

    **Raises**: CollectiveMismatchError, on every rank; DistError where this rank is in a block that it runs alone.
    """
    calls = comm.calls
    if calls is None:
        warn_of_early_call(comm, f"calls {name}, which does nothing with other ranks")
        return []
    calls.raise_failure()
    if calls.inside and comm.size > 1:
        raise DistError(
            f"`{name}` must be called by all ranks of {comm.name}, but {comm.this_rank} calls it inside "
            f"{calls.inside}, which the others wait for. Call it before or after"
        )
    if not calls.number:
        start_watch()
    if len(comm.devices) > 1 and any(isinstance(x, Tensor) and x.is_cpu for x in arguments):
        arguments = (*arguments, "on the CPU")  # another backend sends it
    is_new = calls.add(name, (*arguments, "async") if async_op else arguments)
    if compares and not async_op and comm.size > 1 and (is_new or _mode == "always" or _is_due(calls.number)):
        return exchange(comm, payload())
    return []


@contextmanager
def alone(name: str, comm: Comm) -> Iterator[None]:
    """Run a block on this rank alone, while the others wait in `exchange`; `name` is for messages.

    Collectives of the group inside would wait for ever, so they raise.
    """
    calls = comm.calls
    if calls is not None:
        calls.inside = name
    try:
        yield
    finally:
        if calls is not None:
            calls.inside = ""


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
    check_call("main_process_first", comm, compares=False)
    if comm.rank != 0:
        exchange(comm)
        yield
        return
    with report_failure(comm, BaseException), alone("main_process_first", comm):
        yield
    exchange(comm)


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


def _is_due(number: int) -> bool:
    # Python's hash of integers is the same in every process, so that all ranks choose the same calls.
    return number <= FIRST_CALLS or (_mode == "sample" and hash((number, 0x5EED)) % _SAMPLE_ONE_OF == 0)
