"""How many samples each batch of a loader holds, also where the batch does not tell, as of concatenated graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lockstep.dataset.stream import StreamLoader


class CountedBatches:
    """An iterator over the batches of a loader, which knows how many samples were put into each.

    A `DataLoader` of a map-style dataset counts the indices that its sampler has drawn for the batch, and a
    `StreamLoader` the samples that it has collated. Of others it is not known.

    Args:
        loader: the loader.
        drawn: the `drawn` of the pass before, from which workers that the loader has kept go on drawing.

    Attributes:
        samples: the number of samples in the last batch; None if it is not known.
        drawn: what is drawn for the batches. It does not hold the iterator, whose workers end with the last reference.
    """

    def __init__(self, loader: Any, drawn: Drawn | None = None) -> None:
        self.samples: int | None = None
        self.drawn: Drawn | None = None
        self._loader = loader
        name = "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
        if not _draws(loader):
            self._batches = iter(loader)
            return
        sampler = getattr(loader, name)
        self.drawn = drawn if drawn is not None and drawn.sampler is sampler else Drawn(sampler)
        vars(loader)[name] = self.drawn  # torch allows no other way
        try:
            self._batches = iter(loader)
        finally:
            vars(loader)[name] = sampler

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self.drawn is not None:
            self.samples = self.drawn.sizes.popleft() if self.drawn.sizes else None
        elif isinstance(self._loader, StreamLoader):
            self.samples = self._loader.samples
        return batch

    def shut_down(self) -> None:
        """End the loader's workers, if it has some."""
        end = getattr(self._batches, "_shutdown_workers", None)  # they end in no public way (2.13)
        if end is not None:
            end()


class Drawn:
    """What a sampler draws for each batch; `sizes` are the numbers of samples in batches that are not complete yet."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.sizes: deque[int | None] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.sizes.clear()
        for drawn in self.sampler:
            self.sizes.append(len(drawn) if isinstance(drawn, list | tuple) else None)
            yield drawn

    def __len__(self) -> int:
        return len(self.sampler)


def _draws(loader: Any) -> bool:
    """Return whether a loader draws from its sampler, in the order of its batches, as torch's does."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and getattr(loader, "in_order", True)
    )
