"""all_gather and gather: tensors whose shapes may differ from rank to rank.

Every call sends one slot first, with shape and dtype. Tensors small enough to fit beside them have then arrived
already; larger ones follow in a second message of exactly their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist.arguments import NOT_GIVEN, either, group_rank, require_list, require_memory, require_tensor
from lockstep.dist.devices import as_bytes, copy_back, to_comm
from lockstep.dist.gradients import (
    ENDS_HERE,
    LinearMap,
    agree_on_gradients,
    require_blocking,
    require_fillable,
    synced,
    warn_of_lost_gradients,
)
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call, watch
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
from lockstep.dist.reducing import scatter_sums
from lockstep.dist.segments import broadcast_each, receive_from, send_to
from lockstep.dist.slots import Slots, collect, room_for, swap


@overload
def all_gather(data: Tensor, group: GroupLike = ..., /, *, sync_grads: bool = ...) -> list[Tensor]: ...
@overload
def all_gather(data: Tensor, *, group: GroupLike = ..., sync_grads: bool = ...) -> list[Tensor]: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[False] = ...,
    tensor_list: Sequence[Tensor] = ...,
) -> None: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    *,
    async_op: Literal[True],
    sync_grads: Literal[False] = ...,
    tensor_list: Sequence[Tensor] = ...,
) -> Handle: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[True],
    tensor_list: Sequence[Tensor] = ...,
) -> list[Tensor]: ...
def all_gather(
    data: Tensor | Sequence[Tensor] = NOT_GIVEN,
    tensor: Tensor | GroupLike = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
    tensor_list: Sequence[Tensor] = NOT_GIVEN,
) -> list[Tensor] | Handle | None:
    """Give every rank every rank's tensor, as ``all_gather(data) -> list`` or ``all_gather(tensor_list, tensor)``.

    Args:
        data: this rank's tensor; or the list to fill, with one tensor for each rank.
        tensor: this rank's tensor, in the filling form; in the other form the second place is the group's.
        group: where; None is the default group.
        async_op: in the filling form, return a handle while larger tensors are still on their way.
        sync_grads: let gradients flow back to every rank through the tensors that are returned, or through those that
            are filled, which are then returned, too. Every rank has to run backward through them then.
        tensor_list: `data` of the filling form, by its published name.

    **Collective**: every rank of the group; ranks may mix the two forms. **Shapes**: free on every rank, as is the
    dtype; in the filling form ``tensor_list[i]`` is as rank i's tensor.

    **Returns**: the tensors in rank order, each with memory of its own, on the device of `data`; or None, or a handle.

    **Gradients**: without `sync_grads` no gradient flows, of which a warning tells once for each calling line. With it,
    the gradient of `data` is the sum, over the ranks, of the gradients of what they received: that of the sum of all
    ranks' losses. Where DDP or FSDP average the gradients of the parameters, they come out as those of the mean of all
    ranks' losses: those of one process that has the whole batch, in the second example.

    **Raises**: ValueError on a rank whose list does not fit what comes, TypeError on one that hands in something else
    than tensors, PeerError on the others, before any tensor that does not fit into a slot is sent. With `sync_grads`
    CollectiveMismatchError on every rank where dtypes differ.

    **Cost**: a slot of 512 bytes from each rank, and the bytes of those tensors that don't fit in it; never padded.
    With `sync_grads` one more slot, and in backward the bytes of the gradients of all that was received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather, get_rank
        >>> [x.tolist() for x in all_gather(torch.arange(get_rank() + 1))]
        [[0], [0, 1]]
        >>> filled = [torch.empty(2), torch.empty(2)]
        >>> all_gather(filled, torch.full((2,), float(get_rank())))
        >>> filled[1].tolist()
        [1.0, 1.0]

    **Example (2 ranks)**: a contrastive loss, as in CLIP, over the features of all ranks::

        >>> from lockstep.dist import all_reduce
        >>> images, texts = torch.tensor([[0.2], [-0.5]]), torch.tensor([[0.3], [0.9]])  # a batch of two pairs
        >>> def loss_of(weight, image, text):  # of the whole batch
        ...     logits = (image * weight) @ (text * weight).T
        ...     pairs = torch.arange(len(image))
        ...     return torch.nn.functional.cross_entropy(logits, pairs)
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> own = slice(get_rank(), get_rank() + 1)  # one pair for each rank
        >>> image = torch.cat(all_gather(images[own] * weight, sync_grads=True))
        >>> text = torch.cat(all_gather(texts[own] * weight, sync_grads=True))
        >>> loss_of(1.0, image, text).backward()
        >>> gradient = weight.grad.clone()
        >>> all_reduce(gradient, "mean")  # which DDP does
        >>> whole = torch.tensor(2.0, requires_grad=True)
        >>> loss_of(whole, images, texts).backward()  # on one process
        >>> torch.allclose(gradient, whole.grad)
        True

    **Source**: `torch.distributed.all_gather` (2.13), which on gloo aborts the process where shapes differ.
    """
    data = either("data", data, "tensor_list", tensor_list)
    if isinstance(data, Tensor):
        if async_op:
            raise TypeError("`async_op` needs the form all_gather(tensor_list, tensor)")
        here = resolve(_group_argument(tensor, group))
        if sync_grads:
            return _all_gather_with_grads(data, here)
        if data.requires_grad:
            warn_of_lost_gradients("all_gather", ENDS_HERE, has_sync_grads=True)
        return _all_gather(data, here)
    here = resolve(tensor if isinstance(tensor, ProcessGroup | DeviceMesh) else group)
    if sync_grads:
        return _all_gather_into_with_grads(data, tensor, here, async_op)
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        warn_of_lost_gradients("all_gather", ENDS_HERE, has_sync_grads=True)
    return _settled(_all_gather_into(data, tensor, here), async_op, here)


@overload
def gather(data: Tensor = ..., dst: int = ..., group: GroupLike = ..., *, tensor: Tensor = ...) -> list[Tensor]: ...
@overload
def gather(
    data: Tensor = ...,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int = ...,
    group: GroupLike = ...,
    async_op: bool = ...,
    *,
    tensor: Tensor = ...,
) -> list[Tensor] | Handle | None: ...
def gather(  # type: ignore[misc]  # the overloads share their places, not their names
    data: Tensor = NOT_GIVEN,
    gather_list: Sequence[Tensor] | Integral | int | None = None,
    dst: int | GroupLike = 0,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    tensor: Tensor = NOT_GIVEN,
) -> list[Tensor] | Handle | None:
    """Give rank `dst` every rank's tensor, as ``gather(data, dst) -> list`` or ``gather(tensor, gather_list, dst)``.

    Args:
        data: this rank's tensor.
        gather_list: on `dst`, the tensors to fill, one for each rank; elsewhere None.
        dst: rank within the group.
        group: where; None is the default group.
        async_op: in the filling form, return a handle.
        tensor: `data` by its other published name.

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
    if isinstance(gather_list, Integral):
        third = None if isinstance(dst, int) and dst == 0 else dst  # the group, if anything was given there
        gather_list, dst, group = None, gather_list, _group_argument(third, group)
    here = resolve(group)
    data = either("data", data, "tensor", tensor)
    with watch("gather", here):
        dst = group_rank("dst", dst, here)
    check_call("gather", here, dst)
    wire, packet, slots = _collect(data, dst, here)
    if data.requires_grad:
        warn_of_lost_gradients("gather", ENDS_HERE)
    if here.rank != dst:
        sent = None if packet.comes_along else send_to([as_bytes(wire)], dst, here)
        handle = _settled(sent, async_op, here)
        return handle if async_op else []
    if gather_list is not None:
        return _settled(_gather_into(cast(Sequence[Tensor], gather_list), wire, packet, slots, here), async_op, here)
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
    check_call("all_gather", here)
    wire, packet, slots = _swap("data", data, NOT_GIVEN, here)
    outputs = take_new(slots, packet)
    if outputs is None:
        packets = _agreed(slots, packet, here)
        outputs = [packet.tensor(slots, rank, here.comm_device) for rank, packet in enumerate(packets)]
        _exchange(wire, packets, outputs, here).wait()
    return _on_device_of(data, outputs)


def _all_gather_into(tensor_list: Sequence[Tensor], data: object, here: Group) -> Handle | None:
    """Start gathering; return what to wait for, if anything."""
    check_call("all_gather", here)
    wire, packet, slots = _swap("tensor", data, tensor_list, here)
    if take_all(slots, packet, tensor_list):
        return None
    packets = _agreed(slots, packet, here, tensor_list)
    landing = [landing_for(output, packets[rank], slots, rank, here) for rank, output in enumerate(tensor_list)]
    exchange = _exchange(wire, packets, landing, here)
    return Handle([exchange], here, lambda: hand_out(landing, tensor_list))


def _all_gather_with_grads(data: Any, here: Group, tensor_list: Sequence[Tensor] = NOT_GIVEN) -> list[Tensor]:
    def check() -> tuple[str, Sequence[Tensor]]:
        if tensor_list is NOT_GIVEN:
            require_tensor("data", data)
        else:
            _require_filling(data, tensor_list, here)
            require_fillable("tensor_list", tensor_list, here)
        return f"all_gather({data.dtype})", [data]

    def gather_all(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if tensor_list is NOT_GIVEN:
            return _all_gather(inputs[0], here)
        parts = [torch.empty(x.shape, dtype=x.dtype, device=data.device) for x in tensor_list]
        _settled(_all_gather_into(parts, inputs[0], here), False, here)
        return parts

    def sum_up(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return [scatter_sums(gradients, here)]

    wanted = agree_on_gradients(here, check)
    return list(synced(LinearMap(gather_all, sum_up, here), [data], wanted))


def _all_gather_into_with_grads(
    tensor_list: Sequence[Tensor], data: object, here: Group, async_op: bool
) -> list[Tensor]:
    require_blocking(async_op, here)
    gathered = _all_gather_with_grads(data, here, tensor_list)
    for output, part in zip(tensor_list, gathered, strict=True):
        output.copy_(part)
    return list(tensor_list)


def _require_filling(data: object, tensor_list: Sequence[Tensor], here: Group) -> None:
    if not isinstance(data, Tensor):
        raise TypeError(
            "`data` must be a tensor, or a list to fill with a tensor in second place, but they are "
            f"{type(tensor_list).__name__} and {type(data).__name__} ({here.here})"
        )
    require_tensor("tensor", data)
    require_list("tensor_list", tensor_list, here)
    for rank, output in enumerate(tensor_list):
        require_memory(f"tensor_list[{rank}]", output)


def _on_device_of(data: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    return outputs if data.is_cpu and outputs[0].is_cpu else [output.to(data.device) for output in outputs]


def _swap(name: str, data: Any, outputs: Sequence[Tensor], here: Group) -> tuple[Tensor, Packet, Slots]:
    """Give every rank every rank's slot; return what travels, this rank's packet and all slots."""
    room = room_for(SLOT_BYTES, here)
    try:
        if outputs is NOT_GIVEN:
            require_tensor(name, data)
        else:
            _require_filling(data, outputs, here)
        wire = to_comm(data, here)
        packet = packet_of(wire, None if outputs is NOT_GIVEN else outputs)
    except (TypeError, ValueError) as error:
        # Only this rank can see it, so it has to tell the others, who wait.
        room.one.memory[:] = pack_failure(error)
        swap(room, here)
        raise
    packet.write(room.one, 0, wire)
    swap(room, here)
    return wire, packet, room.each


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


def _collect(data: Any, dst: int, here: Group) -> tuple[Tensor, Packet, Slots]:
    """Give rank `dst` every rank's slot; return what travels, this rank's packet and, there, all slots."""
    room = room_for(SLOT_BYTES, here)
    try:
        require_tensor("data", data)
        wire = to_comm(data, here)
        packet = packet_of(wire)
    except (TypeError, ValueError) as error:
        room.one.memory[:] = pack_failure(error)
        collect(room, dst, here)
        if here.rank == dst:
            _receive_in_vain(read_packets(room.each), room.each, here)
        raise
    packet.write(room.one, 0, wire)
    collect(room, dst, here)
    return wire, packet, room.each


def _all_there(slots: Slots, own: Packet, here: Group) -> list[Packet]:
    """Return what every rank says, on `dst`; where one can't take part, raise when all is received that is sent."""
    packets = read_packets(slots, own)
    if any(packet.failure is not None for packet in packets):
        _receive_in_vain(packets, slots, here)
        require_no_failure([packet.failure for packet in packets], here)
    return packets


def _receive_in_vain(packets: Sequence[Packet], slots: Slots, here: Group) -> None:
    landing = [packet.tensor(slots, rank, here.comm_device) for rank, packet in enumerate(packets)]
    _receive(packets, landing, landing[here.rank], here).wait()


def _gather(wire: Tensor, own: Packet, slots: Slots, here: Group) -> list[Tensor]:
    """Return every rank's tensor, on `dst`."""
    parts = take_new(slots, own)
    if parts is None:
        packets = _all_there(slots, own, here)
        parts = [packet.tensor(slots, rank, here.comm_device) for rank, packet in enumerate(packets)]
        _receive(packets, parts, wire, here).wait()
    return parts


def _gather_into(outputs: Sequence[Tensor], wire: Tensor, own: Packet, slots: Slots, here: Group) -> Handle | None:
    """Start receiving on `dst`; return what to wait for, if anything.

    A list that does not fit raises in the end, when all is received that is sent.
    """
    if take_all(slots, own, outputs):
        return None
    packets = _all_there(slots, own, here)
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
        for rank, output in enumerate(outputs):
            require_memory(f"gather_list[{rank}]", output)
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
