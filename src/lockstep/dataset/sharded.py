"""`ShardedSampler`: what a sampler draws that knows no ranks, dealt out to them."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.dataset.rank_aware import parts_of
from lockstep.dataset.sampler import DealingSampler

# Torch's, which draw from nothing but their `generator`.
_BY_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def drawn_from(loader: Any) -> tuple[Any, int]:
    """Return what a loader draws from, and how many of it make a batch.

    That is a sampler of indices, where batches are made of them in the plain way; else one of batches.
    """
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSampler:
        return batches.sampler, batches.batch_size
    return getattr(loader, "sampler", None) if batches is None else batches, 1


def length_of(items: Any) -> int | None:
    """Return the length of a sampler or a loader, or None where it is not known before."""
    try:
        return len(items)
    except TypeError:  # a DataLoader has a length only if its data set has one
        return None


class ShardedSampler(DealingSampler):
    """Deal out to the ranks what another sampler or batch sampler draws, like cards.

    Every rank draws the whole order, the same on each: for as long as the other sampler draws, the global generators
    of torch (CPU), Python and numpy are in a state of their own, and they and the generators that the sampler holds are
    seeded for each pass from `seed` and the epoch. So the global order depends on these alone, and a training can go on
    inside a pass. Rank r of n takes the items at positions r, r + n, r + 2n ...

    The states of the global generators are exchanged twice per batch, which takes some tenths of a millisecond; not for
    torch's own samplers, which are given a generator.

    A sampler that draws from anything else, such as the clock or a generator that it makes in `__iter__` without a
    seed, can't be dealt out so.

    Args:
        sampler: an iterable of indices, or of lists of them. It may have no end, and no length.
        seed: of the draws; the same on every rank. By default rank 0 draws one.
        round_up: repeat items from the beginning of the order until every rank has equally many. Without it each item
            is seen exactly once, and some ranks have one item less than others.
        shard: which of how many shards is this rank's; by default its rank, of the world size.
        batch_size: how many items of each rank are drawn at once.

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
        # What is skipped is drawn, but no sample is read.
        return islice(self._own(self.seed + self.epoch), self._take_skipped(), None)

    def __len__(self) -> int:
        """Return the number of items that this rank sees in a pass.

        Raises:
            TypeError: the sampler has no length.
        """
        return self._share(len(self.sampler))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass, here and in the sampler."""
        self.epoch = epoch
        for part in parts_of(self.sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _own(self, seed: int) -> Iterator[Any]:
        first: list[Any] = []
        for row in self._rows(seed):
            first = first or row
            if self.rank < len(row):
                yield row[self.rank]
            elif self.round_up:
                yield first[(self.rank - len(row)) % len(first)]

    def _rows(self, seed: int) -> Iterator[list[Any]]:
        """Yield one item for each rank after the other; fewer of them at the end."""
        drawing: Callable[[], AbstractContextManager[None]] = partial(_in_states, {})
        if type(self.sampler) in _BY_GENERATOR:
            sampler, drawing = copy.copy(self.sampler), nullcontext
            sampler.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
            items = iter(sampler)
        else:
            with drawing():
                _seed_generators(self.sampler, seed)
                items = iter(self.sampler)
        # No more at once than a batch needs: samplers may draw by what has been trained so far.
        size = self.batch_size * self.world_size
        while True:
            with drawing():
                drawn = list(islice(items, size))
            for begin in range(0, len(drawn), self.world_size):
                yield drawn[begin : begin + self.world_size]
            if len(drawn) < size:
                return


@contextmanager
def _in_states(states: dict[str, Any]) -> Iterator[None]:
    """Let the global generators go on from `states`, note there how far they come, and undo it outside."""
    outside = random_state(accelerator=False)
    if states:
        set_random_state(states)
    try:
        yield
    finally:
        states.update(random_state(accelerator=False))
        set_random_state(outside)


def _seed_generators(sampler: Any, seed: int) -> None:
    """Seed the global generators, and those that a sampler holds."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # those of accelerators are not of the sampler's concern
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    if numpy is not None:
        numpy.seed(seed % 2**32)
    for value in (value for part in parts_of(sampler) for value in getattr(part, "__dict__", {}).values()):
        if isinstance(value, torch.Generator):
            value.manual_seed(seed)
        elif isinstance(value, random.Random):
            value.seed(seed)
        elif numpy is not None and isinstance(value, numpy.RandomState):
            value.seed(seed % 2**32)
        elif numpy is not None and isinstance(value, numpy.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state
