"""`DefaultSampler`: one global order of the data set, dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from lockstep.dist import get_dist_info, sync_random_seed
from lockstep.errors import ConfigError
from lockstep.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class DefaultSampler(Sampler[int]):
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
        share: which of how many shares is this rank's, as a strategy says in `data_share`; by default its rank, of the
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
        share: tuple[int, int] | None = None,
    ) -> None:
        self.rank, self.world_size = get_dist_info() if share is None else share
        self.shuffle = shuffle
        self.seed = sync_random_seed() if seed is None else seed
        self.round_up = round_up
        self.epoch = 0
        self._size = len(dataset)
        self._skipped = 0
        if round_up and self._size < self.world_size:
            raise ConfigError(
                f"`dataset` must have at least one sample for each of the {self.world_size} ranks, "
                f"but has {self._size} (rank {self.rank} of {self.world_size}). Use fewer ranks"
            )

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        if self.round_up:
            order += order[: -len(order) % self.world_size]
        skipped, self._skipped = self._skipped, 0
        return iter(order[self.rank :: self.world_size][skipped:])

    def __len__(self) -> int:
        """Return the number of samples that this rank sees in an epoch."""
        if self.round_up:
            return -(-self._size // self.world_size)
        return len(range(self.rank, self._size, self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def skip(self, samples: int) -> None:
        """Leave out the first samples of this rank in the next pass, to go on inside an epoch."""
        self._skipped = samples

    def _order(self) -> list[int]:
        return global_order(self._size, self.seed + self.epoch if self.shuffle else None)


def global_order(size: int, seed: int | None) -> list[int]:
    """Return the order of all samples that a seed stands for; the data set's own for None."""
    if seed is None:
        return list(range(size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
