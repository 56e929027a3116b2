"""The number of samples in a batch and, where it is known in advance, in a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import data

from lockstep.dataset.sampler import DefaultSampler, InfiniteSampler
from lockstep.dataset.sharded import ShardedSampler

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
    drawn_from = sampler.sampler if type(sampler) is ShardedSampler else sampler
    if type(drawn_from) not in _RELIABLE or not isinstance(sampler, Sized):
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
