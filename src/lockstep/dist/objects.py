"""Collectives on Python objects; see `pickling` for how objects are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist.consistency import alone, check_call
from lockstep.dist.pickling import all_gather_pickled, broadcast_pickled, gather_pickled, scatter_pickled
from lockstep.dist.validate import GROUP_TWICE, NOT_GIVEN, either, places_given, require_only_on, require_rank
from lockstep.groups import Comm, GroupLike, resolve
from lockstep.transport.control import GatherHandle, report_failure

T = TypeVar("T")


@overload
def all_gather_object(data: T, group: GroupLike = ...) -> list[T]: ...
@overload
def all_gather_object(*, obj: T, group: GroupLike = ...) -> list[T]: ...
@overload
def all_gather_object(
    data: list[Any] = ..., obj: object = ..., group: GroupLike = ..., *, object_list: list[Any] = ...
) -> None: ...
def all_gather_object(  # type: ignore[misc]  # the overloads share places, not names
    data: Any = NOT_GIVEN, obj: Any = NOT_GIVEN, group: GroupLike = None, *, object_list: list[Any] = NOT_GIVEN
) -> list[Any] | None:
    """Give every rank every rank's object, as ``all_gather_object(obj) -> list`` or ``all_gather_object(list, obj)``.

    Args:
        data: this rank's object; or the list to fill, with one entry for each rank.
        obj: this rank's object, in the filling form. A group given here is the group of the other form. None here means
            the default group of the other form, unless `data` is a list to fill: as many Nones as there are ranks, two
            or more. Given alone by keyword, `obj` is an alias for `data`.
        group: the process group; None is the default group.
        object_list: an alias for `data` in the filling form.

    **Collective**: every rank of the group; ranks may mix the two forms.

    **Returns**: the objects in rank order, this rank's own as a copy. Tensors keep dtype, shape and `requires_grad`;
    those from an accelerator arrive on this process's own accelerator.

    **Raises**: TypeError on a rank whose object can't be pickled, ValueError on one whose list does not have one entry
    for each rank, PeerError on the others, before anything large is sent; DistError on a rank that can't load what it
    received. The other ranks do not learn of this last error.

    **Cost**: one exchange of 256 bytes between the hosts, and what does not fit in it. Tensors and arrays of
    64 KiB or more are sent from and received into their own memory, without further copies.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather_object, get_rank
        >>> all_gather_object({"rank": get_rank()})
        [{'rank': 0}, {'rank': 1}]
        >>> places = [None, None]
        >>> all_gather_object(places, "ab"[get_rank()])
        >>> places
        ['a', 'b']

    **Source**: PEP 574 (pickle protocol 5).
    """
    if object_list is NOT_GIVEN and data is NOT_GIVEN:
        data, obj = either("data", data, "obj", obj), NOT_GIVEN
    is_filling = object_list is not NOT_GIVEN
    if is_filling and obj is NOT_GIVEN:
        raise TypeError("`all_gather_object` must be given `obj`, this rank's object, with `object_list`")
    data = either("data", data, "object_list", object_list)
    if not is_filling and _is_short(data, obj, group):
        if isinstance(obj, ProcessGroup | DeviceMesh) and group is not None:
            raise TypeError(GROUP_TWICE)
        comm = resolve(group if obj is NOT_GIVEN else obj)
        check_call("all_gather_object", comm, compares=False)
        return all_gather_pickled(data, comm)
    comm = resolve(group)
    check_call("all_gather_object", comm, compares=False)
    with report_failure(comm):
        _require_places("object_list", data, comm)
    data[:] = all_gather_pickled(obj, comm)
    return None


def gather_object(
    data: T = NOT_GIVEN,
    object_gather_list: Any = None,
    dst: Any = 0,
    group: GroupLike = None,
    *,
    obj: T = NOT_GIVEN,
) -> list[T] | None:
    """Give rank `dst` every rank's object, as ``gather_object(obj, dst) -> list`` or ``gather_object(obj, list, dst)``.

    Args:
        data: this rank's object.
        object_gather_list: on `dst`, the list to fill, with one entry for each rank; elsewhere None.
        dst: rank within the group.
        group: the process group; None is the default group.
        obj: an alias for `data`.

    **Collective**: every rank of the group.

    **Returns**: on `dst` the objects in rank order (None if it filled a list); None elsewhere.

    **Raises**: as `all_gather_object`; and ValueError on another rank than `dst` that passes a list, PeerError on the
    others.

    **Cost**: one exchange of 256 bytes between the hosts; then the object, to `dst` alone.

    **Example (2 ranks)**::

        >>> from lockstep.dist import gather_object, get_rank
        >>> gather_object("ab"[get_rank()]) == (["a", "b"] if get_rank() == 0 else None)
        True
    """
    object_gather_list, dst, group = places_given(object_gather_list, dst, group)
    data = either("data", data, "obj", obj)
    comm = resolve(group)
    dst = require_rank("dst", dst, comm)
    check_call("gather_object", comm, dst, compares=False)
    is_filling = object_gather_list is not None and comm.rank == dst
    with report_failure(comm):
        require_only_on(dst, "object_gather_list", object_gather_list, comm)
        if is_filling:
            _require_places("object_gather_list", object_gather_list, comm)
    gathered = gather_pickled(data, dst, comm, copy_own=True)
    if is_filling:
        object_gather_list[:] = gathered
        return None
    return None if gathered is None else list(gathered)


def start_gather_bytes(data: bytes, dst: int = 0, group: GroupLike = None) -> GatherHandle:
    """Begin to give rank `dst` every rank's bytes; `wait` of what this returns completes it.

    Meanwhile the ranks may go on, and call other collectives.

    Args:
        data: this rank's bytes, best less than 4 KiB.
        dst: rank within the group.
        group: the process group; None is the default group.

    **Collective**: every rank of the group. Each must call `wait`, in the order of its calls of this function.

    **Cost**: 4 KiB from each rank to `dst`; a further message for what does not fit.

    **Example (2 ranks)**::

        >>> from lockstep.dist import barrier, get_rank
        >>> from lockstep.dist.objects import start_gather_bytes
        >>> handle = start_gather_bytes(b"ab"[: get_rank() + 1])
        >>> barrier()
        >>> handle.wait() == ([b"a", b"ab"] if get_rank() == 0 else None)
        True
    """
    comm = resolve(group)
    dst = require_rank("dst", dst, comm)
    check_call("start_gather_bytes", comm, dst, compares=False)
    return GatherHandle(data, dst, comm)


def broadcast_object(obj: T, src: int = 0, group: GroupLike = None) -> T:
    """Return rank `src`'s object on every rank; what the others pass is ignored.

    **Collective**: every rank of the group.

    **Raises**: TypeError on `src` if its object can't be pickled, PeerError on the others; DistError on a rank that
    can't load what it received. **Cost**: one exchange of 256 bytes between the hosts, and what does not fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_object, get_rank
        >>> broadcast_object({"seed": 7} if get_rank() == 0 else None)
        {'seed': 7}
    """
    comm = resolve(group)
    src = require_rank("src", src, comm)
    check_call("broadcast_object", comm, src, compares=False)
    return broadcast_pickled(obj, src, comm)  # type: ignore[no-any-return]


def broadcast_object_list(
    data: list[Any] = NOT_GIVEN,
    src: int = 0,
    group: GroupLike = None,
    device: str | torch.device | None = None,
    *,
    object_list: list[Any] = NOT_GIVEN,
) -> None:
    """Replace the entries of every rank's list with those of rank `src`'s list, in place.

    Args:
        data: the list.
        src: rank within the group.
        group: the process group; None is the default group.
        device: ignored, for compatibility; the group determines the device.
        object_list: an alias for `data`.

    **Collective**: every rank of the group, with lists of the same length.

    **Raises**: as `broadcast_object`; ValueError on a rank whose list differs in length from `src`'s, after all ranks
    have received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_object_list, get_rank
        >>> data = ["a", {"b": 1}] if get_rank() == 0 else [None, None]
        >>> broadcast_object_list(data)
        >>> data
        ['a', {'b': 1}]
    """
    comm = resolve(group)
    data = either("data", data, "object_list", object_list)
    if not isinstance(data, list):
        raise TypeError(f"`data` must be a list, but is {type(data).__name__} ({comm.this_rank})")
    src = require_rank("src", src, comm)
    check_call("broadcast_object_list", comm, src, compares=False)
    received = broadcast_pickled(data, src, comm)
    if len(received) != len(data):
        raise ValueError(
            f"`data` must have {len(received)} entries, as on rank {src}, but has {len(data)} ({comm.this_rank})"
        )
    data[:] = received


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: GroupLike = None,
) -> None:
    """Put the i-th entry of rank `src`'s list into the first entry of rank i's output list.

    **Collective**: every rank of the group; only `src` passes an input list.

    **Raises**: ValueError on `src` if its list does not have one entry for each rank, TypeError if an entry can't be
    pickled, PeerError on the others; DistError on a rank that can't load what it received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, scatter_object_list
        >>> output = [None]
        >>> scatter_object_list(output, ["for 0", "for 1"] if get_rank() == 0 else None)
        >>> output == [f"for {get_rank()}"]
        True
    """
    comm = resolve(group)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(
            f"`scatter_object_output_list` must be a list with at least one place, but is "
            f"{scatter_object_output_list!r} ({comm.this_rank})"
        )
    src = require_rank("src", src, comm)
    check_call("scatter_object_list", comm, src, compares=False)
    if comm.rank == src:
        with report_failure(comm):
            _require_places("scatter_object_input_list", scatter_object_input_list, comm)
    scatter_object_output_list[0] = scatter_pickled(scatter_object_input_list or (), src, comm)


def run_on_main(func: Callable[[], T], group: GroupLike = None) -> T:
    """Run `func` on rank 0 alone, and return its result on every rank.

    Use it for work that one rank does for all: looking for a file, making a folder, asking a server.

    Args:
        func: called on rank 0 only. It must not call collectives of the group, and must return something that can be
            pickled.
        group: the process group; None is the default group.

    **Collective**: every rank of the group. The others wait at most for the group's timeout.

    **Returns**: on rank 0 the object itself, elsewhere a copy of it.

    **Raises**: on rank 0 what `func` raises, or TypeError if its result can't be pickled; on the others PeerError,
    which names that error.

    **Cost**: one exchange of 256 bytes between the hosts, and the pickled result if it does not fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, run_on_main
        >>> run_on_main(lambda: f"found by rank {get_rank()}")
        'found by rank 0'
    """
    comm = resolve(group)
    if not callable(func):
        raise TypeError(
            f"`func` must be callable, but is {func!r} ({comm.this_rank}). Pass the function, without calling it"
        )
    check_call("run_on_main", comm, compares=False)
    result = None
    if comm.rank == 0 or comm.is_alone:
        with report_failure(comm, BaseException), alone("run_on_main", comm):
            result = func()
    return broadcast_pickled(result, 0, comm)  # type: ignore[no-any-return]


def _is_short(data: object, obj: object, group: GroupLike) -> bool:
    """Return whether a call has the form ``all_gather_object(obj, group)``."""
    # torch.distributed.new_group returns NON_GROUP_MEMBER to processes that are not in the group.
    is_group = isinstance(obj, ProcessGroup | DeviceMesh) or obj is GroupMember.NON_GROUP_MEMBER
    is_to_fill = isinstance(data, list) and 1 < len(data) == resolve().size and all(place is None for place in data)
    return obj is NOT_GIVEN or is_group or (obj is None and group is None and not is_to_fill)


def _require_places(name: str, places: object, comm: Comm) -> None:
    if not isinstance(places, list) or len(places) != comm.size:
        got = f"{len(places)} entries" if isinstance(places, list) else type(places).__name__
        raise ValueError(
            f"`{name}` must be a list of {comm.size} entries, one for each rank, but is {got} ({comm.this_rank})"
        )
