"""The shard of an iterable dataset for one rank and one worker, its batches, and their positions in the stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.errors import ConfigError


class Begin(NamedTuple):
    """Where a pass begins.

    Attributes:
        position: samples of the stream that lie before, on all ranks together.
        furthest: a state of the stream at or before that position; None for its beginning. It holds for every rank and
            worker, as each goes through the whole stream.
        batches: for a stream that splits itself, the number of batches of the pass that this rank has taken.
        workers: for such a stream, the position of each worker that made one of these batches, by its number.
    """

    position: int = 0
    furthest: Mapping[str, Any] | None = None
    batches: int = 0
    workers: Mapping[str, Mapping[str, Any]] = {}


_BEGINNING = Begin()


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

    A dataset that has `state_dict` and `load_state_dict` resumes where it was saved, on any number of ranks and
    workers. Its `state_dict` must describe the position after the last sample that it has yielded. Without them, the
    samples up to there are made again and discarded.

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
        self._begin = _BEGINNING
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

    def begin_at(self, begin: Begin) -> None:
        """Choose where the next pass begins."""
        self._begin = begin

    def position(self) -> dict[str, dict[str, Any]]:
        """Return `{worker: state}` to resume after the last sample that it yielded; empty if the dataset can't."""
        if not self.has_position:
            return {}
        return {str(self._worker): {"taken": self._taken, "dataset": copy.deepcopy(self._source.state_dict())}}

    def __iter__(self) -> Iterator[Any]:
        # Persistent workers begin their next pass at its beginning.
        begin, self._begin = self._begin, _BEGINNING
        info = get_worker_info()
        own, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # The loader asks worker 0 for the next batch; in a stream that splits itself, another one may have its turn.
        self._worker = (own + begin.batches) % workers
        self._open(begin.furthest if self.deals_out else begin.workers.get(str(self._worker)), workers)
        samples = iter(self._source)
        # Now, as what makes them may draw random numbers, which the training does not continue with.
        for _ in islice(samples, max(0, begin.position - self._taken)):
            self._taken += 1
        return self._own(samples, begin.position, workers)

    def _own(self, samples: Iterator[Any], begin: int, workers: int) -> Iterator[Any]:
        for index, sample in enumerate(samples, start=self._taken):
            self._taken = index + 1
            if self._is_own(index - begin, workers):
                yield sample

    def _open(self, position: Mapping[str, Any] | None, workers: int) -> None:
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
            self._source.load_state_dict(copy.deepcopy(position["dataset"]))
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
        self._begin = self._at = _BEGINNING
        super().__init__(dataset, collate_fn=partial(_with_position, collate_fn, dataset), **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._at, self._begin = self._begin, _BEGINNING
        self.dataset.begin_at(self._at)
        return self._noting(super().__iter__())

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch, made_by in batches:
            batches_taken, workers = self._at.batches + 1, {**self._at.workers, **made_by}
            self._at = self._at._replace(batches=batches_taken, workers=workers)
            yield batch
        self._at = _BEGINNING

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

    def begin_at(self, position: int, states: Sequence[Mapping[str, Any]] = ()) -> None:
        """Let the next pass begin inside the stream, which is split from there on.

        Args:
            position: samples of the stream that lie before, on all ranks together.
            states: states of ranks that had gone so far; the one that is nearest to `position` is used.
        """
        known = [one for state in states for one in state["workers"].values() if one["taken"] <= position]
        self._at = self._begin = Begin(position, max(known, key=lambda one: int(one["taken"]), default=None))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in its pass, after the last batch that was taken."""
        workers, furthest = dict(self._at.workers), self._at.furthest
        if self.dataset.deals_out:
            known = [*workers.items(), *([] if furthest is None else [("0", furthest)])]
            workers = dict(sorted(known, key=lambda one: int(one[1]["taken"]))[-1:])
        return {
            "begin": self._at.position, "batches": self._at.batches, "workers": workers, "layout": self._layout()
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass at a position that `state_dict` returned.

        Raises:
            ValueError: the stream splits itself, and it was saved with another rank, number of ranks, number of workers
                or batch size.
        """
        layout, batches = list(state_dict["layout"]), state_dict["batches"]
        if self.dataset.deals_out:
            _, ranks, _, batch_size = layout
            self.begin_at(state_dict.get("begin", 0) + batches * batch_size * ranks, [state_dict])
            return
        if layout != self._layout():
            raise ValueError(
                f"[rank, ranks, workers, batch size] must be {layout}, as they were saved, but are {self._layout()}"
            )
        workers = {str(worker): state for worker, state in state_dict["workers"].items()}
        self._at = self._begin = Begin(batches=batches, workers=workers)

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
