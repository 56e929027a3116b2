"""Where a data loader stands: which epoch's order, and how far in it."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import DataLoader

from lockstep.dataset.sampler import DealingSampler, WorkerSeeds
from lockstep.dataset.sharded import drawn_from
from lockstep.dataset.stream import StreamLoader

_logger = logging.getLogger(__name__)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell an iterable data set, or the first of a loader's samplers that wants to know it, which epoch begins."""
    if isinstance(seeds := getattr(loader, "generator", None), WorkerSeeds):
        seeds.set_epoch(epoch)
    if isinstance(loader, StreamLoader):
        loader.dataset.set_epoch(epoch)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            return


def skip_batches(loader: Any, count: int) -> bool:
    """Leave out the first batches of the next pass without reading them, where that is possible.

    Returns:
        Whether it was; else whoever iterates has to walk past them.
    """
    if not isinstance(loader, DataLoader):
        return False
    sampler, batch_size = drawn_from(loader)
    if not isinstance(sampler, DealingSampler):
        return False
    sampler.skip(count * batch_size)
    return True


def position_of(loader: Any) -> Any:
    """Return where a loader is in its pass, after the last batch that was taken, where it can go on there.

    A `StreamLoader` can where its data set can. Others can that have `state_dict` and `load_state_dict`, as torchdata's
    `StatefulDataLoader` has.
    """
    if isinstance(loader, StreamLoader) and not loader.dataset.has_position:
        return None
    return loader.state_dict() if hasattr(loader, "load_state_dict") else None


def restore_position(loader: Any, position: Any) -> bool:
    """Let the next pass begin where `position_of` was called, and return whether it will."""
    if position is None or not hasattr(loader, "load_state_dict"):
        return False
    try:
        loader.load_state_dict(position)
    except ValueError as error:
        _logger.warning("the position in the data can't be restored: %s", error)
        return False
    return True
