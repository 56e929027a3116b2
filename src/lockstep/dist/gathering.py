"""all_gather and gather: tensors whose shapes may differ from rank to rank.

Every call sends one slot first, with shape and dtype. Tensors small enough to fit beside them have then arrived
already; larger ones follow in a second message of exactly their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast, overload

from torch import Tensor

from lockstep.dist.arguments import group_rank, require_list, require_tensor
from lockstep.dist.devices import as_bytes, copy_back, to_comm
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call
from lockstep.dist.handles import Handle
from lockstep.dist.landing import are_like, hand_out, landing_for, require_like_what_arrived
from lockstep.dist.packets import (
    SLOT_BYTES,
    Packet,
    pack_failure,
    packet_of,
    read_packets,
    require_agreement,
    require_expected,
    require_no_failure,
    take_all,
    take_new,
)
from lockstep.dist.segments import broadcast_each, receive_from, send_to
from lockstep.dist.slots import Slots, collect, room_for, swap


@overload
def all_gather(data: Tensor, group: GroupLike = ..., /) -> list[Tensor]: ...
@overload
def all_gather(data: Tensor, *, group: GroupLike) -> list[Tensor]: ...
@overload
def all_gather(
    data: Sequence[Tensor], tensor: Tensor, group: GroupLike = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def all_gather(
    data: Sequence[Tensor], tensor: Tensor, group: GroupLike = ..., *, async_op: Literal[True]
) -> Handle: ...
def all_gather(
    data: Tensor | Sequence[Tensor],
    tensor: Tensor | GroupLike = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> list[Tensor] | Handle | None:
    """Give every rank every rank's tensor, as ``all_gather(data) -> list`` or ``all_gather(tensor_list, tensor)``.

    Args:
        data: this rank's tensor; or the list to fill, with one tensor for each rank.
        tensor: this rank's tensor, in the filling form; in the other form the second place is the group's.
        group: where; None is the default group.
        async_op: in the filling form, return a handle while larger tensors are still on their way.

    **Collective**: every rank of the group; ranks may mix the two forms. **Shapes**: free on every rank, as is the
    dtype; in the filling form ``tensor_list[i]`` is as rank i's tensor.

    **Returns**: the tensors in rank order, each with memory of its own, on the device of `data`; or None, or a handle.

    **Raises**: ValueError on a rank whose list does not fit what comes, PeerError on the others, before any tensor that
    does not fit into a slot is sent.

    **Cost**: a slot of 512 bytes from each rank, and the bytes of those tensors that don't fit in it; never padded.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather, get_rank
        >>> [x.tolist() for x in all_gather(torch.arange(get_rank() + 1))]
        [[0], [0, 1]]
        >>> filled = [torch.empty(2), torch.empty(2)]
        >>> all_gather(filled, torch.full((2,), float(get_rank())))
        >>> filled[1].tolist()
        [1.0, 1.0]

    **Source**: `torch.distributed.all_gather` (2.13), which on gloo aborts the process where shapes differ.
    """
    if isinstance(data, Tensor):
        if async_op:
            raise TypeError("`async_op` needs the form all_gather(tensor_list, tensor)")
        return _all_gather(data, resolve(_group_argument(tensor, group)))
    if not isinstance(tensor, Tensor):
        raise TypeError(
            "`data` must be a tensor, or a list to fill with a tensor in second place, but they are "
            f"{type(data).__name__} and {type(tensor).__name__}"
        )
    here = resolve(group)
    return _settled(_all_gather_into(data, tensor, here), async_op, here)


@overload
def gather(data: Tensor, dst: int = ..., group: GroupLike = ...) -> list[Tensor]: ...
@overload
def gather(
    data: Tensor,
    gather_list: Sequence[Tensor] | None,
    dst: int = ...,
    group: GroupLike = ...,
    async_op: bool = ...,
) -> list[Tensor] | Handle | None: ...
def gather(  # type: ignore[misc]  # the overloads share their places, not their names
    data: Tensor,
    gather_list: Sequence[Tensor] | int | None = None,
    dst: int | GroupLike = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> list[Tensor] | Handle | None:
    """Give rank `dst` every rank's tensor, as ``gather(data, dst) -> list`` or ``gather(tensor, gather_list, dst)``.

    Args:
        data: this rank's tensor.
        gather_list: on `dst`, the tensors to fill, one for each rank; elsewhere None.
        dst: rank within the group.
        group: where; None is the default group.
        async_op: in the filling form, return a handle.

    **Collective**: every rank of the group. **Shapes**: free on every rank, as is the dtype.

    **Returns**: on `dst` the tensors in rank order, on its `data`'s device, or None where it filled a list; ``[]``
    elsewhere.

    **Raises**: ValueError on `dst` where its list does not fit what came, as only it sees that; everything has been
    received then.

    **Cost**: a slot of 512 bytes from each rank to `dst`, and the bytes of those tensors that don't fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import gather, get_rank
        >>> parts = gather(torch.ones(get_rank() + 1), dst=1)
        >>> [x.tolist() for x in parts] == ([[1.0], [1.0, 1.0]] if get_rank() == 1 else [])
        True
    """
    if isinstance(gather_list, int):
        third = None if isinstance(dst, int) and dst == 0 else dst  # the group, if anything was given there
        gather_list, dst, group = None, gather_list, _group_argument(third, group)
    if not isinstance(dst, int):
        raise TypeError(f"`dst` must be an int, but is {dst!r}")
    here = resolve(group)
    require_tensor("data", data)
    group_rank("dst", dst, here)
    check_call("gather", here, dst)
    wire = to_comm(data, here)
    packet, slots = _collect(wire, dst, here)
    if here.rank != dst:
        sent = None if packet.comes_along else send_to([as_bytes(wire)], dst, here)
        handle = _settled(sent, async_op, here)
        return handle if async_op else []
    if gather_list is not None:
        return _settled(_gather_into(gather_list, wire, packet, slots, here), async_op, here)
    parts = _gather(wire, packet, slots, here)
    if async_op:
        raise TypeError(f"`async_op` needs the form gather(tensor, gather_list, dst) ({here.here})")
    return _on_device_of(data, parts)


def _settled(handle: Handle | None, async_op: bool, here: Group) -> Handle | None:
    """Wait, or leave that to the caller; None is a handle with nothing to wait for."""
    if async_op:
        return handle or Handle((), here)
    if handle is not None:
        handle.wait()
    return None


def _all_gather(data: Tensor, here: Group) -> list[Tensor]:
    require_tensor("data", data)
    check_call("all_gather", here)
    wire = to_comm(data, here)
    packet, slots = _swap(lambda: packet_of(wire), wire, here)
    outputs = take_new(slots, packet)
    if outputs is None:
        packets = _agreed(slots, packet, here)
        outputs = [packet.tensor(slots, rank, here.comm_device) for rank, packet in enumerate(packets)]
        _exchange(wire, packets, outputs, here).wait()
    return _on_device_of(data, outputs)


def _all_gather_into(tensor_list: Sequence[Tensor], data: Tensor, here: Group) -> Handle | None:
    """Start gathering; return what to wait for, if anything."""
    require_tensor("tensor", data)
    check_call("all_gather", here)
    wire = to_comm(data, here)

    def say() -> Packet:
        require_list("tensor_list", tensor_list, here)
        return packet_of(wire, tensor_list)

    packet, slots = _swap(say, wire, here)
    if take_all(slots, packet, tensor_list):
        return None
    packets = _agreed(slots, packet, here, tensor_list)
    landing = [landing_for(output, packets[rank], slots, rank, here) for rank, output in enumerate(tensor_list)]
    exchange = _exchange(wire, packets, landing, here)
    return Handle([exchange], here, lambda: hand_out(landing, tensor_list))


def _on_device_of(data: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    return outputs if data.is_cpu and outputs[0].is_cpu else [output.to(data.device) for output in outputs]


def _swap(say: Callable[[], Packet], wire: Tensor, here: Group) -> tuple[Packet, Slots]:
    """Give every rank every rank's slot; return this rank's packet and all slots."""
    room = room_for(SLOT_BYTES, here)
    try:
        packet = say()
    except (TypeError, ValueError) as error:
        # Only this rank can see it, so it has to tell the others, who wait.
        room.one.memory[:] = pack_failure(error)
        swap(room, here)
        raise
    packet.write(room.one, 0, wire)
    swap(room, here)
    return packet, room.each


def _agreed(slots: Slots, own: Packet, here: Group, outputs: Sequence[Tensor] | None = None) -> list[Packet]:
    """Return what every rank says; where a rank can't take part, or the list of one does not fit, all raise."""
    packets = read_packets(slots, own)
    require_no_failure([packet.failure for packet in packets], here)
    if outputs is not None:
        require_expected(packets, outputs, here)
    require_agreement(packets, here)
    return packets


def _exchange(wire: Tensor, packets: Sequence[Packet], landing: Sequence[Tensor], here: Group) -> Handle:
    """Move what did not fit into the slots."""
    if all(packet.comes_along for packet in packets):
        return Handle((), here)
    mine = [] if packets[here.rank].comes_along else [as_bytes(wire)]
    targets = [
        [] if packet.comes_along else [as_bytes(target)] for packet, target in zip(packets, landing, strict=True)
    ]
    return broadcast_each(mine, targets, here)


def _collect(wire: Tensor, dst: int, here: Group) -> tuple[Packet, Slots]:
    """Give rank `dst` every rank's slot; return this rank's packet and, there, all slots."""
    packet = packet_of(wire)
    room = room_for(SLOT_BYTES, here)
    packet.write(room.one, 0, wire)
    collect(room, dst, here)
    return packet, room.each


def _gather(wire: Tensor, own: Packet, slots: Slots, here: Group) -> list[Tensor]:
    """Return every rank's tensor, on `dst`."""
    parts = take_new(slots, own)
    if parts is None:
        packets = read_packets(slots, own)
        parts = [packet.tensor(slots, rank, here.comm_device) for rank, packet in enumerate(packets)]
        _receive(packets, parts, wire, here).wait()
    return parts


def _gather_into(outputs: Sequence[Tensor], wire: Tensor, own: Packet, slots: Slots, here: Group) -> Handle | None:
    """Start receiving on `dst`; return what to wait for, if anything.

    A list that does not fit raises in the end, when all is received that is sent.
    """
    if take_all(slots, own, outputs):
        return None
    packets = read_packets(slots, own)
    fitting = are_like(outputs, packets)
    landing = [
        landing_for(outputs[rank], packet, slots, rank, here)
        if fitting
        else packet.tensor(slots, rank, here.comm_device)
        for rank, packet in enumerate(packets)
    ]

    def finish() -> None:
        if not fitting:
            require_list("gather_list", outputs, here)
            for rank, (output, landed) in enumerate(zip(outputs, landing, strict=True)):
                require_like_what_arrived(f"gather_list[{rank}]", output, landed, here)
        hand_out(landing, outputs)

    return Handle([_receive(packets, landing, wire, here)], here, finish)


def _receive(packets: Sequence[Packet], landing: Sequence[Tensor], wire: Tensor, here: Group) -> Handle:
    """Receive what did not fit into the slots; this rank's own is `wire`."""
    arriving = []
    for rank, packet in enumerate(packets):
        if not packet.comes_along:
            if rank == here.rank:
                copy_back(landing[rank], wire)
            else:
                arriving.append(receive_from([as_bytes(landing[rank])], rank, here))
    return Handle(arriving, here)


def _group_argument(second: object, group: GroupLike) -> GroupLike:
    """Return the group of the short form, which may stand in the place after the data."""
    return group if second is None else cast(GroupLike, second)  # resolve() checks it
