"""Samplers that split one global order over the ranks, and the seeds of the workers."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.dataset.order import MOST_DRAWN, Order, computed_order, drawn_order, items_at, unshuffled
from lockstep.dataset.random_state import mixed_seed, seed_generators, separate_random_state
from lockstep.dataset.rank_aware import parts_of
from lockstep.dist import all_gather, get_dist_info, get_rank, get_world_size, sync_random_seed
from lockstep.errors import ConfigError, counted
from lockstep.registry import DATA_SAMPLERS

_logger = logging.getLogger(__name__)
HEAD_LENGTH = 8  # as many items of an order say whether it is the same
# Torch's samplers that draw only from their `generator`.
_BY_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def is_other(head: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether an order begins otherwise than another one, as far as both are known."""
    return any(now != then for now, then in zip(head, expected, strict=False))


class ShardingSampler(Sampler[Any]):
    """Base class of samplers that split items over the ranks round-robin.

    A pass may begin inside the global order, at any position; from there on its items are split anew.

    Args:
        seed: seed of the order; the same on every rank. By default rank 0 draws one.
        round_up: whether items are repeated until every rank has equally many.
        shard: this rank's shard and the number of shards; by default its rank and the world size.

    Attributes:
        head: the first items of the order of the last pass, or checksums of them; they tell it from another order.

    **Collective**: every rank, if `seed` is None.
    """

    def __init__(self, seed: int | None, round_up: bool, shard: tuple[int, int] | None) -> None:
        self.rank, self.world_size = get_dist_info() if shard is None else shard
        self.seed = sync_random_seed() if seed is None else seed
        self.round_up = round_up
        self.epoch = 0
        self.head: list[int] = []
        self._begin = 0
        self._expected: Sequence[int] = ()

    def begin_at(self, position: int, head: Sequence[int] = ()) -> None:
        """Let the next pass begin inside the global order, to resume there.

        Args:
            position: number of items at the beginning of the order that are left out, on all ranks together.
            head: what `head` was in the run that is resumed. If the order begins otherwise, a warning says so.
        """
        self._begin, self._expected = position, head

    def head_of(self, epoch: int) -> list[int]:
        """Return `head` of the order that a pass is in. If a pass goes through several, that of `epoch` is meant."""
        return self.head

    def _take_begin(self) -> int:
        begin, self._begin = self._begin, 0
        if not begin:
            self._expected = ()
        return begin

    def _note_head(self, items: Iterable[Any]) -> None:
        """Keep what tells this order from another one, and compare it with that of the run that is resumed."""
        first = islice(items, HEAD_LENGTH)
        self.head = [item if isinstance(item, int) else crc32(repr(item).encode()) for item in first]
        if is_other(self.head, self._expected):
            self._expected = ()
            _logger.warning(
                "the order of epoch %d begins with other items than in the run that is resumed: in the rest of the "
                "epoch, some samples are seen again and others are left out. An order must depend on nothing but the "
                "seed, the epoch, the data and the arguments of its sampler, such as `computed`",
                self.epoch + 1,
            )

    def _require(self, items: int, name: str) -> None:
        """Raise a `ConfigError` if each rank must have an item, but there are fewer items than ranks."""
        if self.round_up and items < self.world_size:
            least = f"at least {counted(self.world_size, 'sample')}, one for each rank"
            raise ConfigError(
                f"`{name}` must have {least if items else 'samples'}, but has {items or 'none'} "
                f"(rank {self.rank} of {self.world_size}){'. Use fewer ranks' if items else ''}"
            )

    def share(self, items: int) -> int:
        """Return how many of `items` items this rank gets."""
        if self.round_up:
            return -(-items // self.world_size)
        return len(range(self.rank, items, self.world_size))


class OrderSampler(ShardingSampler):
    """Base class of samplers that go through all samples of a dataset once in each epoch.

    Args:
        dataset: anything with a length.
        shuffle: whether each epoch has an order of its own.
        seed: as for `ShardingSampler`.
        round_up: as for `ShardingSampler`.
        shard: as for `ShardingSampler`.
        computed: how shuffled orders are made; see `DefaultSampler`.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        shard: tuple[int, int] | None = None,
        computed: bool | None = None,
    ) -> None:
        super().__init__(seed, round_up, shard)
        self.dataset = dataset
        self.shuffle = shuffle
        self.size = len(dataset)
        self.computed = self.size > MOST_DRAWN if computed is None else computed
        self._require(self.size, "dataset")

    def order_of(self, epoch: int) -> Order:
        """Return the order of all samples in an epoch."""
        if not self.shuffle:
            return unshuffled
        if self.computed:
            return computed_order(self.size, self.seed, epoch)
        return drawn_order(self.size, torch.Generator().manual_seed(self.seed + epoch))

    def _first(self, order: Order) -> list[int]:
        return list(items_at(order, range(min(self.size, HEAD_LENGTH)), self.size))


@DATA_SAMPLERS.register_module()
class DefaultSampler(OrderSampler):
    """A sampler that splits one global order of the samples over the ranks round-robin.

    The global order depends only on `seed` and the epoch. Rank r of n takes the samples at positions r, r + n, r + 2n
    ... of it, so a global batch of a given size holds the same samples on any number of ranks.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order in every epoch (see `set_epoch`); otherwise keep the dataset's own order.
        seed: seed of the order; the same on every rank. By default rank 0 draws one.
        round_up: repeat samples from the beginning of the order until every rank has equally many, as training needs.
            Otherwise every sample is seen exactly once, as evaluation needs, and some ranks have one sample fewer.
        shard: this rank's shard and the number of shards, such as a strategy's `data_shard`; by default its rank and
            the world size.
        computed: whether a shuffled order is computed position by position, in 1.5 MiB for 10^9 samples, or drawn
            whole by `torch.randperm`, as torch and MMEngine do. By default it is computed for more than 2^23 samples.
            The two orders differ.

    **Collective**: every rank, if `seed` is None.

    Raises:
        ConfigError: with `round_up`, the dataset has fewer samples than there are ranks.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> sampler = DefaultSampler(range(5), shuffle=False, round_up=False)
        >>> list(sampler) == ([0, 2, 4], [1, 3])[get_rank()]
        True
    """

    def __iter__(self) -> Iterator[int]:
        begin, end = self._take_begin(), self.size
        order = self.order_of(self.epoch)
        self._note_head(self._first(order))
        if self.round_up:
            end += -max(0, self.size - begin) % self.world_size
        return items_at(order, range(begin + self.rank, end, self.world_size), self.size)

    def __len__(self) -> int:
        """Return the number of samples that this rank sees in an epoch."""
        return self.share(self.size)

    @property
    def num_samples(self) -> int:
        """The number of samples that this rank sees in an epoch."""
        return len(self)

    @property
    def total_size(self) -> int:
        """The number of samples that all ranks together see in an epoch, with those that are repeated."""
        return len(self) * self.world_size if self.round_up else self.size

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch


@DATA_SAMPLERS.register_module()
class InfiniteSampler(OrderSampler):
    """A sampler that splits an endless sequence of orders of the dataset over the ranks round-robin.

    The sequence depends only on `seed`. Rank r of n takes the samples at positions r, r + n, r + 2n ... of it, across
    epoch boundaries, so no sample is repeated to give the ranks equally many. The sampler has no length and is meant
    for training that counts iterations.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order for every pass; otherwise repeat the dataset's own order.
        seed: seed of the orders; the same on every rank. By default rank 0 draws one.
        shard: as for `DefaultSampler`.
        computed: as for `DefaultSampler`.

    **Collective**: every rank, if `seed` is None.

    Raises:
        ConfigError: the dataset is empty.

    **Example (2 ranks)**::

        >>> from itertools import islice
        >>> from lockstep.dist import get_rank
        >>> sampler = InfiniteSampler(range(3), shuffle=False)
        >>> list(islice(sampler, 4)) == ([0, 2, 1, 0], [1, 0, 2, 1])[get_rank()]
        True
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        shard: tuple[int, int] | None = None,
        computed: bool | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, False, shard, computed)
        self.epoch = -1  # that of `head`, which no pass has noted yet
        if self.size == 0:
            raise ConfigError(
                f"`dataset` must have at least one sample, but has none (rank {self.rank} of {self.world_size})"
            )

    def __iter__(self) -> Iterator[int]:
        begin = self._take_begin()
        self.epoch = begin // self.size
        self._note_head(self._first(self.order_of(self.epoch)))
        position = begin + self.rank
        while True:
            epoch, offset = divmod(position, self.size)
            positions = range(offset, self.size, self.world_size)
            yield from items_at(self.order_of(epoch), positions, self.size)
            position += len(positions) * self.world_size

    def head_of(self, epoch: int) -> list[int]:
        """Return the first samples of the order of an epoch, which the pass goes through among others."""
        if epoch != self.epoch:
            self.epoch, self.head = epoch, self._first(self.order_of(epoch))
        return self.head


class WorkerSeeds(torch.Generator):
    """The generator from which a data loader draws its workers' seeds, once in each pass.

    The seeds depend only on `seed`, `rank` and the epoch. They differ between ranks, and so do random augmentations; a
    run that resumes after an epoch draws the same seeds as a run that never stopped. However, workers that live across
    passes (`persistent_workers`) are seeded only once.

    Args:
        seed: seed of the order of samples, the same on every rank.
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
        self.manual_seed(mixed_seed(self._seed, epoch))


class DataShard(NamedTuple):
    """The shard of the samples that a rank sees.

    Attributes:
        rank: the number of its shard.
        size: the number of shards: the world size, or fewer if several ranks compute on the same samples.
        is_first: whether this rank is the first of those that see the same samples, and reports for all of them.
    """

    rank: int
    size: int
    is_first: bool


def agree_on_shard(rank: int, size: int) -> DataShard:
    """Return this rank's shard, and whether this rank is the first that has it.

    **Collective**: every rank. **Cost**: 8 bytes from each rank to each, if there are fewer shards than ranks.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> agree_on_shard(get_rank(), 2).is_first, agree_on_shard(0, 1).is_first == (get_rank() == 0)
        (True, True)
    """
    if size == get_world_size():
        return DataShard(rank, size, is_first=True)
    holders = [int(holder) for holder in all_gather(torch.tensor(rank, device="cpu"))]
    return DataShard(rank, size, is_first=holders.index(rank) == get_rank())


def length_of(items: Any) -> int | None:
    """Return the length of a sampler or a loader, or None if it is not known in advance."""
    with suppress(TypeError, NotImplementedError):  # a DataLoader has a length only if its dataset has one
        return len(items)
    return None


class ShardedSampler(ShardingSampler):
    """A sampler that splits what another sampler or batch sampler draws over the ranks round-robin.

    Every rank draws the whole order, which is the same on each. While the other sampler draws, the global generators of
    torch (CPU), Python and numpy have a separate state. They and the generators in the sampler are seeded for each pass
    from `seed` and the epoch. So the global order depends only on these, and training can resume inside a pass. Rank r
    of n takes the items at positions r, r + n, r + 2n ...

    The states of the global generators are swapped twice per batch, which takes some tenths of a millisecond. This is
    not needed for torch's `RandomSampler`, `SubsetRandomSampler` and `WeightedRandomSampler` by themselves, which get a
    generator; it is for a `BatchSampler` around one.

    A sampler that draws from another source, such as the clock or an unseeded generator that it creates in `__iter__`,
    can't be split in this way. One whose order depends on the training so far, such as on the losses, can't be drawn
    again: with an attribute `resumable = False`, a run that resumes inside an epoch begins the epoch anew.

    Args:
        sampler: an iterable of indices or of lists of indices. It may be endless and have no length.
        seed: seed of the draws; the same on every rank. By default rank 0 draws one.
        round_up: repeat items from the beginning of the order until every rank has equally many. Otherwise each item
            is seen exactly once, and some ranks have one item fewer.
        shard: this rank's shard and the number of shards; by default its rank and the world size.
        batch_size: how many items for each rank are drawn at once.

    **Collective**: every rank, if `seed` is None.

    Raises:
        ConfigError: with `round_up`, the sampler has fewer items than there are ranks.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> list(ShardedSampler([5, 5, 8], round_up=False)) == ([5, 8], [5])[get_rank()]
        True
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        seed: int | None = None,
        round_up: bool = True,
        shard: tuple[int, int] | None = None,
        batch_size: int = 1,
    ) -> None:
        super().__init__(seed, round_up, shard)
        self.sampler = sampler
        self.batch_size = batch_size
        if (items := length_of(sampler)) is not None:
            self._require(items, "sampler")

    def __iter__(self) -> Iterator[Any]:
        return self._shard_of_pass(self.seed + self.epoch)

    def __len__(self) -> int:
        """Return the number of items that this rank sees in a pass.

        Raises:
            TypeError: the sampler has no length.
        """
        return self.share(len(self.sampler))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass, here and in the inner sampler."""
        self.epoch = epoch
        for part in parts_of(self.sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _shard_of_pass(self, seed: int) -> Iterator[Any]:
        # Draw only as much as one batch needs: a sampler's draws may depend on the training so far.
        draw, size = self._drawing(seed), self.batch_size * self.world_size
        left_out = self._take_begin()
        head: list[Any] = []
        while True:
            # Items before the beginning are drawn, but their samples are not read.
            wanted = min(size, left_out) or size
            drawn = draw(wanted)
            if len(head) < max(self.world_size, HEAD_LENGTH):
                head += drawn
                self._note_head(head)
            if left_out == 0:
                yield from self._of_rank(drawn, head)
            left_out -= min(wanted, left_out)
            if len(drawn) < wanted:
                return

    def _of_rank(self, drawn: list[Any], head: list[Any]) -> list[Any]:
        """Return this rank's share of what was drawn; `head` is the beginning of the order, which fills up rows."""
        own = drawn[self.rank :: self.world_size]
        rest = len(drawn) % self.world_size
        if self.round_up and 0 < rest <= self.rank:
            own.append(head[(self.rank - rest) % len(head)])
        return own

    def _drawing(self, seed: int) -> Callable[[int], list[Any]]:
        """Return a function that draws the next items, so many or, at the end of the order, fewer."""
        drawing: Callable[[], AbstractContextManager[None]] = partial(separate_random_state, {})
        if type(self.sampler) in _BY_GENERATOR:
            sampler, drawing = copy.copy(self.sampler), nullcontext
            sampler.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
            if isinstance(sampler, WeightedRandomSampler):  # a generator of the CPU draws by weights there alone
                sampler.weights = sampler.weights.cpu()
            items = islice(sampler, None)
        else:
            with drawing():
                _seed_generators(self.sampler, seed)
                items = islice(self.sampler, None)  # `iter` of it does not begin anew, as that of a sampler may

        def draw(count: int) -> list[Any]:
            with drawing():  # a batch sampler may fill one list again and again
                return [copy.copy(item) if isinstance(item, list) else item for item in islice(items, count)]

        return draw


def _seed_generators(sampler: Any, seed: int) -> None:
    """Seed the global generators and those in a sampler."""
    seed_generators(seed)  # samplers do not use those of accelerators
    for value in (value for part in parts_of(sampler) for value in getattr(part, "__dict__", {}).values()):
        if isinstance(value, torch.Generator):
            value.manual_seed(seed)
        elif isinstance(value, random.Random):
            value.seed(seed)
        elif isinstance(value, np.random.RandomState):
            value.seed(seed % 2**32)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state
