"""The shard of an iterable dataset for one rank and one worker, its batches, and their positions in the stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.errors import ConfigError


class Resumption(NamedTuple):
    """The position at which a pass resumes.

    Attributes:
        batches: number of batches of the pass that this rank has taken.
        workers: for each worker that made one of these batches, the position after its last one.
    """

    batches: int
    workers: Mapping[int, Mapping[str, Any]]


_BEGINNING = Resumption(0, {})


class StreamShard(IterableDataset[Any]):
    """The samples of an iterable dataset that belong to one rank, split over its workers.

    The stream is split over the ranks round-robin, as by `DefaultSampler`, and each rank's samples over its workers
    batch by batch. So the samples of a batch do not depend on the number of workers, and a global batch of a given size
    holds the same samples on any number of ranks.

    Every worker of every rank goes through the whole stream and keeps its own samples. If samples are expensive to
    make, give the dataset a method `split_over(part, parts)` that returns an iterable of part number `part` of `parts`;
    each worker then reads only its own part.

    Before each pass `set_epoch(epoch)` is called if the dataset has it. The dataset must yield the same order in every
    process: to shuffle, it must draw from a generator that it seeds with a fixed seed and the epoch.

    A dataset that has `state_dict` and `load_state_dict` resumes where it was saved. Its `state_dict` must describe the
    position after the last sample that it has yielded.

    Args:
        dataset: the whole stream.
        shard: this rank's shard and the number of shards.
        batch_size: samples in a batch.
        split: False for a dataset that splits itself over ranks and workers.
    """

    def __init__(self, dataset: Any, shard: tuple[int, int], batch_size: int, *, split: bool = True) -> None:
        self.dataset = dataset
        self.shard = shard
        self.batch_size = batch_size
        self._asks_for_parts = split and hasattr(dataset, "split_over")
        # Whether the samples are split here, and not by the dataset itself.
        self.deals_out = split and not self._asks_for_parts
        # Whether the dataset can report its position and resume there.
        self.has_position = all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict"))
        # In shared memory, so that persistent workers see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._resumption = _BEGINNING
        self._source: Any = dataset
        self._beginning: Any = None
        self._worker = 0
        self._taken = 0

    @property
    def metainfo(self) -> Any:
        """The `metainfo` of the dataset; None if it has none."""
        return getattr(self.dataset, "metainfo", None)

    @property
    def how(self) -> str:
        """How the stream is split, in words."""
        if self.deals_out:
            return "each goes through all samples and keeps its shard"
        return "by its split_over" if self._asks_for_parts else "by itself"

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._epoch.fill_(epoch)

    def resume(self, resumption: Resumption) -> None:
        """Choose where the next pass begins."""
        self._resumption = resumption

    def position(self) -> dict[int, dict[str, Any]]:
        """Return `{worker: state}` to resume after the last sample that it yielded; empty if the dataset can't."""
        if not self.has_position:
            return {}
        return {self._worker: {"taken": self._taken, "dataset": copy.deepcopy(self._source.state_dict())}}

    def __iter__(self) -> Iterator[Any]:
        # Persistent workers begin their next pass at its beginning.
        resumption, self._resumption = self._resumption, _BEGINNING
        info = get_worker_info()
        own, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # The loader asks worker 0 for the next batch; before the resumption another worker may have been next.
        self._worker = (own + resumption.batches) % workers
        self._begin(resumption.workers.get(self._worker), workers)
        for index, sample in enumerate(self._source, start=self._taken):
            self._taken = index + 1
            if self._is_own(index, workers):
                yield sample

    def _begin(self, position: Mapping[str, Any] | None, workers: int) -> None:
        """Open this worker's source at `position`, or at its beginning if that is None."""
        if self._asks_for_parts:
            self._set_epoch()
            rank, ranks = self.shard
            self._source = self.dataset.split_over(rank * workers + self._worker, ranks * workers)
        else:
            self._source = self.dataset
            if self.has_position:
                # It may still be where an earlier pass left it.
                if self._beginning is None:
                    self._beginning = copy.deepcopy(self.dataset.state_dict())
                self.dataset.load_state_dict(copy.deepcopy(self._beginning))
            self._set_epoch()
        self._taken = 0
        if position is not None:
            self._source.load_state_dict(position["dataset"])
            self._taken = position["taken"]

    def _set_epoch(self) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(int(self._epoch))

    def _is_own(self, index: int, workers: int) -> bool:
        if not self.deals_out:
            return True
        rank, ranks = self.shard
        return index % ranks == rank and index // ranks // self.batch_size % workers == self._worker


class StreamLoader(DataLoader[Any]):
    """A `DataLoader` over a `StreamShard`; it knows its position if the dataset does.

    Workers read ahead of the training. So each batch comes with the position of its worker right after it; for each
    worker, the position of the last batch that was used is saved.

    Args:
        dataset: this rank's shard.
        collate_fn: makes a batch from a list of samples, or from one sample if `batch_size` is None.
        **kwargs: further arguments of `DataLoader`.
    """

    dataset: StreamShard

    def __init__(self, dataset: StreamShard, collate_fn: Callable[[Any], Any], **kwargs: Any) -> None:
        self._position = self._resumption = _BEGINNING
        super().__init__(dataset, collate_fn=partial(_with_position, collate_fn, dataset), **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._position, self._resumption = self._resumption, _BEGINNING
        self.dataset.resume(self._position)
        for batch, made_by in super().__iter__():
            self._position = Resumption(self._position.batches + 1, {**self._position.workers, **made_by})
            yield batch
        self._position = _BEGINNING

    def __len__(self) -> int:
        """Return the number of batches that this rank sees in a pass, if the dataset has a length.

        Raises:
            TypeError: the dataset has no length, or splits itself.
        """
        whole = self.dataset.dataset
        if not isinstance(whole, Sized) or not self.dataset.deals_out:
            raise TypeError(f"the number of batches of {type(whole).__name__} is not known in advance")
        rank, ranks = self.dataset.shard
        samples, size = len(range(rank, len(whole), ranks)), self.dataset.batch_size
        return samples // size if self.drop_last else -(-samples // size)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in its pass, after the last batch that was taken."""
        return {"batches": self._position.batches, "workers": dict(self._position.workers), "layout": self._layout()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass at a position that `state_dict` returned.

        Raises:
            ValueError: it was saved with another rank, number of ranks, number of workers or batch size.
        """
        if state_dict["layout"] != self._layout():
            raise ValueError(
                f"[rank, ranks, workers, batch size] must be {state_dict['layout']}, as they were saved, but are "
                f"{self._layout()}"
            )
        self._position = self._resumption = Resumption(state_dict["batches"], dict(state_dict["workers"]))

    def _layout(self) -> list[int]:
        return [*self.dataset.shard, max(1, self.num_workers), self.dataset.batch_size]


def check_split(dataset: Any, split: bool | None, parts: int, ranks: int) -> bool:
    """Return whether lockstep must split the samples of an iterable dataset over `parts` parts.

    Raises:
        ConfigError: the dataset calls `get_worker_info`, so it seems to split itself over workers, but it is not known
            whether it also does so over ranks.
    """
    if split is not None or hasattr(dataset, "split_over"):
        return split is not False
    asks = "get_worker_info" in getattr(getattr(type(dataset).__iter__, "__code__", None), "co_names", ())
    if asks and ranks > 1:
        raise ConfigError(
            f"`split` must be given beside the `dataset`, because {type(dataset).__name__}.__iter__ calls "
            f"get_worker_info: False if it splits itself between {ranks} ranks and their workers; True if each of the "
            f"{parts} is to get a shard of what it yields"
        )
    return not asks


def _with_position(collate_fn: Callable[[Any], Any], dataset: StreamShard, samples: Any) -> tuple[Any, Any]:
    """Make a batch, in the process that makes the samples, and add the position of the dataset."""
    info = get_worker_info()
    made_by: Any = dataset if info is None else info.dataset  # in a worker: the worker's own copy
    return collate_fn(samples), made_by.position()
