"""How one global order of samples is split over the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lockstep.dataset.amounts import ENDLESS, Amount
from lockstep.dataset.sampler import DealingSampler, InfiniteSampler
from lockstep.dataset.sharded import drawn_from, is_torchs, length_of
from lockstep.dataset.stream import StreamLoader


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
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler, batch_size = drawn_from(loader)
    batches = loader.batch_sampler
    unit = "samples" if batches is None or is_torchs(batches, BatchSampler) else "batches"
    drop_last = unit == "samples" and getattr(batches, "drop_last", False)
    if begins_anywhere(sampler):
        drawn = getattr(sampler, "sampler", None)  # of a ShardedSampler
        total = getattr(sampler, "size", None) if drawn is None else length_of(drawn)
        is_endless = isinstance(sampler, InfiniteSampler)
        return Deal(unit, sampler.world_size, batch_size, total, drop_last, sampler.round_up, is_endless)
    if type(sampler) is DistributedSampler and not sampler.drop_last:
        return Deal(unit, sampler.num_replicas, batch_size, length_of(sampler.dataset), drop_last, round_up=True)
    return None
