"""Blocks that all ranks leave together: a failure inside one becomes an error on every rank, nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call
from lockstep.dist.packets import SLOT_BYTES, failure_in, pack_failure, require_no_failure
from lockstep.dist.parcels import spread_outcome
from lockstep.dist.queries import get_local_group
from lockstep.dist.slots import spread_slot, swap_slots

T = TypeVar("T")


@contextmanager
def together(here: Group) -> Iterator[None]:
    """Run a block on every rank; where it raises on one, it raises on all.

    The block itself must hold no collective.

    **Collective**: every rank. **Raises**: on a failing rank its own error; PeerError, naming the first such rank, on
    the others.
    """
    try:
        yield
    except BaseException as error:
        swap_slots(pack_failure(error), here)
        raise
    require_no_failure([failure_in(slot) for slot in swap_slots(bytearray(SLOT_BYTES), here)], here)


def run_on_main(func: Callable[[], T], group: GroupLike = None) -> T:
    """Run `func` on rank 0 alone, and return its result on every rank.

    For what one rank does for all: looking for a file, making a folder, asking a server.

    Args:
        func: called on rank 0 only. It must hold no collective of the group, and return something that can be pickled.
        group: where; None is the default group.

    **Collective**: every rank of the group. The others wait at most for the group's timeout.

    **Returns**: on rank 0 the object itself, elsewhere a copy of it.

    **Raises**: on rank 0 what `func` raises, or TypeError where its result can't be pickled; on the others PeerError,
    naming that error.

    **Cost**: 4 KiB to each rank, and what of the pickled result does not fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, run_on_main
        >>> run_on_main(lambda: f"found by rank {get_rank()}")
        'found by rank 0'
    """
    here = resolve(group)
    if not callable(func):
        raise TypeError(
            f"`func` must be callable, but is {func!r} ({here.here}). Pass the function, without calling it"
        )
    check_call("run_on_main", here)
    return spread_outcome(func, 0, here)


@contextmanager
def main_process_first(group: GroupLike = None) -> Iterator[None]:
    """Let rank 0 run a block before the others do, for instance to download what they then find in the cache.

    **Collective**: every rank of the group. The others wait at most for the group's timeout.

    **Raises**: on rank 0 what the block raises; on the others PeerError, without running the block.

    **Example (2 ranks)**::

        >>> from lockstep.dist import main_process_first
        >>> with main_process_first():
        ...     data = "loaded, or found in the cache"
    """
    here = resolve(group)
    if here.rank != 0:
        require_no_failure([failure_in(spread_slot(bytearray(SLOT_BYTES), 0, here))], here, ranks=[0])
        yield
        return
    try:
        yield
    except BaseException as error:
        spread_slot(pack_failure(error), 0, here)
        raise
    spread_slot(bytearray(SLOT_BYTES), 0, here)


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
