"""The shard of an iterable dataset for one rank and one worker, its batches, and their positions in the stream."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.dataset.random_state import mixed_seed, portable, seed_generators, separate_random_state, set_random_state
from lockstep.dataset.sampler import HEAD_LENGTH, is_other
from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.transport.moving import is_dense_on_host
from lockstep.tree import tree_map

_MOST_COMPARED = 64  # values and letters of a sample
_RARELY_CHANGED = ("str", "bytes", "int", "int16", "int32", "int64")
_OFTEN_CHANGED = ("float", "float16", "bfloat16", "float32", "float64", "uint8")
_NO_SAMPLE = object()  # fills the batch of a worker whose turn has not come yet


def _pinned(leaf: Any) -> Any:
    can_pin = hasattr(leaf, "pin_memory") and (not isinstance(leaf, Tensor) or is_dense_on_host(leaf))
    return leaf.pin_memory() if can_pin else leaf


class _Made(NamedTuple):
    """A batch, its number of samples, the position of the worker that made it, and the first samples of its stream."""

    batch: Any
    samples: int | None
    positions: dict[str, bytes]
    head: list[int]

    def pin_memory(self) -> _Made:
        """Pin the batch alone, as torch's loader does with `pin_memory`."""
        return self._replace(batch=tree_map(_pinned, self.batch))


class Begin(NamedTuple):
    """Where a pass begins.

    Attributes:
        position: samples of the stream that lie before, on all ranks together.
        furthest: a state of the stream at or before that position; None for its beginning. It holds for every rank and
            worker, as each goes through the whole stream.
        batches: the number of batches that this rank has taken since; a stream that splits itself begins after these.
        workers: the position of each worker that made one of these batches, by its number; pickled until it is needed.
        turn: the number of the worker after the one that made the last of them.
    """

    position: int = 0
    furthest: Mapping[str, Any] | None = None
    batches: int = 0
    workers: Mapping[str, Any] = {}
    turn: int = 0


_BEGINNING = Begin()


class StreamShard(IterableDataset[Any]):
    """The samples of an iterable dataset that belong to one rank, split over its workers.

    The stream is split over the ranks round-robin, as by `DefaultSampler`, and each rank's samples over its workers
    batch by batch. So the samples of a batch do not depend on the number of workers, and a global batch of a given size
    holds the same samples on any number of ranks.

    Every worker of every rank goes through the whole stream and keeps its own samples. If samples are expensive to
    make, give the dataset a method `split_over(part, parts)` that returns an iterable of part number `part` of `parts`;
    each worker then reads only its own part.

    Before each pass `set_epoch(epoch)` is called if the dataset has it: in the process that trains, then in each of its
    workers. The dataset must yield the same order in every process. While it makes its samples, the global generators
    of torch (CPU), Python and numpy have a separate state, which `seed` and the epoch determine; so it may shuffle by
    these, or by a generator that it seeds with a fixed seed and the epoch. All parts that `split_over` returns begin
    with the same state.

    A dataset that has `state_dict` and `load_state_dict` resumes where it was saved, on any number of ranks and
    workers. Its `state_dict` must describe the position after the last sample that it has yielded. Without them, the
    samples up to there are made again and discarded.

    Args:
        dataset: the whole stream.
        shard: this rank's shard and the number of shards.
        batch_size: samples in a batch.
        split: False for a dataset that splits itself over ranks and workers; `"ranks"` for one that splits itself over
            its workers, of which each is split over the ranks here.
        seed: seed of the random numbers that the dataset draws, the same on every rank.

    Attributes:
        splits_samples: whether the samples are split here alone, and not by the dataset.
        has_position: whether the dataset, or its part, can say where it is, and go on from there.
        compares: whether ranks and workers compare the first samples of each pass, of which they must make the same:
            integers and strings in them, or where there are none, floats. Not for a dataset that splits itself.
    """

    def __init__(
        self,
        dataset: Any,
        shard: tuple[int, int],
        batch_size: int,
        *,
        split: bool | str = True,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.shard = shard
        self.batch_size = batch_size
        # Of these three, one is true at most; none is if the dataset splits itself over ranks and workers.
        self._asks_for_parts = split is True and hasattr(dataset, "split_over")
        self.splits_samples = split is True and not self._asks_for_parts
        self._splits_over_ranks = split == "ranks"
        self.compares = self.splits_samples or self._splits_over_ranks
        self.has_position = _says_where_it_is(dataset)
        # In shared memory, so that persistent workers see it change.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._begin = _BEGINNING
        self._seed = seed
        self._random: dict[str, Any] = {}  # what the dataset's samples are drawn from
        self._head: list[int] = []
        self._source: Any = dataset  # or this worker's part of it
        self._beginning: Any = None  # the dataset's state before its first pass
        self._worker = 0
        self._taken = 0  # samples of the source, since its beginning

    @property
    def metainfo(self) -> Any:
        """The `metainfo` of the dataset; None if it has none."""
        return getattr(self.dataset, "metainfo", None)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._epoch.fill_(epoch)

    def begin_at(self, begin: Begin) -> None:
        """Choose where the next pass begins."""
        self._begin = begin

    def position(self) -> dict[str, bytes]:
        """Return `{worker: state}` to resume after the last sample that it yielded; empty if the dataset can't.

        Raises:
            ConfigError: the state of the dataset can't be pickled.
        """
        if not self.has_position:
            return {}
        state = {"taken": self._taken, "dataset": self._source.state_dict(), "random": self._random}
        try:  # here: a worker would end neither with an error nor with the batch
            return {str(self._worker): pickle.dumps(state)}
        except Exception as error:
            raise ConfigError(
                f"`state_dict` of {type(self._source).__name__} must return what a checkpoint can hold, but has "
                f"what can't be pickled: {error}. Leave it out; or the method, to have the samples made again"
            ) from error

    @property
    def head(self) -> list[int]:
        """Checksums of the first samples of this pass, as far as they are made; see `compares`."""
        return list(self._head)

    def __iter__(self) -> Iterator[Any]:
        begin, self._begin = self._begin, _BEGINNING  # where a worker that lives on begins its next pass
        info = get_worker_info()
        own, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._worker = own
        self._head, self._random = [], {}
        state = begin.furthest if self.splits_samples else begin.workers.get(str(own))
        # The loader asks worker 0 first. Where a stream that splits itself goes on, it may be a later one's turn: until
        # then the others answer with a batch that is left out.
        waits = own < begin.turn % workers
        left_out = [_NO_SAMPLE] * (self.batch_size if waits else 0)
        if not self.compares and not self._asks_for_parts:
            self._open(state, workers)
            return chain(left_out, self._whole(iter(self._source)))
        with separate_random_state(self._random):
            seed_generators(mixed_seed(self._seed, int(self._epoch)))
            self._open(state, workers)
            samples = islice(self._source, None)  # each loop over it goes on; one over a dataset might begin anew
            # The source is at a saved position, or at the beginning. What lies between that and `begin` is discarded.
            for sample in islice(samples, max(0, begin.position - self._taken)):
                self._count(sample)
        return chain(left_out, self._samples_of_shard(samples, begin.position, workers))

    def _whole(self, samples: Iterator[Any]) -> Iterator[Any]:
        for sample in samples:
            self._taken += 1
            yield sample

    def _samples_of_shard(self, samples: Iterator[Any], begin: int, workers: int) -> Iterator[Any]:
        is_over = False
        while not is_over:
            batch: list[Any] = []
            with separate_random_state(self._random):
                for sample in samples:
                    self._count(sample)
                    if self._is_in_shard(self._taken - 1 - begin, workers):
                        batch.append(sample)
                        if len(batch) == self.batch_size:
                            break
                else:
                    is_over = True
            yield from batch

    def _count(self, sample: Any) -> None:
        """Count a sample of the source, and note its checksum if it is one of the first."""
        self._taken += 1
        # Where workers split the stream themselves, each has other samples: worker 0 speaks for its rank. A source that
        # begins inside the stream has none of the first ones.
        is_alike = self.splits_samples or (self._splits_over_ranks and self._worker == 0)
        if is_alike and len(self._head) == self._taken - 1 < HEAD_LENGTH:
            kinds = (_RARELY_CHANGED, _OFTEN_CHANGED)  # by augmentation; the latter where there is nothing else
            values = next(filter(None, (list(islice(_values_in(sample, one), _MOST_COMPARED)) for one in kinds)), [])
            self._head.append(crc32(repr(values).encode()))

    def _open(self, position: Mapping[str, Any] | None, workers: int) -> None:
        """Open this worker's source at `position`, or at its beginning if that is None."""
        if self._asks_for_parts:
            self.tell_epoch()
            rank, ranks = self.shard
            self._source = self.dataset.split_over(rank * workers + self._worker, ranks * workers)
            self.has_position = _says_where_it_is(self._source)
        else:
            self._source = self.dataset
            if self.has_position:
                # It may still be where an earlier pass left it.
                if self._beginning is None:
                    self._beginning = copy.deepcopy(self.dataset.state_dict())
                self.dataset.load_state_dict(copy.deepcopy(self._beginning))
            self.tell_epoch()
        self._taken = 0
        if position is not None:
            self._source.load_state_dict(copy.deepcopy(position["dataset"]))
            self._taken = position["taken"]
            if "random" in position:
                set_random_state(position["random"])

    def tell_epoch(self) -> None:
        """Let the dataset know the epoch, if it has `set_epoch`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(int(self._epoch))

    def _is_in_shard(self, index: int, workers: int) -> bool:
        if self._asks_for_parts:
            return True
        rank, ranks = self.shard
        is_workers = self._splits_over_ranks or index // ranks // self.batch_size % workers == self._worker
        return index % ranks == rank and is_workers


class StreamLoader(DataLoader[Any]):
    """A `DataLoader` over a `StreamShard`; it knows its position if the dataset does.

    Workers read ahead of the training. So each batch comes with the position of its worker right after it; for each
    worker, the position of the last batch that was used is saved.

    Args:
        dataset: this rank's shard.
        collate_fn: makes a batch from a list of samples, or from one sample if `batch_size` is None.
        **kwargs: further arguments of `DataLoader`.

    Attributes:
        head: checksums of the first samples of this pass, of which all ranks and workers must make the same; empty if
            the dataset splits itself, or begins inside the stream.
        samples: the number of samples in the last batch; None if samples are not put into batches.
    """

    dataset: StreamShard

    def __init__(self, dataset: StreamShard, collate_fn: Callable[[Any], Any], **kwargs: Any) -> None:
        self._begin = self._at = _BEGINNING
        self.head: list[int] = []
        self.samples: int | None = None
        in_batches = kwargs.get("batch_size", 1) is not None
        super().__init__(dataset, collate_fn=partial(_with_position, collate_fn, dataset, in_batches), **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._begin is not _BEGINNING:
            end_workers(self)  # those that live on can't be told where to begin
        self._at, self._begin, self.head = self._begin, _BEGINNING, []
        self.dataset.begin_at(self._at)
        if self.num_workers:
            # Each worker tells it, too. HuggingFace's streams have it in memory that all of them share, and add to it
            # what is missing (datasets 5.2): two workers that begin at once would add it twice.
            self.dataset.tell_epoch()
        return self._tracked(super().__iter__())

    def _tracked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and keep `samples`, `head` and the position up to date with each."""
        head: list[int] = []
        for made in batches:
            if made is None:  # it was not this worker's turn
                continue
            batch, self.samples, positions, worker_head = made
            if is_other(worker_head, head):
                raise streams_differ(self.dataset.dataset, "between its workers")
            head = self.head = max(head, worker_head, key=len)
            self._at = self._at._replace(
                batches=self._at.batches + 1,
                workers={**self._at.workers, **positions},
                turn=max((int(worker) + 1 for worker in positions), default=0),  # there is one, or none if it can't say
            )
            yield batch
        self._at = _BEGINNING

    def __len__(self) -> int:
        """Return the number of batches that this rank sees in a pass, if the dataset has a length.

        Raises:
            TypeError: the dataset has no length, or splits itself.
        """
        whole = self.dataset.dataset
        if not isinstance(whole, Sized) or not self.dataset.splits_samples:
            raise TypeError(
                f"the number of batches of {type(whole).__name__} is not known in advance: "
                + ("it splits itself" if isinstance(whole, Sized) else "it has no `__len__`")
                + ". Count iterations, as with `max_iters`, or go on until the loader ends"
            )
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
        workers, furthest = {worker: _read(state) for worker, state in self._at.workers.items()}, self._at.furthest
        if self.dataset.splits_samples:
            known = [*workers.items(), *([] if furthest is None else [("0", furthest)])]
            workers = dict(sorted(known, key=lambda one: int(one[1]["taken"]))[-1:])
        at = self._at
        return {
            "begin": at.position, "batches": at.batches, "workers": workers, "turn": at.turn, "layout": self._layout()
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass at a position that `state_dict` returned.

        Raises:
            ValueError: the stream splits itself, and it was saved with another rank, number of ranks, number of workers
                or batch size, or could not say where it was.
        """
        layout, batches = list(state_dict["layout"]), state_dict["batches"]
        if self.dataset.splits_samples:
            _, ranks, _, batch_size = layout
            self.begin_at(state_dict["begin"] + batches * batch_size * ranks, [state_dict])
            return
        if layout != self._layout():
            raise ValueError(
                f"[rank, ranks, workers, batch size] must be {layout}, as they were saved, but are {self._layout()}. "
                "Use as many of each, or begin the pass anew"
            )
        if batches and not state_dict["workers"]:
            raise ValueError(
                f"the state after {batches} batches must say where each worker was, but does not: "
                f"{type(self.dataset.dataset).__name__}, or what its `split_over` returns, can't. Give it `state_dict` "
                "and `load_state_dict`, or take and discard as many batches"
            )
        workers = {str(worker): state for worker, state in state_dict["workers"].items()}
        self._at = self._begin = Begin(batches=batches, workers=workers, turn=state_dict["turn"])

    def _layout(self) -> list[int]:
        return [*self.dataset.shard, max(1, self.num_workers), self.dataset.batch_size]


def _read(state: Mapping[str, Any] | bytes) -> Mapping[str, Any]:
    """Return what `StreamShard.position` has pickled for one worker; a state that was read before as it is."""
    if not isinstance(state, bytes):
        return state
    read: dict[str, Any] = pickle.loads(state)
    random = read.pop("random")
    return {**read, "random": portable(random)} if random else read


def end_workers(loader: Any) -> None:
    """End the workers of a loader that keeps them from pass to pass; the next pass starts others."""
    if (iterator := getattr(loader, "_iterator", None)) is not None:
        getattr(iterator, "_shutdown_workers", lambda: None)()  # torch ends them in no public way (2.13)
        loader._iterator = None


def _says_where_it_is(dataset: Any) -> bool:
    """Return whether a dataset can go on from its `state_dict()`.

    That must say all, and needs no arguments, as some packages' loaders give.
    """
    try:
        inspect.signature(dataset.state_dict).bind()
    except (AttributeError, TypeError, ValueError):
        return False
    return hasattr(dataset, "load_state_dict") and not _forgets_a_buffer(dataset)


def _forgets_a_buffer(part: Any) -> bool:
    """Return whether a stream of HuggingFace's datasets shuffles in a buffer, which its state leaves out (5.2).

    No public attribute says so; tests/data_packages resumes such a stream.
    """
    if type(part).__name__.startswith("BufferShuffled"):
        return True
    inner = [getattr(part, name, None) for name in ("_ex_iterable", "ex_iterable")]
    return any(map(_forgets_a_buffer, [one for one in [*inner, *getattr(part, "ex_iterables", ())] if one is not None]))


def streams_differ(dataset: Any, where: str) -> ConfigError:
    """Return the error for a stream that is not the same in all processes."""
    return ConfigError(
        f"{type(dataset).__name__} must yield the same samples in the same order on each rank and in each worker, "
        f"which keep their own part of them, but its first samples differ {where} (rank {get_rank()} of "
        f"{get_world_size()}). If it splits itself over ranks and workers, give `split=False` beside the `dataset`; if "
        "over workers alone, `split='ranks'`. Else seed its shuffling with a fixed seed and the epoch, and let it draw "
        "all else by the global generators of torch, Python or numpy, which are seeded alike"
    )


def _values_in(sample: Any, kinds: Collection[str]) -> Iterator[Any]:
    """Yield the beginning of each value of these kinds in a sample: of a tensor or an array, the kind is its dtype."""
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, list | tuple):
        for item in sample[:_MOST_COMPARED]:
            yield from _values_in(item, kinds)
    elif isinstance(sample, Tensor | np.ndarray | np.generic):
        can_be_read = not isinstance(sample, Tensor) or is_dense_on_host(sample)
        if can_be_read and str(sample.dtype).removeprefix("torch.") in kinds:
            yield sample.reshape(-1)[:_MOST_COMPARED].tolist()
    elif type(sample).__name__ in kinds:
        yield sample[:_MOST_COMPARED] if isinstance(sample, str | bytes) else sample


def _with_position(collate_fn: Callable[[Any], Any], dataset: Any, in_batches: bool, samples: Any) -> _Made | None:
    """Make a batch, in the process that makes the samples, with the dataset's position; None for a turn left out."""
    if samples is _NO_SAMPLE or (in_batches and samples[0] is _NO_SAMPLE):
        return None
    info = get_worker_info()
    stream: Any = dataset if info is None else info.dataset  # in a worker: the worker's own copy
    return _Made(collate_fn(samples), len(samples) if in_batches else None, stream.position(), stream.head)
