"""Collectives on Python objects. Large tensors and arrays inside them travel out of band, without a pickled copy."""

from __future__ import annotations

from functools import partial
from numbers import Integral
from typing import Any, TypeVar, overload

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist.arguments import NOT_GIVEN, either, group_rank
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call
from lockstep.dist.parcels import collect_objects, deal_objects, spread_object, swap_objects

T = TypeVar("T")


@overload
def all_gather_object(data: T, group: GroupLike = ..., /) -> list[T]: ...
@overload
def all_gather_object(data: T, *, group: GroupLike) -> list[T]: ...
@overload
def all_gather_object(*, obj: T, group: GroupLike = ...) -> list[T]: ...
@overload
def all_gather_object(
    data: list[Any] = ..., obj: object = ..., group: GroupLike = ..., *, object_list: list[Any] = ...
) -> None: ...
def all_gather_object(
    data: Any = NOT_GIVEN, obj: Any = NOT_GIVEN, group: GroupLike = None, *, object_list: list[Any] = NOT_GIVEN
) -> list[Any] | None:
    """Give every rank every rank's object, as ``all_gather_object(obj) -> list``, or filling a list in the first place.

    Args:
        data: this rank's object; or the list to fill, with one place for each rank.
        obj: this rank's object, in the filling form. A group in this place is the group of the other form; so is None,
            unless `data` is a list of as many Nones as there are ranks, two or more, which waits to be filled. By
            itself it is `data` by its other published name.
        group: where; None is the default group.
        object_list: `data` of the filling form, by its published name.

    **Collective**: every rank of the group; ranks may mix the two forms.

    **Returns**: the objects in rank order, this rank's own as a copy. Tensors keep dtype, shape and `requires_grad`;
    those from an accelerator arrive on this process's own.

    **Raises**: TypeError on a rank whose object can't be pickled, ValueError on one whose list has not one place for
    each rank, PeerError on the others, before anything large is sent; DistError on a rank that can't load what it
    received, which the others do not notice.

    **Cost**: 4 KiB from each rank, and what does not fit in it. Tensors and arrays of 64 KiB or more are sent from
    their own memory and arrive in theirs; nothing else is held.

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
    is_filling = object_list is not NOT_GIVEN and obj is not NOT_GIVEN
    data = either("data", data, "object_list", object_list)
    if not is_filling and _is_short(data, obj, group):
        here = resolve(group if obj is NOT_GIVEN else obj)
        check_call("all_gather_object", here)
        return swap_objects(data, here)
    here = resolve(group)
    check_call("all_gather_object", here)
    data[:] = swap_objects(obj, here, partial(_require_places, "object_list", data, here))
    return None


@overload
def gather_object(data: T = ..., dst: int = ..., group: GroupLike = ..., *, obj: T = ...) -> list[T] | None: ...
@overload
def gather_object(
    data: T = ...,
    object_gather_list: list[Any] | None = ...,
    dst: int = ...,
    group: GroupLike = ...,
    *,
    obj: T = ...,
) -> list[T] | None: ...
def gather_object(  # type: ignore[misc]  # the overloads share places, not names
    data: Any = NOT_GIVEN,
    object_gather_list: Any = None,
    dst: Any = 0,
    group: GroupLike = None,
    *,
    obj: Any = NOT_GIVEN,
) -> list[Any] | None:
    """Give rank `dst` every rank's object, as ``gather_object(obj, dst) -> list`` or filling a list in second place.

    Args:
        data: this rank's object.
        object_gather_list: on `dst`, the list to fill, with one place for each rank; elsewhere None.
        dst: rank within the group.
        group: where; None is the default group.
        obj: `data` by its other published name.

    **Collective**: every rank of the group.

    **Returns**: on `dst` the objects in rank order (None where it filled a list); None elsewhere.

    **Raises**: as `all_gather_object`.

    **Cost**: 4 KiB from each rank to each, and what does not fit in it to `dst` alone.

    **Example (2 ranks)**::

        >>> from lockstep.dist import gather_object, get_rank
        >>> gather_object("ab"[get_rank()]) == (["a", "b"] if get_rank() == 0 else None)
        True
    """
    if isinstance(object_gather_list, Integral):
        group = group if isinstance(dst, int) and dst == 0 else dst  # the short form has its group in third place
        object_gather_list, dst = None, object_gather_list
    data = either("data", data, "obj", obj)
    here = resolve(group)
    dst = group_rank("dst", dst, here)
    check_call("gather_object", here, dst)
    is_filling = object_gather_list is not None and here.rank == dst
    check = partial(_require_places, "object_gather_list", object_gather_list, here) if is_filling else None
    gathered = collect_objects(data, dst, here, copy_own=True, check=check)
    if gathered is None:
        return None
    if is_filling:
        object_gather_list[:] = gathered
        return None
    return list(gathered)


def broadcast_object(obj: T, src: int = 0, group: GroupLike = None) -> T:
    """Return rank `src`'s object on every rank; what the others hand in is not looked at.

    **Collective**: every rank of the group.

    **Raises**: TypeError on `src` where its object can't be pickled, PeerError on the others; DistError on a rank that
    can't load what it received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_object, get_rank
        >>> broadcast_object({"seed": 7} if get_rank() == 0 else None)
        {'seed': 7}
    """
    here = resolve(group)
    src = group_rank("src", src, here)
    check_call("broadcast_object", here, src)
    received: T = spread_object(obj, src, here)
    return received


def broadcast_object_list(
    data: list[Any] = NOT_GIVEN,
    src: int = 0,
    group: GroupLike = None,
    device: str | torch.device | None = None,
    *,
    object_list: list[Any] = NOT_GIVEN,
) -> None:
    """Replace the entries of every rank's list by those of rank `src`'s, in place.

    Args:
        data: the list.
        src: rank within the group.
        group: where; None is the default group.
        device: taken for the sake of older callers; the group knows where it talks.
        object_list: `data` by its other published name.

    **Collective**: every rank of the group, with lists of one length.

    **Raises**: as `broadcast_object`; ValueError on a rank whose list has another length than `src`'s, after all have
    received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_object_list, get_rank
        >>> data = ["a", {"b": 1}] if get_rank() == 0 else [None, None]
        >>> broadcast_object_list(data)
        >>> data
        ['a', {'b': 1}]
    """
    here = resolve(group)
    data = either("data", data, "object_list", object_list)
    if not isinstance(data, list):
        raise TypeError(f"`data` must be a list, but is {type(data).__name__} ({here.here})")
    src = group_rank("src", src, here)
    check_call("broadcast_object_list", here, src)
    received = spread_object(data, src, here)
    if len(received) != len(data):
        raise ValueError(
            f"`data` must have {len(received)} entries, as on rank {src}, but has {len(data)} ({here.here})"
        )
    data[:] = received


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: GroupLike = None,
) -> None:
    """Put the i-th entry of rank `src`'s list into the first place of rank i's output list.

    **Collective**: every rank of the group; only `src` hands in an input list.

    **Raises**: ValueError on `src` where its list has not one entry for each rank, TypeError where one can't be
    pickled, PeerError on the others; DistError on a rank that can't load what it received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, scatter_object_list
        >>> output = [None]
        >>> scatter_object_list(output, ["for 0", "for 1"] if get_rank() == 0 else None)
        >>> output == [f"for {get_rank()}"]
        True
    """
    here = resolve(group)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(
            f"`scatter_object_output_list` must be a list with at least one place, but is "
            f"{scatter_object_output_list!r} ({here.here})"
        )
    src = group_rank("src", src, here)
    check_call("scatter_object_list", here, src)
    check = partial(_require_places, "scatter_object_input_list", scatter_object_input_list, here)
    scatter_object_output_list[0] = deal_objects(scatter_object_input_list or (), src, here, check)


def _is_short(data: object, obj: object, group: GroupLike) -> bool:
    """Return whether a call has the form ``all_gather_object(obj, group)``."""
    return obj is NOT_GIVEN or _is_group(obj) or (obj is None and group is None and not _is_waiting(data))


def _is_group(obj: object) -> bool:
    # torch.distributed.new_group hands a number of its own, that very object, to processes that are not in the group.
    return isinstance(obj, ProcessGroup | DeviceMesh) or obj is GroupMember.NON_GROUP_MEMBER


def _is_waiting(data: object) -> bool:
    return isinstance(data, list) and 1 < len(data) == resolve().size and all(place is None for place in data)


def _require_places(name: str, places: object, here: Group) -> None:
    if not isinstance(places, list) or len(places) != here.size:
        got = f"{len(places)} entries" if isinstance(places, list) else type(places).__name__
        raise ValueError(
            f"`{name}` must be a list of {here.size} entries, one for each rank, but is {got} ({here.here})"
        )
