"""all_gather, gather and scatter: tensors whose shapes may differ from rank to rank.

Every call sends one slot first, with shape and dtype. Tensors small enough to fit beside them have then arrived
already;
larger ones follow in a second message of exactly their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast, overload

from torch import Tensor

from lockstep.dist.arguments import group_rank, require_list, require_tensor
from lockstep.dist.devices import as_bytes, copy_back, is_bare, to_comm
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call
from lockstep.dist.handles import Handle, settled, wait_all
from lockstep.dist.packets import (
    SLOT_BYTES,
    Packet,
    fits,
    pack_failure,
    pack_tensor,
    read_packet,
    require_agreement,
    require_expected,
    require_no_failure,
)
from lockstep.dist.segments import broadcast_each, receive_from, send_to
from lockstep.dist.slots import collect_slots, deal_slots, swap_slots


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
    dtype; in the
    filling form ``tensor_list[i]`` is as rank i's tensor.

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
    return settled(_all_gather_into(data, tensor, resolve(group)), async_op)


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
    if here.rank == dst and gather_list is not None:
        return settled(_gather_into(gather_list, data, dst, here), async_op)
    handle, parts = _gather(data, dst, here)
    if async_op:
        if here.rank == dst:
            handle.wait()
            raise TypeError(f"`async_op` needs the form gather(tensor, gather_list, dst) ({here.here})")
        return handle
    handle.wait()
    return [part.to(data.device) for part in parts]


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Fill rank i's `tensor` with the i-th of rank `src`'s list.

    Args:
        tensor: filled in place.
        scatter_list: on `src`, one tensor for each rank; elsewhere None.
        src: rank within the group.
        group: where; None is the default group.
        async_op: return a handle (the work is done by then; there is one for the sake of the calling form).

    **Collective**: every rank of the group. **Shapes**: ``scatter_list[i]`` is as rank i's `tensor`; the entries may
    differ.

    **Raises**: ValueError on `src` where its list is no list of one tensor for each rank, PeerError on the others;
    ValueError on a rank whose `tensor` is not as what was sent to it.

    **Cost**: a slot of 512 bytes from `src` to each rank, and the bytes of those tensors that don't fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, scatter
        >>> data = torch.empty(get_rank() + 1)
        >>> scatter(data, [torch.tensor([5.0]), torch.tensor([6.0, 7.0])] if get_rank() == 0 else None)
        >>> data.tolist() == ([5.0] if get_rank() == 0 else [6.0, 7.0])
        True
    """
    here = resolve(group)
    require_tensor("tensor", tensor)
    group_rank("src", src, here)
    check_call("scatter", here, src)
    received = _deal(scatter_list, here) if here.rank == src else _dealt(tensor, src, here)
    if received is not tensor:
        _require_like_what_arrived("tensor", tensor, received, here)
        copy_back(tensor, received)
    return Handle((), here) if async_op else None


def _all_gather(data: Tensor, here: Group) -> list[Tensor]:
    require_tensor("data", data)
    check_call("all_gather", here)
    wire = to_comm(data, here)
    packets = _swapped(lambda: pack_tensor(wire), here)
    require_agreement(packets, here)
    outputs = [packet.tensor(here.comm_device) for packet in packets]
    _exchange(wire, packets, outputs, here).wait()
    if data.is_cpu and here.comm_device.type == "cpu":
        return outputs
    return [output.to(data.device) for output in outputs]


def _all_gather_into(tensor_list: Sequence[Tensor], data: Tensor, here: Group) -> Handle:
    require_tensor("tensor", data)
    check_call("all_gather", here)
    wire = to_comm(data, here)

    def pack() -> bytearray:
        require_list("tensor_list", tensor_list, here)
        return pack_tensor(wire, tensor_list)

    packets = _swapped(pack, here)
    require_expected(packets, tensor_list, here)
    require_agreement(packets, here)
    landing = [_landing(output, packet, here) for output, packet in zip(tensor_list, packets, strict=True)]

    def finish() -> None:
        for output, landed in zip(tensor_list, landing, strict=True):
            if landed is not output:
                copy_back(output, landed)

    return Handle([_exchange(wire, packets, landing, here)], here, finish)


def _swapped(pack: Callable[[], bytearray], here: Group) -> list[Packet]:
    """Give every rank every rank's packet; where one can't make its own, all raise."""
    try:
        slot = pack()
    except (TypeError, ValueError) as error:
        # Only this rank can see it, so it has to tell the others, who wait.
        swap_slots(pack_failure(error), here)
        raise
    packets = [read_packet(slot) for slot in swap_slots(slot, here)]
    require_no_failure([packet.failure for packet in packets], here)
    return packets


def _landing(output: Tensor, packet: Packet, here: Group) -> Tensor:
    """Return where a tensor arrives: the caller's own memory where that is possible."""
    if packet.inline is not None:
        if output.is_cpu and is_bare(output):
            packet.fill(output)
            return output
    elif is_bare(output) and output.device == here.comm_device:
        return output
    return packet.tensor(here.comm_device)


def _exchange(wire: Tensor, packets: Sequence[Packet], landing: Sequence[Tensor], here: Group) -> Handle:
    """Move what did not fit into the slots."""
    if all(packet.inline is not None for packet in packets):
        return Handle((), here)
    mine = [] if fits(wire) else [as_bytes(wire)]
    targets = [
        [as_bytes(target)] if packet.inline is None else [] for packet, target in zip(packets, landing, strict=True)
    ]
    return broadcast_each(mine, targets, here)


def _gather(data: Tensor, dst: int, here: Group) -> tuple[Handle, list[Tensor]]:
    """Start gathering; return what to wait for, and on `dst` where the tensors arrive."""
    wire = to_comm(data, here)
    slots = collect_slots(pack_tensor(wire), dst, here)
    if slots is None:
        return send_to([] if fits(wire) else [as_bytes(wire)], dst, here), []
    packets = [read_packet(slot) for slot in slots]
    parts = [packet.tensor(here.comm_device) for packet in packets]
    return _receive(packets, parts, wire, here), parts


def _gather_into(outputs: Sequence[Tensor], data: Tensor, dst: int, here: Group) -> Handle:
    """Start gathering on `dst`. A list that does not fit raises in the end, when all is received that is sent."""
    wire = to_comm(data, here)
    slots = collect_slots(pack_tensor(wire), dst, here)
    assert slots is not None
    packets = [read_packet(slot) for slot in slots]
    fitting = _are_like(outputs, packets)
    landing = [
        _landing(outputs[rank], packet, here) if fitting else packet.tensor(here.comm_device)
        for rank, packet in enumerate(packets)
    ]

    def finish() -> None:
        if not fitting:
            require_list("gather_list", outputs, here)
        for rank, landed in enumerate(landing):
            if landed is not outputs[rank]:
                _require_like_what_arrived(f"gather_list[{rank}]", outputs[rank], landed, here)
                copy_back(outputs[rank], landed)

    return Handle([_receive(packets, landing, wire, here)], here, finish)


def _receive(packets: Sequence[Packet], landing: Sequence[Tensor], wire: Tensor, here: Group) -> Handle:
    """Receive what did not fit into the slots; this rank's own is `wire`."""
    arriving = []
    for rank, packet in enumerate(packets):
        if packet.inline is None:
            if rank == here.rank:
                copy_back(landing[rank], wire)
            else:
                arriving.append(receive_from([as_bytes(landing[rank])], rank, here))
    return Handle(arriving, here)


def _are_like(outputs: Sequence[Tensor], packets: Sequence[Packet]) -> bool:
    is_list = isinstance(outputs, Sequence) and len(outputs) == len(packets)
    return is_list and all(
        isinstance(output, Tensor) and output.shape == packet.shape and output.dtype is packet.dtype
        for output, packet in zip(outputs, packets, strict=True)
    )


def _deal(scatter_list: Sequence[Tensor] | None, here: Group) -> Tensor:
    """Send each rank its tensor; return this rank's own."""
    try:
        if scatter_list is None:
            raise ValueError(f"`scatter_list` must be a list on `src`, but is None ({here.here})")
        require_list("scatter_list", scatter_list, here)
        wires = [to_comm(entry, here) for entry in scatter_list]
        slots = [pack_tensor(wire) for wire in wires]
    except (TypeError, ValueError) as error:
        # Only this rank can see it, so it has to tell the others, who wait.
        deal_slots([pack_failure(error)] * here.size, SLOT_BYTES, here.rank, here)
        raise
    deal_slots(slots, SLOT_BYTES, here.rank, here)
    wait_all(
        [send_to([as_bytes(wire)], dst, here) for dst, wire in enumerate(wires) if dst != here.rank and not fits(wire)]
    )
    return wires[here.rank]


def _dealt(tensor: Tensor, src: int, here: Group) -> Tensor:
    """Receive this rank's tensor, into `tensor` where it fits there."""
    packet = read_packet(deal_slots(None, SLOT_BYTES, src, here))
    require_no_failure([packet.failure], here, ranks=[src])
    if _are_like([tensor], [packet]):
        received = _landing(tensor, packet, here)
    else:
        received = packet.tensor(here.comm_device)
    if packet.inline is None:
        receive_from([as_bytes(received)], src, here).wait()
    return received


def _require_like_what_arrived(name: str, output: Tensor, part: Tensor, here: Group) -> None:
    if output.shape != part.shape or output.dtype != part.dtype:
        raise ValueError(
            f"`{name}` must be like what arrived, {tuple(part.shape)} {part.dtype}, but is "
            f"{tuple(output.shape)} {output.dtype} ({here.here})"
        )


def _group_argument(second: object, group: GroupLike) -> GroupLike:
    """Return the group of the short form, which may stand in the place after the data."""
    return group if second is None else cast(GroupLike, second)  # resolve() checks it
