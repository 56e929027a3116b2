"""`InfiniteSampler`: one epoch's order after the other, without an end."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from lockstep.dataset.sampler import global_order
from lockstep.dist import get_dist_info, sync_random_seed
from lockstep.errors import ConfigError
from lockstep.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class InfiniteSampler(Sampler[int]):
    """Deal the samples out to the ranks, like cards, one order of the data set after the other, without an end.

    The stream that is dealt is a function of `seed` alone: rank r of n takes the samples at positions r, r + n, r + 2n
    ... of it, across the borders of epochs, so that no sample is repeated to give the ranks equally many. It has no
    length, and is for loops by iterations.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order for every pass, else repeat the data set's own.
        seed: of the orders; the same on every rank. By default rank 0 draws one.
        share: as for `DefaultSampler`.

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
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        self.rank, self.world_size = get_dist_info() if share is None else share
        self.shuffle = shuffle
        self.seed = sync_random_seed() if seed is None else seed
        self._size = len(dataset)
        self._skipped = 0
        if self._size == 0:
            raise ConfigError(
                f"`dataset` must have at least one sample, but has none (rank {self.rank} of {self.world_size})"
            )

    def __iter__(self) -> Iterator[int]:
        skipped, self._skipped = self._skipped, 0
        epoch, place = divmod(self.rank + skipped * self.world_size, self._size)
        while True:
            order = global_order(self._size, self.seed + epoch if self.shuffle else None)
            yield from order[place :: self.world_size]
            # Where this rank's next card lies after the last one of this order.
            further, place = divmod(place + -(-(self._size - place) // self.world_size) * self.world_size, self._size)
            epoch += further

    def skip(self, samples: int) -> None:
        """Leave out the first samples of this rank in the next pass. Nothing is drawn for the orders in between."""
        self._skipped = samples
