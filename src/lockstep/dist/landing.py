"""Where tensors that are received arrive: in the caller's own memory where that is possible."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.dist.devices import copy_back, is_bare
from lockstep.dist.groups import Group
from lockstep.dist.packets import Packet
from lockstep.dist.slots import Slots


def landing_for(output: Tensor, packet: Packet, slots: Slots, rank: int, here: Group) -> Tensor:
    """Return where a rank's tensor arrives: `output` itself if that can be; else it is to be handed out later."""
    # What came along is in the slot already, the rest is to be received.
    if packet.comes_along:
        if output.is_cpu and is_bare(output):
            packet.fill(output, slots, rank)
            return output
    elif is_bare(output) and output.device == here.comm_device:
        return output
    return packet.tensor(slots, rank, here.comm_device)


def hand_out(landing: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Copy what arrived elsewhere into the caller's tensors."""
    for landed, output in zip(landing, outputs, strict=True):
        if landed is not output:
            copy_back(output, landed)


def are_like(outputs: Sequence[Tensor], packets: Sequence[Packet]) -> bool:
    """Return whether `outputs` is a list of tensors of just the shapes and dtypes that are announced."""
    is_list = isinstance(outputs, Sequence) and len(outputs) == len(packets)
    return is_list and all(
        isinstance(output, Tensor) and output.shape == packet.shape and output.dtype is packet.dtype
        for output, packet in zip(outputs, packets, strict=True)
    )


def require_like_what_arrived(name: str, output: Tensor, part: Tensor, here: Group) -> None:
    """Raise ValueError unless the caller's tensor has the shape and dtype of what arrived."""
    if output.shape != part.shape or output.dtype != part.dtype:
        raise ValueError(
            f"`{name}` must be like what arrived, {tuple(part.shape)} {part.dtype}, but is "
            f"{tuple(output.shape)} {output.dtype} ({here.here})"
        )
