"""Samplers: lockstep's, and the endless one with MMEngine's order."""

from __future__ import annotations

from collections.abc import Sized

import torch

import lockstep.dataset
from lockstep.dataset import DefaultSampler
from lockstep.dataset.order import Order, drawn_order
from mmengine.registry import DATA_SAMPLERS

__all__ = ["DefaultSampler", "InfiniteSampler"]


@DATA_SAMPLERS.register_module()
class InfiniteSampler(lockstep.dataset.InfiniteSampler):
    """lockstep's `InfiniteSampler`, with the orders that MMEngine draws: all from one generator, one after the other.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order for every pass; otherwise repeat the dataset's own order.
        seed: seed of the generator; the same on every rank. By default rank 0 draws one.
        shard: this rank's shard and the number of shards; by default its rank and the world size.
        computed: whether shuffled orders are computed position by position instead; by default for more than 2^23
            samples, of which MMEngine's orders would take gigabytes.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        shard: tuple[int, int] | None = None,
        computed: bool | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, shard, computed)
        self._generator = torch.Generator()
        self._drawn = 0

    def order_of(self, epoch: int) -> Order:
        """Return the order of one pass; those before it are drawn too, because they come from the same generator."""
        if not self.shuffle or self.computed:
            return super().order_of(epoch)
        if self._drawn == 0 or epoch < self._drawn:
            self._generator.manual_seed(self.seed)
            self._drawn = 0
        for _ in range(self._drawn, epoch):
            drawn_order(self.size, self._generator)
        self._drawn = epoch + 1
        return drawn_order(self.size, self._generator)

    def __len__(self) -> int:
        """Return the number of samples of the dataset; an iteration never ends."""
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the sampler has no epochs."""
