"""Seeds for a data loader's workers that are the same in every run."""

from __future__ import annotations

import torch


class WorkerSeeds(torch.Generator):
    """The generator that a data loader draws its workers' seeds from, once in each pass.

    They differ between ranks, so that random augmentations do, and are a function of the seed, the rank and the epoch
    alone, so that a run which goes on after an epoch draws what the run that never stopped draws. Workers that live on
    from pass to pass (`persistent_workers`) are seeded once, though.

    Args:
        seed: of the order of samples, the same on every rank.
        rank: the number of this rank's share.
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
