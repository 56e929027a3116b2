"""Blocks that all ranks leave together: a failure inside one becomes an error on every rank, nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.packets import SLOT_BYTES, failure_in, pack_failure, require_no_failure
from lockstep.dist.queries import get_local_group
from lockstep.dist.slots import spread_slot, swap_slots


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
