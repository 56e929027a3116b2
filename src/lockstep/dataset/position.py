"""The position of a data loader: the epoch, and how far the pass is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from lockstep.dataset.deal import begins_anywhere
from lockstep.dataset.sampler import DealingSampler, DefaultSampler, WorkerSeeds, drawn_from, with_parts, with_sampler
from lockstep.dataset.stream import StreamLoader

_logger = logging.getLogger(__name__)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader which epoch begins: its worker seeds, and its first sampler and its datasets with `set_epoch`.

    Workers that live across epochs have datasets of their own; so they are ended if a dataset has `set_epoch`, except
    for streams that lockstep splits, and the loader starts others.
    """
    if isinstance(seeds := getattr(loader, "generator", None), WorkerSeeds):
        seeds.set_epoch(epoch)
    if _tell_datasets(getattr(loader, "dataset", None), epoch) and not isinstance(loader, StreamLoader):
        _end_workers(loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            return


def _tell_datasets(dataset: Any, epoch: int) -> bool:
    """Call `set_epoch` of a dataset, or else of those inside it, as in a `Subset`; return whether one has it."""
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
        return True
    inner = [dataset.dataset] if isinstance(dataset, Subset) else getattr(dataset, "datasets", ())
    if not isinstance(inner, list | tuple):
        return False
    told = [_tell_datasets(one, epoch) for one in inner]
    return any(told)


def _end_workers(loader: Any) -> None:
    iterator = getattr(loader, "_iterator", None)  # torch ends them in no public way (2.13)
    if iterator is not None:
        end = getattr(iterator, "_shutdown_workers", None)
        if end is not None:
            end()
        loader._iterator = None


def begun_at(
    loader: Any, position: int, head: Sequence[int] = (), states: Sequence[Mapping[str, Any]] = ()
) -> DataLoader[Any]:
    """Return a loader whose next pass begins inside the global order of `loader`, which is not read up to there.

    Only a stream that can't say where it is makes the samples up to there, and discards them.

    Args:
        loader: a loader that `deal_of` knows.
        position: number of items of the order that lie before, on all ranks together.
        head: what `head_of` returned in the run that is resumed.
        states: for a stream, what `position_of` returned on ranks of that run.

    Returns:
        `loader`, or a copy of it for this one pass.
    """
    if isinstance(loader, StreamLoader):
        if not loader.dataset.has_position:
            _logger.warning(
                "%d samples of %s are made again and discarded, to go on after them. A dataset with state_dict and "
                "load_state_dict can do without",
                position, type(loader.dataset.dataset).__name__,
            )  # fmt: skip
        loader.begin_at(position, states)
        return loader
    sampler, _ = drawn_from(loader)
    if isinstance(sampler, DealingSampler):
        sampler.begin_at(position, head)
        return loader  # type: ignore[no-any-return]
    # Torch's DistributedSampler draws the same orders as a DefaultSampler with its seed.
    shard = sampler.rank, sampler.num_replicas
    dealing = DefaultSampler(sampler.dataset, sampler.shuffle, sampler.seed, shard=shard)
    dealing.set_epoch(sampler.epoch)
    dealing.begin_at(position, head)
    return with_sampler(loader, dealing)


def head_of(loader: Any) -> list[int]:
    """Return the first items of the present pass's global order, or checksums of them, to know it again by."""
    sampler, _ = drawn_from(loader)
    return sampler.head if isinstance(sampler, DealingSampler) else []


def skip_batches(loader: Any, count: int) -> bool:
    """Skip the first `count` batches of the next pass without reading them, if the loader can.

    Returns:
        Whether they will be skipped; if not, the caller must read and discard them.
    """
    if not isinstance(loader, DataLoader):
        return False
    sampler, batch_size = drawn_from(loader)
    if not begins_anywhere(sampler):
        return False
    sampler.skip(count * batch_size)
    return True


def without_batches(loader: Any, count: int) -> Any:
    """Return a copy of a loader, for one pass that leaves out its first `count` batches without reading them.

    Its sampler is drawn from, and what it draws is discarded.

    Returns:
        The copy, or None if that can't be done: for anything but a `DataLoader` of a map-style dataset whose
        `__iter__` is torch's.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
        return None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return with_parts(loader, **{name: _Rest(getattr(loader, name), count)})


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


class _Rest:
    """What a sampler or a batch sampler yields after its first `count` items."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler = sampler
        self._count = count

    def __iter__(self) -> Any:
        items = iter(self.sampler)
        for _ in zip(range(self._count), items, strict=False):
            pass
        return items
