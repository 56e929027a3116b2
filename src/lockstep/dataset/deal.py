"""How many samples a pass yields, where that is known in advance, and how one global order is split over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor
from torch.utils import data

from lockstep.dataset.sampler import (
    DealingSampler,
    DefaultSampler,
    InfiniteSampler,
    ShardedSampler,
    drawn_from,
    is_torchs,
    length_of,
)
from lockstep.dataset.stream import StreamLoader

ENDLESS = 2**62
"""Stands for an endless number of samples."""

# Samplers that yield as many indices as their length says. The length of a user's own sampler may be wrong.
_RELIABLE = (
    DefaultSampler,
    data.DistributedSampler,
    data.RandomSampler,
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    list,
    tuple,
    range,
)


class Amount(NamedTuple):
    """The number of samples that one pass through a data loader yields, and how they are batched.

    Attributes:
        samples: number of samples on this rank.
        batch_size: samples in each batch except the last.
        drop_last: whether a last batch that is not full is dropped.
    """

    samples: int
    batch_size: int
    drop_last: bool

    def size_of(self, index: int) -> int:
        """Return the number of samples in the batch at `index`; 0 after the last batch.

        Example:
            >>> [Amount(5, 2, False).size_of(index) for index in range(4)]
            [2, 2, 1, 0]
        """
        size = max(0, min(self.batch_size, self.samples - index * self.batch_size))
        return 0 if self.drop_last and size < self.batch_size else size


def amount_of(loader: Any) -> Amount | None:
    """Return the amount that a pass through `loader` will yield, or None if it is not certain in advance.

    It is certain for a torch `DataLoader` over a map-style dataset with torch's own `BatchSampler` and with a sampler
    of torch or lockstep.
    """
    if not isinstance(loader, data.DataLoader) or isinstance(loader.dataset, data.IterableDataset):
        return None
    if type(loader.batch_sampler) is not data.BatchSampler:
        return None
    sampler, batch_size = loader.batch_sampler.sampler, loader.batch_sampler.batch_size
    if isinstance(sampler, InfiniteSampler) and type(sampler).__iter__ is InfiniteSampler.__iter__:
        return Amount(ENDLESS, batch_size, False)
    drawn = sampler.sampler if type(sampler) is ShardedSampler else sampler
    if type(drawn) not in _RELIABLE or not isinstance(sampler, Sized):
        return None
    return Amount(len(sampler), batch_size, loader.batch_sampler.drop_last)


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first part.

    Example:
        >>> import torch
        >>> batch_size_of({"img": torch.ones(3, 8), "label": torch.ones(3)}), batch_size_of([["a", "b"], [1, 2]])
        (3, 2)
    """
    if isinstance(batch, Mapping | list | tuple):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch), None)
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, str) else 1


class Deal(NamedTuple):
    """How one global order, which depends only on the seed and the epoch, is split over the ranks.

    Item i of the order goes to shard i modulo `shards`, and `batch_size` items of a shard make a batch. So a position
    in the order says what every rank has taken.

    Attributes:
        unit: what the items are: `"samples"`, or `"batches"` of a batch sampler.
        shards: the number of shards.
        batch_size: items in a batch of one shard.
        total: number of items in an epoch; None if it is not known.
        drop_last: whether a batch that is not full is left out.
        round_up: whether items are repeated until every shard has equally many.
        is_endless: whether a pass goes on with the next epoch's order instead of ending.
    """

    unit: str
    shards: int
    batch_size: int
    total: int | None
    drop_last: bool = False
    round_up: bool = False
    is_endless: bool = False

    @property
    def global_batch(self) -> int:
        """Items in a batch of all shards."""
        return self.shards * self.batch_size

    def turns_after(self, position: int) -> int | None:
        """Return the number of batches after `position`, on the shard that has most; None if that is not known.

        Example:
            >>> Deal("samples", shards=2, batch_size=3, total=16).turns_after(6)
            2
        """
        if self.total is None or self.is_endless:
            return None
        share = self._share(position, 0)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)

    def amount_after(self, position: int, shard: int) -> Amount:
        """Return the amount that a shard has after `position`; `total` must be known.

        Example:
            >>> [Deal("samples", shards=2, batch_size=3, total=15).amount_after(6, shard).samples for shard in (0, 1)]
            [5, 4]
        """
        samples = ENDLESS if self.is_endless else self._share(position, shard)
        return Amount(samples, self.batch_size, self.drop_last)

    def _share(self, position: int, shard: int) -> int:
        left = max(0, (self.total or 0) - position)
        return -(-left // self.shards) if self.round_up else len(range(shard, left, self.shards))


def begins_anywhere(sampler: Any) -> TypeGuard[DealingSampler]:
    """Return whether a sampler can begin inside its order: not if a user's subclass has an `__iter__` of its own."""
    return isinstance(sampler, DealingSampler) and type(sampler).__iter__.__module__.startswith("lockstep.")


def deal_of(loader: Any) -> Deal | None:
    """Return how the global order of a loader is split over the ranks; None if there is none, or if it is not known.

    It is known for samplers of lockstep, for torch's `DistributedSampler` if that drops nothing, and for iterable
    datasets that lockstep splits sample by sample.
    """
    if isinstance(loader, StreamLoader):
        shard = loader.dataset
        if not shard.deals_out:
            return None
        return Deal("samples", shard.shard[1], shard.batch_size, length_of(shard.dataset), loader.drop_last)
    if not isinstance(loader, data.DataLoader) or isinstance(loader.dataset, data.IterableDataset):
        return None
    sampler, batch_size = drawn_from(loader)
    batches = loader.batch_sampler
    unit = "samples" if batches is None or is_torchs(batches, data.BatchSampler) else "batches"
    drop_last = unit == "samples" and getattr(batches, "drop_last", False)
    if begins_anywhere(sampler):
        drawn = getattr(sampler, "sampler", None)  # of a ShardedSampler
        total = getattr(sampler, "size", None) if drawn is None else length_of(drawn)
        is_endless = isinstance(sampler, InfiniteSampler)
        return Deal(unit, sampler.world_size, batch_size, total, drop_last, sampler.round_up, is_endless)
    if type(sampler) is data.DistributedSampler and not sampler.drop_last:
        return Deal(unit, sampler.num_replicas, batch_size, length_of(sampler.dataset), drop_last, round_up=True)
    return None
