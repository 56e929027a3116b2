"""`ShardedSampler`: splits over the ranks what a sampler draws that does not know of ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lockstep.dataset.random_state import seed_generators, separate_random_state
from lockstep.dataset.rank_aware import parts_of
from lockstep.dataset.sampler import TOLD, DealingSampler

# Torch's samplers that draw only from their `generator`.
_BY_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def drawn_from(loader: Any) -> tuple[Any, int]:
    """Return what a loader draws from, and how many drawn items make a batch.

    That is a sampler of indices if torch's own `BatchSampler` makes the batches; otherwise a sampler of batches.
    """
    batches = getattr(loader, "batch_sampler", None)
    if is_torchs(batches, BatchSampler):
        return batches.sampler, batches.batch_size  # type: ignore[union-attr]
    return getattr(loader, "sampler", None) if batches is None else batches, 1


def is_torchs(part: Any, kind: type) -> bool:
    """Return whether a part of a loader is of a class of torch, and not of a subclass; torchdata's variant counts."""
    own = type(part)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.partition(".")[0] == "torchdata")


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader that draws from another sampler instead of the one that `drawn_from` returns."""
    batches: Any = loader.batch_sampler
    if is_torchs(batches, BatchSampler):
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        return with_parts(loader, sampler=sampler, batch_sampler=batches)
    return with_parts(loader, **{"sampler" if batches is None else "batch_sampler": sampler})


def with_parts(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other parts and workers of its own; all else in it, or its subclass, is kept."""
    changed = copy.copy(loader)
    vars(changed).update(parts, _iterator=None)
    return changed


def length_of(items: Any) -> int | None:
    """Return the length of a sampler or a loader, or None if it is not known in advance."""
    with suppress(TypeError):  # a DataLoader has a length only if its dataset has one
        return len(items)
    return None


class ShardedSampler(DealingSampler):
    """A sampler that splits what another sampler or batch sampler draws over the ranks round-robin.

    Every rank draws the whole order, which is the same on each. While the other sampler draws, the global generators of
    torch (CPU), Python and numpy have a separate state. They and the generators in the sampler are seeded for each pass
    from `seed` and the epoch. So the global order depends only on these, and training can resume inside a pass. Rank r
    of n takes the items at positions r, r + n, r + 2n ...

    The states of the global generators are swapped twice per batch, which takes some tenths of a millisecond. This is
    not needed for torch's own samplers, which get a generator.

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
        return self._own(self.seed + self.epoch)

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

    def _own(self, seed: int) -> Iterator[Any]:
        # Draw only as much as one batch needs: a sampler's draws may depend on the training so far.
        draw, size = self._drawing(seed), self.batch_size * self.world_size
        left_out = self._take_begin()
        head: list[Any] = []
        while True:
            # Items before the beginning are drawn, but their samples are not read.
            wanted = min(size, left_out) or size
            drawn = draw(wanted)
            if len(head) < max(self.world_size, TOLD):
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
            items = iter(sampler)
        else:
            with drawing():
                _seed_generators(self.sampler, seed)
                items = iter(self.sampler)

        def draw(count: int) -> list[Any]:
            with drawing():
                return list(islice(items, count))

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
