"""The position of a data loader: the epoch, and how far the pass is."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import DataLoader

from lockstep.dataset.sampler import DealingSampler, WorkerSeeds
from lockstep.dataset.sharded import drawn_from
from lockstep.dataset.stream import StreamLoader

_logger = logging.getLogger(__name__)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader which epoch begins: its worker seeds, its stream, and its first sampler that has `set_epoch`."""
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
    """Skip the first `count` batches of the next pass without reading them, if the loader can.

    Returns:
        Whether they will be skipped; if not, the caller must read and discard them.
    """
    if not isinstance(loader, DataLoader):
        return False
    sampler, batch_size = drawn_from(loader)
    if not isinstance(sampler, DealingSampler):
        return False
    sampler.skip(count * batch_size)
    return True


def position_of(loader: Any) -> Any:
    """Return a loader's position in its pass, after the last batch that was taken; None if it can't resume there.

    A `StreamLoader` can resume if its dataset can. Other loaders can if they have `state_dict` and `load_state_dict`,
    such as torchdata's `StatefulDataLoader`.
    """
    if isinstance(loader, StreamLoader) and not loader.dataset.has_position:
        return None
    return loader.state_dict() if hasattr(loader, "load_state_dict") else None


def restore_position(loader: Any, position: Any) -> bool:
    """Make the next pass begin at a position from `position_of`, and return whether that succeeded."""
    if position is None or not hasattr(loader, "load_state_dict"):
        return False
    try:
        loader.load_state_dict(position)
    except ValueError as error:
        _logger.warning("the position in the data can't be restored: %s", error)
        return False
    return True
