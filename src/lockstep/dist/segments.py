"""Large data after their slots: byte ranges of known sizes, moved without padding and without a copy in between."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import BroadcastOptions, Work

from lockstep.dist.groups import Group
from lockstep.dist.handles import Handle, PairsHandle, translated

# gloo matches sends and receives between two ranks by tag, in order; any fixed number will do.
_TAG = 0x10C5


def broadcast_each(mine: Sequence[Tensor], landing: Sequence[Sequence[Tensor]], here: Group) -> Handle:
    """Give every rank every rank's segments.

    Args:
        mine: this rank's segments, flat uint8, on the group's device.
        landing: for each rank, where its segments arrive, of exactly their sizes; ``landing[rank]`` gets a copy of
            `mine`.
        here: the group.

    **Collective**: every rank, with the same sizes in `landing`. **Cost**: each segment once to each rank.
    """
    for source, target in zip(mine, landing[here.rank], strict=True):
        target.copy_(source)
    if here.pg is None:
        return Handle((), here)
    if here.in_pairs:
        others = [rank for rank in range(here.size) if rank != here.rank]
        arriving = [(segment, rank) for rank in others for segment in landing[rank]]
        return talk(arriving, [(segment, rank) for rank in others for segment in mine], here)
    works: list[Work] = []
    for rank, targets in enumerate(landing):
        works += [here.pg.broadcast([segment], _from(rank)) for segment in (mine if rank == here.rank else targets)]
    return Handle(works, here)


def broadcast_from(segments: Sequence[Tensor], src: int, here: Group) -> Handle:
    """Give every rank `src`'s segments, in place. **Collective**: every rank, with the same sizes."""
    if here.pg is None:
        return Handle((), here)
    return Handle([here.pg.broadcast([segment], _from(src)) for segment in segments], here)


def send_to(segments: Sequence[Tensor], dst: int, here: Group) -> Handle:
    """Send segments to rank `dst`, which calls `receive_from` with the same sizes."""
    return talk([], [(segment, dst) for segment in segments], here)


def receive_from(landing: Sequence[Tensor], src: int, here: Group) -> Handle:
    """Receive what rank `src` sends with `send_to`."""
    return talk([(segment, src) for segment in landing], [], here)


def talk(arriving: Sequence[tuple[Tensor, int]], leaving: Sequence[tuple[Tensor, int]], here: Group) -> Handle:
    """Receive from some ranks and send to some, all at once."""
    pg = here.pg
    assert pg is not None
    try:
        works = [pg.recv([segment], rank, _TAG) for segment, rank in arriving]
        works += [pg.send([segment], rank, _TAG) for segment, rank in leaving]
    except RuntimeError as error:  # gloo refuses to send to a rank that is known to be gone
        raise translated(error, here) from error
    return PairsHandle(works, here)


def _from(src: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = src
    return options
