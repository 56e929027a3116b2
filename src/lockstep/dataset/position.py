"""How far a pass through a loader is, how much it yields, and how it begins at any position.

A pass has one global order, which depends only on the seed and the epoch, and which the ranks share out: where that is
known (`global_order_of`), a position in it says what every rank has taken, and any number of ranks can go on from it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple
from weakref import finalize

from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset, Subset

from lockstep.dataset.loader import drawn_from, is_torchs, with_parts, with_sampler
from lockstep.dataset.random_state import seed_transforms, set_random_state
from lockstep.dataset.sampler import (
    DefaultSampler,
    InfiniteSampler,
    ShardedSampler,
    ShardingSampler,
    WorkerSeeds,
    is_other,
    length_of,
)
from lockstep.dataset.stream import StreamLoader, end_workers, streams_differ
from lockstep.dataset.waiting import Wait
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.tree import is_tensordict

ENDLESS = 2**62
"""Stands for an endless number of samples."""
_logger = logging.getLogger(__name__)

# Samplers that yield as many indices as their length says.
_RELIABLE = (
    DefaultSampler,
    InfiniteSampler,
    data.DistributedSampler,
    data.RandomSampler,
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    list,
    tuple,
    range,
)


@dataclass(frozen=True, eq=False)
class Position:
    """Where a pass through a loader begins, and what was saved there; `batches_from` makes an iterator of it.

    Attributes:
        batches: number of batches before it on each rank; among them those before a resume, on other ranks or of other
            sizes.
        items: number of items of the global order before it, on all ranks together; None if no such order is known.
        head: the first items of that order, or checksums of them. If the order begins otherwise, a warning says so.
        loader_state: the loader's own state on this rank; see `loader_state`.
        stream_states: for a stream, the states of loaders of any ranks.
        random: the state of the random generators, which they are given once the loader is there.
    """

    batches: int = 0
    items: int | None = None
    head: Sequence[int] = ()
    loader_state: Any = None
    stream_states: Sequence[Mapping[str, Any]] = ()
    random: Mapping[str, Any] | None = None

    @property
    def is_beginning(self) -> bool:
        """Whether nothing lies before it."""
        return not (self.batches or self.items)


BEGINNING = Position()


def certain_amount(loader: Any) -> tuple[int, int, bool] | None:
    """Return how many samples a pass through `loader` yields on this rank, its batch size and `drop_last`.

    It is None where that is not certain: for all but a torch `DataLoader` over a map-style dataset with torch's own
    `BatchSampler` and with a sampler of torch or lockstep. The length of a user's own sampler may be wrong, and a
    subclass of `DataLoader` with an `__iter__` of its own may leave out batches; torchdata's does not.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader).__iter__.__module__.partition(".")[0] not in ("torch", "torchdata", "lockstep"):
        return None
    batches = loader.batch_sampler
    if type(batches) is not data.BatchSampler:
        return None
    drawn = batches.sampler.sampler if type(batches.sampler) is ShardedSampler else batches.sampler
    if type(drawn) not in _RELIABLE or not isinstance(batches.sampler, Sized | InfiniteSampler):
        return None
    samples = len(batches.sampler) if isinstance(batches.sampler, Sized) else ENDLESS
    return samples, batches.batch_size, batches.drop_last


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first part.

    Example:
        >>> import torch
        >>> batch_size_of({"img": torch.ones(3, 8), "label": torch.ones(3)}), batch_size_of([["a", "b"], [1, 2]])
        (3, 2)
    """
    if isinstance(batch, Mapping | list | tuple) and not is_tensordict(batch):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch), None)
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, str) else 1


class GlobalOrder(NamedTuple):
    """The order of the items of an epoch on all ranks together, and how it is split over them.

    Item i of the order goes to shard i modulo `shards`, and `batch_size` items of a shard make a batch. So a position
    in the order says what every rank has taken.

    Attributes:
        unit: what the items are: `"samples"`, or `"batches"` of a batch sampler.
        shards: the number of shards.
        batch_size: items in a batch of one shard.
        total: number of items in an epoch; None if it is not known.
        drop_last: whether a batch that is not full is left out.
        round_up: whether items are repeated until every shard has equally many.
        is_endless: whether a pass goes on with the next epoch's order instead of ending.
    """

    unit: str
    shards: int
    batch_size: int
    total: int | None
    drop_last: bool = False
    round_up: bool = False
    is_endless: bool = False

    @property
    def global_batch(self) -> int:
        """Items in a batch of all shards."""
        return self.shards * self.batch_size

    def batches_after(self, position: int) -> int | None:
        """Return the number of batches after `position`, on the shard that has most; None if that is not known.

        Example:
            >>> GlobalOrder("samples", shards=2, batch_size=3, total=16).batches_after(6)
            2
        """
        if self.total is None or self.is_endless:
            return None
        share = self.share(position, 0)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)

    def share(self, position: int, shard: int) -> int:
        """Return how many items a shard has after `position`; `total` must be known.

        Example:
            >>> order = GlobalOrder("samples", shards=2, batch_size=3, total=15)
            >>> [order.share(6, shard) for shard in (0, 1)]
            [5, 4]
        """
        if self.is_endless:
            return ENDLESS
        left = max(0, (self.total or 0) - position)
        return -(-left // self.shards) if self.round_up else len(range(shard, left, self.shards))

    def size_of(self, index: int, share: int) -> int:
        """Return how many of the `share` items of a shard are in its batch `index`; 0 after the last batch.

        Example:
            >>> order = GlobalOrder("samples", shards=2, batch_size=2, total=10)
            >>> [order.size_of(index, 5) for index in range(4)]
            [2, 2, 1, 0]
        """
        size = max(0, min(self.batch_size, share - index * self.batch_size))
        return 0 if self.drop_last and size < self.batch_size else size


def global_order_of(loader: Any) -> GlobalOrder | None:
    """Return how the global order of a loader is split over the ranks; None if there is none, or if it is not known.

    It is known for samplers of lockstep, for torch's `DistributedSampler` if that drops nothing, and for iterable
    datasets that lockstep splits sample by sample.
    """
    if isinstance(loader, StreamLoader):
        shard = loader.dataset
        if not shard.splits_samples:
            return None
        return GlobalOrder("samples", shard.shard[1], shard.batch_size, length_of(shard.dataset), loader.drop_last)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler, batch_size = drawn_from(loader)
    batches = loader.batch_sampler
    unit = "samples" if batches is None or is_torchs(batches, data.BatchSampler) else "batches"
    drop_last = unit == "samples" and getattr(batches, "drop_last", False)
    # A user's subclass with an `__iter__` of its own can't begin inside its order.
    if isinstance(sampler, ShardingSampler) and type(sampler).__iter__.__module__.startswith("lockstep."):
        drawn = getattr(sampler, "sampler", None)  # of a ShardedSampler
        total = getattr(sampler, "size", None) if drawn is None else length_of(drawn)
        is_endless = isinstance(sampler, InfiniteSampler)
        return GlobalOrder(unit, sampler.world_size, batch_size, total, drop_last, sampler.round_up, is_endless)
    if type(sampler) is data.DistributedSampler and not sampler.drop_last:
        return GlobalOrder(unit, sampler.num_replicas, batch_size, length_of(sampler.dataset), drop_last, round_up=True)
    return None


def deals_batches(loader: Any) -> bool:
    """Return whether the ranks take whole batches in turns, as those of a user's batch sampler, not samples."""
    order = global_order_of(loader)
    return order is not None and (order.unit == "batches" or loader.batch_sampler is None)  # or the sampler draws them


class CountedBatches:
    """An iterator over the batches of a loader, which knows how many samples were put into each.

    A `DataLoader` of a map-style dataset counts the indices that its sampler has drawn for the batch, and a
    `StreamLoader` the samples that it has collated. Of others it is not known.

    Args:
        loader: the loader.
        drawn: the `drawn` of the pass before, from which workers that the loader has kept go on drawing.

    Attributes:
        samples: the number of samples in the last batch; None if it is not known.
        indices: the indices of these samples in the dataset; None if they are not known.
        drawn: what is drawn for the batches. It does not hold the iterator, whose workers end with the last reference.
    """

    def __init__(self, loader: Any, drawn: Drawn | None = None) -> None:
        self.samples: int | None = None
        self.indices: Sequence[Any] | None = None
        self.drawn: Drawn | None = None
        self._loader = loader
        name = "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
        draws = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not (draws and type(loader).__iter__ is DataLoader.__iter__ and getattr(loader, "in_order", True)):
            self._batches = iter(loader)
            return
        sampler = getattr(loader, name)
        self.drawn = drawn if drawn is not None and drawn.sampler is sampler else Drawn(sampler)
        vars(loader)[name] = self.drawn  # torch allows no other way
        try:
            self._batches = iter(loader)
        finally:
            vars(loader)[name] = sampler

    @cached_property
    def _wait(self) -> Wait:
        wait = Wait(self._loader)
        finalize(self, wait.ended.set)
        return wait

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            with self._wait:
                batch = next(self._batches)
        except BaseException:  # also at the end
            self._wait.ended.set()
            raise
        if self.drawn is not None:
            self.indices = self.drawn.items.popleft() if self.drawn.items else None
            self.samples = None if self.indices is None else len(self.indices)
        elif isinstance(self._loader, StreamLoader):
            self.samples = self._loader.samples
        return batch

    def shut_down(self) -> None:
        """End the loader's workers after an error, if it has some, and does not keep them for the next pass.

        Else they live as long as the error is held, and then take torch five seconds each to end.
        """
        if not getattr(self._loader, "persistent_workers", False):
            getattr(self._batches, "_shutdown_workers", lambda: None)()  # they end in no public way (2.13)


class Drawn:
    """What a sampler draws for each batch; `items` are the indices of batches that the loader has not delivered yet."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.items: deque[Sequence[Any] | None] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.items.clear()
        for drawn in self.sampler:
            self.items.append(drawn if isinstance(drawn, list | tuple) else None)
            yield drawn

    def __len__(self) -> int:
        return len(self.sampler)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader which epoch begins: its worker seeds, and its first sampler and its datasets with `set_epoch`.

    Without workers, transforms that have generators of their own are seeded here; see `seed_transforms`.

    Workers that live across epochs have datasets of their own; so they are ended if a dataset has `set_epoch`, except
    for streams that lockstep splits, and the loader starts others.
    """
    if isinstance(seeds := getattr(loader, "generator", None), WorkerSeeds):
        seeds.set_epoch(epoch)
        if getattr(loader, "num_workers", None) == 0:
            seed_transforms(loader.dataset, seeds.initial_seed())
    if _set_epoch_of(getattr(loader, "dataset", None), epoch) and not isinstance(loader, StreamLoader):
        end_workers(loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            return


def batches_from(loader: Any, begin: Position = BEGINNING, drawn: Drawn | None = None) -> CountedBatches:
    """Return the batches of one pass that begins at a position.

    What lies before is not read, except from loaders that can't begin elsewhere: their batches are discarded.

    Args:
        loader: the loader.
        begin: the position.
        drawn: the `drawn` of the pass before; see `CountedBatches`.
    """
    if begin.is_beginning and begin.random is not None:  # now, since to begin a pass may draw a number
        set_random_state(begin.random)
    discarded = 0
    if begin.items:
        loader = begun_at(loader, begin.items, begin.head, begin.stream_states)
    elif begin.items is None and begin.batches and not restore_loader_state(loader, begin.loader_state):
        shortened = without_batches(loader, begin.batches)
        if shortened is None:
            discarded = begin.batches
            dataset = getattr(loader, "dataset", None)
            _logger.warning(
                "%d batches of %s are read and discarded, to go on after them. Datasets with state_dict and "
                "load_state_dict can do without, and samplers that can skip",
                discarded, type(getattr(dataset, "dataset", dataset) or loader).__name__,
            )  # fmt: skip
        else:
            loader = shortened
    batches = CountedBatches(loader, drawn)
    next(islice(batches, discarded, discarded), None)
    if not begin.is_beginning and begin.random is not None:
        set_random_state(begin.random)
    return batches


def begun_at(
    loader: Any, position: int, head: Sequence[int] = (), states: Sequence[Mapping[str, Any]] = ()
) -> DataLoader[Any]:
    """Return a loader whose next pass begins inside the global order of `loader`, which is not read up to there.

    Only a stream that can't say where it is makes the samples up to there, and discards them.

    Args:
        loader: a loader that `global_order_of` knows.
        position: number of items of the order that lie before, on all ranks together.
        head: what `head_of` returned in the run that is resumed.
        states: for a stream, what `loader_state` returned on ranks of that run.

    Returns:
        `loader`, or a copy of it for this one pass.
    """
    if isinstance(loader, StreamLoader):
        if not loader.dataset.has_position:
            stream = loader.dataset.dataset
            remedy = "A dataset with state_dict and load_state_dict can do without"
            if hasattr(stream, "load_state_dict"):
                remedy = "Its state would leave out what a shuffle buffer holds; a stream that has none can do without"
            _logger.warning(
                "%d samples of %s are made again and discarded, to go on after them. %s",
                position, type(stream).__name__, remedy,
            )  # fmt: skip
        loader.begin_at(position, states)
        return loader
    sampler, _ = drawn_from(loader)
    if isinstance(sampler, ShardingSampler):
        sampler.begin_at(position, head)
        return loader  # type: ignore[no-any-return]
    # Torch's DistributedSampler draws the same orders as a DefaultSampler with its seed that computes none.
    shard = sampler.rank, sampler.num_replicas
    dealing = DefaultSampler(sampler.dataset, sampler.shuffle, sampler.seed, shard=shard, computed=False)
    dealing.set_epoch(sampler.epoch)
    dealing.begin_at(position, head)
    return with_sampler(loader, dealing)


def head_of(loader: Any, epoch: int = 0) -> list[int]:
    """Return the first items of the present epoch's global order, or checksums of them, to know it again by."""
    sampler, _ = drawn_from(loader)
    return sampler.head_of(epoch) if isinstance(sampler, ShardingSampler) else []


def check_alike(loader: Any) -> None:
    """Raise a `ConfigError` on every rank if the ranks, which split the same order, have begun this pass differently.

    **Collective**: every rank. **Cost**: one all_gather of some hundred bytes, for a stream and a user's sampler.
    """
    is_compared = isinstance(drawn_from(loader)[0], ShardedSampler)
    if isinstance(loader, StreamLoader):
        is_compared = loader.dataset.compares
    if is_compared and get_world_size() > 1:
        check_heads(loader, all_gather_object(loader.head if isinstance(loader, StreamLoader) else head_of(loader)))


def check_heads(loader: Any, heads: Sequence[Sequence[int]]) -> None:
    """Raise a `ConfigError` if the order that the ranks split does not begin alike on every rank."""
    other = next((rank for rank, head in enumerate(heads) if is_other(head, heads[0])), None)
    if other is None:
        return
    where = f"between rank 0 and rank {other}"
    if isinstance(loader, StreamLoader):
        raise streams_differ(loader.dataset.dataset, where)
    raise ConfigError(
        f"{type(drawn_from(loader)[0].sampler).__name__} must draw the same order on each rank, which takes its share "
        f"of it, but its first items differ {where} (rank {get_rank()} of {get_world_size()}). Let it draw by the "
        "global generators of torch, Python or numpy, or seed it with a fixed seed and the epoch. If it draws this "
        "rank's part alone, give it an attribute `rank`, or say `split=False` in a config"
    )


def without_batches(loader: Any, count: int) -> Any:
    """Return a copy of a loader, for one pass that leaves out its first `count` batches without reading them.

    Its sampler is drawn from, and what it draws is discarded.

    Returns:
        The copy, or None if that can't be done: for anything but a `DataLoader` of a map-style dataset whose
        `__iter__` is torch's.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
        return None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return with_parts(loader, **{name: _Rest(getattr(loader, name), count)})


def loader_state(loader: Any) -> Any:
    """Return a loader's own state in its pass, after the last batch that was taken; None if it can't resume there.

    A `StreamLoader` can resume if its dataset can. Other loaders can if they have `state_dict` and `load_state_dict`,
    such as torchdata's `StatefulDataLoader`.
    """
    if isinstance(loader, StreamLoader) and not loader.dataset.has_position:
        return None
    return loader.state_dict() if hasattr(loader, "load_state_dict") else None


def restore_loader_state(loader: Any, state: Any) -> bool:
    """Make the next pass begin where `loader_state` returned a state, and return whether that succeeded."""
    if state is None or not hasattr(loader, "load_state_dict"):
        return False
    try:
        loader.load_state_dict(state)
    except ValueError as error:
        _logger.warning("the position in the data can't be restored: %s", error)
        return False
    return True


class _Rest:
    """What a sampler or a batch sampler yields after its first `count` items."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler = sampler
        self._count = count

    def __iter__(self) -> Any:
        items = iter(self.sampler)
        next(islice(items, self._count, self._count), None)  # now: the training goes on from the random state after it
        return items


def _set_epoch_of(dataset: Any, epoch: int) -> bool:
    """Call `set_epoch` of a dataset, or else of those inside it, as in a `Subset`; return whether one has it."""
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
        return True
    inner = [dataset.dataset] if isinstance(dataset, Subset) else getattr(dataset, "datasets", ())
    if not isinstance(inner, list | tuple):
        return False
    found = [_set_epoch_of(one, epoch) for one in inner]
    return any(found)
