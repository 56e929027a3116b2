"""Samplers of one global order, what each rank gets of it, and the seeds of its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from lockstep.dist import all_gather, get_dist_info, get_rank, get_world_size, sync_random_seed
from lockstep.errors import ConfigError
from lockstep.registry import DATA_SAMPLERS


class DealingSampler(Sampler[Any]):
    """What the samplers have in common that deal items out to the ranks, like cards.

    Args:
        seed: of the order; the same on every rank. By default rank 0 draws one.
        round_up: whether items are repeated until every rank has equally many.
        shard: which of how many shards is this rank's; by default its rank, of the world size.

    **Collective**: every rank, if `seed` is None.
    """

    def __init__(self, seed: int | None, round_up: bool, shard: tuple[int, int] | None) -> None:
        self.rank, self.world_size = get_dist_info() if shard is None else shard
        self.seed = sync_random_seed() if seed is None else seed
        self.round_up = round_up
        self.epoch = 0
        self._skipped = 0

    def skip(self, items: int) -> None:
        """Leave out the first items of this rank in the next pass, to go on inside it."""
        self._skipped = items

    def _take_skipped(self) -> int:
        skipped, self._skipped = self._skipped, 0
        return skipped

    def _require(self, items: int, name: str) -> None:
        """Refuse fewer items than there are ranks where each must have some."""
        if self.round_up and items < self.world_size:
            raise ConfigError(
                f"`{name}` must have at least one sample for each of the {self.world_size} ranks, but has {items} "
                f"(rank {self.rank} of {self.world_size}). Use fewer ranks"
            )

    def _share(self, items: int) -> int:
        """Return how many of so many items this rank gets."""
        if self.round_up:
            return -(-items // self.world_size)
        return len(range(self.rank, items, self.world_size))


@DATA_SAMPLERS.register_module()
class DefaultSampler(DealingSampler):
    """Deal one global order of the samples out to the ranks, like cards.

    The global order is a function of `seed` and the epoch alone. Rank r of n takes the samples at positions r, r + n, r
    + 2n ... of it, so that a global batch holds the same samples whatever the number of ranks is.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order in every epoch (see `set_epoch`), else keep the data set's own.
        seed: of the order; the same on every rank. By default rank 0 draws one.
        round_up: repeat samples from the beginning of the order until every rank has equally many, as training needs
            it. Without it every sample is seen exactly once, as evaluation needs it, and some ranks have one sample
            less than others.
        shard: which of how many shards is this rank's, as a strategy says in `data_shard`; by default its rank, of the
            world size.

    **Collective**: every rank, if `seed` is None.

    Raises:
        ConfigError: with `round_up`, the data set has fewer samples than there are ranks.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> sampler = DefaultSampler(range(5), shuffle=False, round_up=False)
        >>> list(sampler) == ([0, 2, 4], [1, 3])[get_rank()]
        True
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(seed, round_up, shard)
        self.shuffle = shuffle
        self._size = len(dataset)
        self._require(self._size, "dataset")

    def __iter__(self) -> Iterator[int]:
        order = _global_order(self._size, self.seed + self.epoch if self.shuffle else None)
        if self.round_up:
            order += order[: -len(order) % self.world_size]
        return iter(order[self.rank :: self.world_size][self._take_skipped() :])

    def __len__(self) -> int:
        """Return the number of samples that this rank sees in an epoch."""
        return self._share(self._size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch


@DATA_SAMPLERS.register_module()
class InfiniteSampler(DealingSampler):
    """Deal the samples out to the ranks, like cards, one order of the data set after the other, without an end.

    The stream that is dealt is a function of `seed` alone: rank r of n takes the samples at positions r, r + n, r + 2n
    ... of it, across the borders of epochs, so that no sample is repeated to give the ranks equally many. It has no
    length, and is for loops by iterations.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order for every pass, else repeat the data set's own.
        seed: of the orders; the same on every rank. By default rank 0 draws one.
        shard: as for `DefaultSampler`.

    **Collective**: every rank, if `seed` is None.

    Raises:
        ConfigError: the data set is empty.

    **Example (2 ranks)**::

        >>> from itertools import islice
        >>> from lockstep.dist import get_rank
        >>> sampler = InfiniteSampler(range(3), shuffle=False)
        >>> list(islice(sampler, 4)) == ([0, 2, 1, 0], [1, 0, 2, 1])[get_rank()]
        True
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int | None = None, shard: tuple[int, int] | None = None
    ) -> None:
        super().__init__(seed, False, shard)
        self.shuffle = shuffle
        self._size = len(dataset)
        if self._size == 0:
            raise ConfigError(
                f"`dataset` must have at least one sample, but has none (rank {self.rank} of {self.world_size})"
            )

    def __iter__(self) -> Iterator[int]:
        position = self.rank + self._take_skipped() * self.world_size
        while True:
            epoch, offset = divmod(position, self._size)
            own = _global_order(self._size, self.seed + epoch if self.shuffle else None)[offset :: self.world_size]
            yield from own
            position += len(own) * self.world_size


class WorkerSeeds(torch.Generator):
    """The generator that a data loader draws its workers' seeds from, once in each pass.

    They differ between ranks, so that random augmentations do, and are a function of the seed, the rank and the epoch
    alone, so that a run which goes on after an epoch draws what the run that never stopped draws. Workers that live on
    from pass to pass (`persistent_workers`) are seeded once, though.

    Args:
        seed: of the order of samples, the same on every rank.
        rank: the number of this rank's shard.
    """

    def __new__(cls, seed: int, rank: int) -> WorkerSeeds:
        """Make the generator of epoch 0."""
        return super().__new__(cls)

    def __init__(self, seed: int, rank: int) -> None:
        self._seed = seed + rank
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the seeds of the next pass."""
        self.manual_seed((self._seed + (epoch << 32)) % 2**63)


class DataShard(NamedTuple):
    """Which of the samples a rank sees.

    Attributes:
        rank: the number of its shard.
        size: how many shards there are: the world size, or, where ranks compute together, less.
        is_first: whether this rank speaks for all that see the same samples.
    """

    rank: int
    size: int
    is_first: bool


def agree_on_shard(rank: int, size: int) -> DataShard:
    """Return a rank's shard, with who is the first to have it.

    **Collective**: every rank. **Cost**: 8 bytes from each rank to each, where there are fewer shards than ranks.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> agree_on_shard(get_rank(), 2).is_first, agree_on_shard(0, 1).is_first == (get_rank() == 0)
        (True, True)
    """
    if size == get_world_size():
        return DataShard(rank, size, is_first=True)
    holders = [int(holder) for holder in all_gather(torch.tensor(rank))]
    return DataShard(rank, size, is_first=holders.index(rank) == get_rank())


def _global_order(size: int, seed: int | None) -> list[int]:
    """Return the order of all samples that a seed stands for; the data set's own for None."""
    if seed is None:
        return list(range(size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
