"""Who am I, and how many are we: answers that cost no communication and need no group to exist."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from lockstep.dist import world
from lockstep.dist.arguments import NOT_GIVEN, either, is_int
from lockstep.dist.groups import GroupLike, resolve
from lockstep.errors import DistError

P = ParamSpec("P")
R = TypeVar("R")

# Weak, so that nothing here keeps a destroyed group alive.
_local_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def get_backend(group: GroupLike = None) -> str | None:
    """Return the name of the group's backend, or None where no group exists."""
    return resolve(group).backend


def get_rank(group: GroupLike = None) -> int:
    """Return this process's rank within the group; 0 where no group exists."""
    return resolve(group).rank


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in the group; 1 where no group exists."""
    return resolve(group).size


def get_dist_info(group: GroupLike = None) -> tuple[int, int]:
    """Return ``(rank, world_size)`` within the group; ``(0, 1)`` where no group exists."""
    resolved = resolve(group)
    return resolved.rank, resolved.size


def is_main_process(group: GroupLike = None) -> bool:
    """Return whether this process is rank 0 of the group."""
    return resolve(group).rank == 0


def get_default_group() -> ProcessGroup | None:
    """Return the default process group, or None where there is none."""
    return resolve().pg


def get_local_rank() -> int:
    """Return this process's rank among those on the same node; 0 where no group exists.

    **Raises**: DistError where the default group was made by other means and nothing says how it lies on nodes.
    """
    local = _initialised_local_group()
    if local is not None:
        return resolve(local).rank
    return _placement("local rank", "local_rank", 0)


def get_local_size() -> int:
    """Return the number of ranks on this node; 1 where no group exists. Raises as `get_local_rank`."""
    local = _initialised_local_group()
    if local is not None:
        return resolve(local).size
    return _placement("local size", "local_size", 1)


def get_node_rank() -> int:
    """Return the number of this node, counted from 0; 0 where no group exists. Raises as `get_local_rank`."""
    return _placement("node rank", "node_rank", 0)


def get_num_nodes() -> int:
    """Return the number of nodes; 1 where no group exists. Raises as `get_local_rank`."""
    return _placement("number of nodes", "num_nodes", 1)


def get_local_group() -> ProcessGroup | None:
    """Return the group of the ranks on this node, or None where no group exists.

    On a single node that is the default group itself.

    **Raises**: DistError on several nodes, before `init_local_group`.
    """
    if not torch_dist.is_initialized():
        return None
    local = _initialised_local_group()
    if local is not None:
        return local
    if get_num_nodes() == 1:
        return get_default_group()
    raise DistError(
        f"`get_local_group` on several nodes needs init_local_group() first, called on every rank ({resolve().here})"
    )


@overload
def init_local_group(group_size: int, /) -> None: ...
@overload
def init_local_group(*, group_size: int) -> None: ...
@overload
def init_local_group(node_rank: int, num_gpus_per_node: int) -> None: ...
def init_local_group(
    node_rank: int = NOT_GIVEN, num_gpus_per_node: int | None = None, *, group_size: int = NOT_GIVEN
) -> None:
    """Make one group for each run of consecutive ranks, normally those of a node.

    Call it as ``init_local_group(node_rank, num_gpus_per_node)`` or ``init_local_group(group_size)``. The local queries
    work without it; it is needed for `get_local_group` on several nodes.

    **Collective**: every rank of the default group. **Raises**: ValueError where the size does not divide the world
    size, or `node_rank` is not where this rank falls.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_local_rank, get_local_size, init_local_group
        >>> init_local_group(1)
        >>> get_local_rank(), get_local_size()
        (0, 1)
    """
    group = resolve()
    if num_gpus_per_node is None:
        size = either("node_rank", node_rank, "group_size", group_size)
    elif group_size is NOT_GIVEN:
        node_rank, size = either("node_rank", node_rank, "group_size", group_size), num_gpus_per_node
    else:
        raise TypeError("init_local_group() takes `node_rank` and `num_gpus_per_node`, or `group_size` alone")
    if not is_int(size):
        raise TypeError(f"the size of a local group must be an int, but is {size!r} ({group.here})")
    if size < 1 or group.size % size:
        raise ValueError(
            f"the size of a local group must divide the world size, {group.size}, but is {size} ({group.here})"
        )
    node = group.rank // size
    if num_gpus_per_node is not None and node_rank != node:
        raise ValueError(f"`node_rank` must be {node} for {size} ranks per node, but is {node_rank} ({group.here})")
    if group.pg is None:
        return
    # Every rank takes part in making every group, as torch asks.
    made = [torch_dist.new_group(list(range(first, first + size))) for first in range(0, group.size, size)]
    _local_groups.clear()
    _local_groups[group.pg] = made[node]


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Let only rank 0 of the default group run `func`; the others get None at once.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, master_only
        >>> @master_only
        ... def greet() -> str:
        ...     return "hello"
        >>> greet() == ("hello" if get_rank() == 0 else None)
        True
    """

    @wraps(func)
    def on_main_process(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if is_main_process() else None

    return on_main_process


def _initialised_local_group() -> ProcessGroup | None:
    # Keyed by the default group, so that nothing outlives destroy_dist.
    pg = resolve().pg
    return None if pg is None else _local_groups.get(pg)


def _placement(what: str, attribute: str, alone: int) -> int:
    if not torch_dist.is_initialized():
        return alone
    topology = world.current_topology()
    if topology is None:
        raise DistError(
            f"the {what} is unknown, because the default group was not made by init_dist and the environment "
            f"does not describe it ({resolve().here}). Start with init_dist, or set LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return int(getattr(topology, attribute))
