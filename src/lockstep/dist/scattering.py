"""scatter: tensors of one rank to all, whose shapes may differ from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.dist.arguments import group_rank, require_list, require_memory, require_tensor
from lockstep.dist.devices import as_bytes, copy_back, to_comm
from lockstep.dist.gradients import ENDS_HERE, warn_of_lost_gradients
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call, watch
from lockstep.dist.handles import Handle, wait_all
from lockstep.dist.landing import are_like, landing_for, require_like_what_arrived
from lockstep.dist.packets import SLOT_BYTES, Packet, pack_failure, packet_of, read_packet, require_no_failure, take_all
from lockstep.dist.segments import receive_from, send_to
from lockstep.dist.slots import deal, room_for


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
    with watch("scatter", here):
        src = group_rank("src", src, here)
    check_call("scatter", here, src)
    if here.rank == src:
        _deal(tensor, scatter_list, here)
    else:
        _receive_dealt(tensor, src, here)
    sent = scatter_list if here.rank == src and scatter_list is not None else ()
    if (tensor.requires_grad and not tensor.is_leaf) or any(x.requires_grad for x in sent):
        warn_of_lost_gradients("scatter", ENDS_HERE)
    return Handle((), here) if async_op else None


def _deal(tensor: Tensor, scatter_list: Sequence[Tensor] | None, here: Group) -> None:
    """Send each rank its tensor; fill this rank's own."""
    room = room_for(SLOT_BYTES, here)
    try:
        if scatter_list is None:
            raise ValueError(f"`scatter_list` must be a list on `src`, but is None ({here.here})")
        require_list("scatter_list", scatter_list, here)
        _require_target(tensor)
        wires = [to_comm(entry, here) for entry in scatter_list]
        packets = [packet_of(wire) for wire in wires]
    except (TypeError, ValueError) as error:
        # Only this rank can see it, so it has to tell the others, who wait.
        room.each.memory[:] = pack_failure(error) * here.size
        deal(room, here.rank, here)
        raise
    for rank, packet in enumerate(packets):
        packet.write(room.each, rank, wires[rank])
    deal(room, here.rank, here)
    following = [rank for rank, packet in enumerate(packets) if not packet.comes_along and rank != here.rank]
    sent = [send_to([as_bytes(wires[rank])], rank, here) for rank in following]
    own = wires[here.rank]
    fitting = tensor.shape == own.shape and tensor.dtype == own.dtype
    # While they are on their way; unless what is filled may be a part of what is sent.
    at_once = fitting and all(_are_apart(tensor, wires[rank]) for rank in following)
    if at_once:
        copy_back(tensor, own)
    wait_all(sent)
    require_like_what_arrived("tensor", tensor, own, here)
    if not at_once:
        copy_back(tensor, own)


def _require_target(tensor: Tensor) -> None:
    require_tensor("tensor", tensor)
    require_memory("tensor", tensor)


def _are_apart(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def _receive_dealt(tensor: Tensor, src: int, here: Group) -> None:
    """Receive this rank's tensor, into `tensor` where it fits there."""
    refusal: TypeError | ValueError | None = None
    expected: Packet | None = None
    try:
        _require_target(tensor)
        expected = packet_of(tensor)
    except (TypeError, ValueError) as error:
        refusal = error  # to be raised when all is received that is sent
    room = room_for(SLOT_BYTES, here)
    deal(room, src, here)
    if expected is not None and take_all(room.one, expected, [tensor]):
        return
    packet = read_packet(room.one, 0)
    if refusal is None:
        require_no_failure([packet.failure], here, ranks=[src])
    if refusal is None and are_like([tensor], [packet]):
        received = landing_for(tensor, packet, room.one, 0, here)
    else:
        received = packet.tensor(room.one, 0, here.comm_device)
    if not packet.comes_along:
        receive_from([as_bytes(received)], src, here).wait()
    if refusal is not None:
        raise refusal
    if received is not tensor:
        require_like_what_arrived("tensor", tensor, received, here)
        copy_back(tensor, received)
