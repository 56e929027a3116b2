"""Samples in files that are read from the beginning to the end, such as tar archives or lines of text; their order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lockstep.dataset.order import Order, drawn, unshuffled
from lockstep.dataset.sampler import DefaultSampler
from lockstep.errors import ConfigError, counted, require_count
from lockstep.registry import DATA_SAMPLERS, DATASETS


@DATASETS.register_module()
class FileDataset(Dataset[Any]):
    """The samples of many files, by number, where a file can only be read from its beginning on.

    A sample is read at once if it comes after one that was read before from the same file, and otherwise after those
    before it. With a `FileSampler` each worker of each rank reads its own files, from the beginning to the end.

    Args:
        files: what `read` opens, such as paths; the same in the same order on every rank.
        lengths: number of samples in each of them.
        read: returns the samples of a file, in their order.
        most_open: how many files are kept open in a process. One process reads `ranks * workers` of a `FileSampler` in
            turn, and each of several its part of these.

    Example:
        >>> dataset = FileDataset(["ab", "cde"], lengths=[2, 3], read=iter)
        >>> len(dataset), dataset[1], dataset[2], dataset[4]
        (5, 'b', 'c', 'e')
    """

    def __init__(
        self,
        files: Sequence[Any],
        lengths: Sequence[int],
        read: Callable[[Any], Iterable[Any]],
        most_open: int = 256,
    ) -> None:
        if len(files) != len(lengths):
            raise ConfigError(
                f"`lengths` must have a number for each of the {len(files)} files, but has {len(lengths)}"
            )
        self.files = files
        self.lengths = np.array(lengths, dtype=np.int64)
        self.read = read
        self.most_open = most_open
        self._size = int(self.lengths.sum())
        self._begins = np.cumsum(self.lengths) - self.lengths
        # By process, as a fork would read on in the same file; by file; and by what was read of it.
        self._open: dict[tuple[int, int, int], Iterator[Any]] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: there is no such sample.
            ValueError: the file has fewer samples than `lengths` says.
        """
        if not 0 <= index < self._size:
            raise IndexError(f"the number of a sample must be at least 0 and below {self._size}, but is {index}")
        file = int(np.searchsorted(self._begins, index, "right")) - 1
        offset = index - int(self._begins[file])
        own = os.getpid(), file
        done = offset
        if (*own, offset) not in self._open:
            done = max((key[2] for key in self._open if key[:2] == own and key[2] < offset), default=0)
        samples = self._open.pop((*own, done), None)
        if samples is None:
            done, samples = 0, iter(self.read(self.files[file]))
        for sample in islice(samples, offset - done, None):
            if offset + 1 < self.lengths[file]:
                self._open[*own, offset + 1] = samples
                if len(self._open) > self.most_open:
                    del self._open[next(iter(self._open))]  # the one that was used least recently
            return sample
        raise ValueError(f"{self.files[file]!r} must have {self.lengths[file]} samples, but has at most {offset}")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the files that are open, which no other process can read."""
        return {**vars(self), "_open": {}}


class FileOrder:
    """An order of samples in files in which each of a number of readers goes through files of its own.

    The files lie one after another, and are cut into as many equal parts as there are readers: `ranks` times `workers`.
    A global batch takes equally many samples from each of the parts of one group of `ranks` readers, and the next
    global batch those of the next group. What is left over, less than a global batch for each group, comes last.

    Args:
        lengths: number of samples in each file.
        files: the order of the files.
        ranks: number of readers of a global batch.
        workers: number of groups of readers.
        global_batch: samples in a global batch, a multiple of `ranks`.
    """

    def __init__(
        self, lengths: NDArray[np.int64], files: NDArray[np.integer], ranks: int, workers: int, global_batch: int
    ) -> None:
        self._ranks, self._workers, self._global_batch = ranks, workers, global_batch
        self._rounds = int(lengths.sum()) // (workers * global_batch)
        ends = np.cumsum(lengths[files])
        self._ends, self._shifts = ends, (np.cumsum(lengths) - lengths)[files] - (ends - lengths[files])

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the samples at these positions."""
        share = self._global_batch // self._ranks
        batch, row = np.divmod(positions, self._global_batch)
        turn, group = np.divmod(batch, self._workers)
        reader = group * self._ranks + row % self._ranks
        place = (reader * self._rounds + turn) * share + row // self._ranks
        place = np.where(turn < self._rounds, place, positions)
        places: NDArray[np.int64] = place + self._shifts[np.searchsorted(self._ends, place, "right")]
        return places


@DATA_SAMPLERS.register_module()
class FileSampler(DefaultSampler):
    """A `DefaultSampler` in whose order each worker of each rank reads files of its own, from beginning to end.

    The order depends on the seed, the epoch, and the arguments below, but not on how many ranks and workers there are:
    these may be any divisors of `ranks` and `workers`. Training resumes in it on any of them. Files are shuffled, and
    the samples of a file keep their order. A global batch has samples from `ranks` files.

    Args:
        dataset: a `FileDataset`, or anything else with a length and with `lengths`, the number of samples in each file.
        ranks: a multiple of each number of ranks that there may be.
        workers: a multiple of each number of workers of a rank that there may be.
        global_batch: samples in a batch of all ranks; a multiple of `ranks`. With batches of another size, files are
            read by more than one worker.
        shuffle: whether the files have a new order in every epoch.
        seed: as for `DefaultSampler`.
        round_up: as for `DefaultSampler`.
        shard: as for `DefaultSampler`.

    **Collective**: every rank, if `seed` is None.

    Raises:
        ConfigError: `global_batch` is no multiple of `ranks`, or there are fewer samples than ranks.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> data = FileDataset(["abcd", "efgh"], lengths=[4, 4], read=iter)
        >>> sampler = FileSampler(data, ranks=2, workers=1, global_batch=2, shuffle=False)
        >>> "".join(data[index] for index in sampler) == ("abcd", "efgh")[get_rank()]
        True
    """

    def __init__(
        self,
        dataset: Any,
        ranks: int,
        workers: int,
        global_batch: int,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, round_up, shard)
        for name, value in {"ranks": ranks, "workers": workers, "global_batch": global_batch}.items():
            require_count(name, value)
        if global_batch % ranks or ranks % self.world_size:
            raise ConfigError(
                f"`global_batch` must be a multiple of `ranks`, and that of {counted(self.world_size, 'rank')}, but "
                f"they are {global_batch} and {ranks} (rank {self.rank} of {self.world_size})"
            )
        self.lengths = np.asarray(dataset.lengths)
        self._split = ranks, workers, global_batch

    def order_of(self, epoch: int) -> Order:
        """Return the order of all samples in an epoch."""
        files: Order = unshuffled
        if self.shuffle:
            files = drawn(len(self.lengths), torch.Generator().manual_seed(self.seed + epoch))
        return FileOrder(self.lengths, files(np.arange(len(self.lengths))), *self._split)
