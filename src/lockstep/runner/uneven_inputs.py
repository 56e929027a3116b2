"""The batches of a rank: as many as every other rank takes, even if the ranks hold unequal amounts; on its device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lockstep.dataset import batch_size_of, length_of
from lockstep.dataset.loader import drawn_from
from lockstep.dataset.position import (
    BEGINNING,
    CountedBatches,
    Drawn,
    GlobalOrder,
    Position,
    batches_from,
    certain_amount,
    check_alike,
    check_heads,
    global_order_of,
    head_of,
    loader_state,
)
from lockstep.dataset.rank_aware import is_rank_aware, parts_of
from lockstep.dataset.repeats import checksum_of, refuse_repeats, refuse_repeats_by_workers
from lockstep.dataset.sampler import HEAD_LENGTH, OrderSampler
from lockstep.dataset.stream import StreamLoader
from lockstep.dist import all_gather_object, broadcast_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model.preprocessor import has_own_to, move_to_device
from lockstep.tree import is_tensordict, map_children

_logger = logging.getLogger(__name__)
_NONE = object()
_LEFT_OUT = -100  # torch's default for the `ignore_index` of a loss, and transformers' label of padding


class Batch(NamedTuple):
    """One iteration of a pass.

    Attributes:
        data: this rank's batch, or a stand-in if this rank has run out.
        samples: how many of its samples count; 0 for a stand-in.
        mean_samples: the mean of `samples` over the ranks.
        is_own: whether the batch is this rank's own, not a stand-in.
        indices: the indices of its samples in the dataset; None if they are not known.
        stands_in: whether some rank has a stand-in.
    """

    data: Any
    samples: float
    mean_samples: float
    is_own: bool
    indices: Sequence[int] | None = None
    stands_in: bool = False


class EvenBatches:
    """The batches of a data loader, pass by pass, in which all ranks take equally many.

    A rank that has run out repeats its last batch until the others have finished, because their forward and backward
    passes may need it. A rank without any batch receives one from another rank. (`SyncBatchNorm` also normalises over
    such stand-ins; ordinary BatchNorm normalises on each rank separately.)

    If the samplers say how many samples there will be, nothing is sent, except a batch for a rank that has none.
    Otherwise the ranks exchange the size of every batch.

    Args:
        loader: this rank's shard of the data.
        count: returns the size of a batch, if that is not its number of samples: for instance the number of tokens. If
            it is given, the ranks exchange the size of every batch.
        shards: the number of shards into which the data is to be split. If each rank has one of its own, and no sampler
            says which, ranks and workers that get the same first batch are an error.

    **Collective**: every rank makes it and goes through it. **Cost**: at the beginning, one all_gather_object of a few
    numbers, at the first batch up to two more; then one exchange for each batch whose size is not known in advance.

    Attributes:
        lengths: batches of each rank in a pass; None if that is not known.
        length: batches of every rank in a pass, as many as the rank with the most has; None if that is not known.
        global_order: the order of all samples, and how it is split over the ranks, so that a pass can begin anywhere in
            it; None if it is not known, and a pass begins after so many batches.
        is_resumable: whether a pass can go on in the middle; not if a sampler says `resumable = False`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> batches = list(EvenBatches(["ab", "cd"] if get_rank() == 0 else ["e"]).iterate())
        >>> [batch.data for batch in batches] == (["ab", "cd"], ["e", "e"])[get_rank()]
        True
        >>> [batch.samples for batch in batches] == ([1, 1], [1, 0])[get_rank()]
        True
    """

    def __init__(self, loader: Any, count: Callable[[Any], float] | None = None, shards: int = 0) -> None:
        self._loader = loader
        self._count = count
        self._rank, self._world_size = get_rank(), get_world_size()
        own = certain_amount(loader) if count is None else None
        self._is_stream = isinstance(loader, StreamLoader)
        compares = self._is_stream and loader.dataset.compares
        gathered = all_gather_object(
            (own, length_of(loader), global_order_of(loader), _shard_of(loader), _layout_of(loader), compares)
        )
        amounts, lengths, orders, self._shards, layouts, compare = (
            list(column) for column in zip(*gathered, strict=True)
        )
        self._compares = all(compare)
        self._layout = [self._world_size, *(layouts[:1] if layouts.count(layouts[0]) == len(layouts) else layouts)]
        self.lengths: list[int] | None = None if None in lengths else lengths
        self.length = None if self.lengths is None else max(self.lengths)
        self.is_resumable = all(getattr(part, "resumable", True) for part in parts_of(drawn_from(loader)[0]))
        self.global_order = orders[0] if self.is_resumable and all(order == orders[0] for order in orders) else None
        self._amounts: list[tuple[int, int, bool]] | None = None if None in amounts else amounts
        knows_ranks = is_rank_aware(loader.dataset.dataset if self._is_stream else loader)
        self._looks_for_repeats = shards == self._world_size and self.global_order is None and not knows_ranks
        self._counts_samples = count is None and shards > 1  # in a training, over several shards
        self._checksums: list[int | None] = []  # of the first two batches
        self._stand_in: Any = _NONE
        self._drawn: Drawn | None = None  # in the last pass
        self._dataset_size = _dataset_size(loader)
        self._all_have_a_batch = False

    def iterate(self, begin: Position = BEGINNING) -> Iterator[Batch]:
        """Yield the batches of one pass, beginning at `begin`."""
        self._tell_if_resized()
        batches = batches_from(self._loader, begin, self._drawn)
        self._drawn = batches.drawn
        order, shares, first = self.global_order, None, begin.batches
        if order is not None:  # what is left of it is shared out anew
            first = 0
            if self._amounts is not None:
                shares = [order.share(begin.items or 0, shard) for shard in self._shards]
        elif self._amounts is not None and len({amount[1:] for amount in self._amounts}) == 1:
            shares = [samples for samples, _, _ in self._amounts]
            order = GlobalOrder("samples", 1, self._amounts[0][1], None, self._amounts[0][2])  # of each rank's own
        try:
            if self._world_size > 1 and (shares is None or len(set(shares)) > 1):
                yield from self._in_step(batches, order, shares, first)
                return
            for index, batch in enumerate(batches, start=first):
                self._look(batch)
                samples = self._size_of(batch, batches)
                if order is not None and shares is not None:
                    samples = order.size_of(index, shares[self._rank])
                yield Batch(batch, samples, samples, True, batches.indices)
        except Exception:
            batches.shut_down()
            raise

    def position(self, epoch: int, batches: int = 0, begin: Position = BEGINNING) -> dict[str, Any]:
        """Return the position after so many batches of an epoch, in JSON values and the same on every rank.

        Args:
            epoch: the number of epochs before it.
            batches: how many batches of the epoch lie before it, among them those before `begin`.
            begin: where the pass has begun.

        Returns:
            `epoch`, `samples` and `total`, counted in `unit`: the number of samples of the epoch's global order that
            all ranks together have taken, and of those that there are; `head`: what tells this order from another one;
            `batches`: their number; `layout`: what must be the same if `samples` is None, which means that there
            is no global order; `held_by`: the rank whose own state says where the stream is.
        """
        order, samples = self.global_order, None
        if order is not None:
            samples = (begin.items or 0) + (batches - begin.batches) * order.global_batch
            if order.is_endless and order.total:
                passes, samples = divmod(samples, order.total)
                epoch += passes
            elif order.total is not None:
                samples = min(samples, order.total)
        return {
            "epoch": epoch,
            "batches": batches,
            "samples": samples,
            "unit": None if order is None else order.unit,
            "total": None if order is None else order.total,
            "global_batch": None if order is None else order.global_batch,
            "head": head_of(self._loader, epoch) if batches else [],
            "layout": self._layout,
            "held_by": self._shards.index(order.shards - 1) if order is not None and self._is_stream else None,
        }

    def read_position(
        self,
        saved: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
        states: Sequence[Mapping[str, Any]] = (),
        random: Mapping[str, Any] | None = None,
    ) -> Position:
        """Return where a pass begins after what any job has saved; the beginning, if that can't be found here.

        Args:
            saved: what `position` returned there.
            own: what `state` returned on the same rank of a job with as many ranks; None without one.
            states: what it returned on any ranks of that job.
            random: the state of the random generators there; None leaves them as they are.
        """
        order, begin = self.global_order, Position(head=saved["head"], random=random)
        if order is not None and saved["samples"] is not None and saved["unit"] == order.unit:
            items = saved["samples"] + (saved["epoch"] * (order.total or 0) if order.is_endless else 0)
            known = [state["position"] for state in states if state.get("position") is not None]
            return replace(begin, batches=saved["batches"], items=items, stream_states=known)
        if order is None and self.is_resumable and saved["layout"] == self._layout:
            return replace(begin, batches=saved["batches"], loader_state=None if own is None else own["position"])
        return begin

    def batches_after(self, position: Position) -> int | None:
        """Return the number of batches from `position` to the end of its epoch; None if that is not known."""
        if self.global_order is not None:
            left: int | None = self.global_order.batches_after(position.items or 0)
            return left
        return None if self.length is None else max(0, self.length - position.batches)

    def state(self) -> dict[str, Any]:
        """Return this rank's own state in the present pass, in JSON values and tensors."""
        needs_none = self.global_order is not None and not self._is_stream
        return {"position": None if needs_none else loader_state(self._loader)}

    def _tell_if_resized(self) -> None:
        """Warn, once, of a dataset that has grown or shrunk since its sampler has counted it."""
        size = _dataset_size(self._loader)
        if size != self._dataset_size and self._dataset_size is not None:
            _logger.warning(
                "the dataset, a %s, has %s samples now, but had %d when its loader was prepared: passes go on with as "
                "many as there were, and what was added is left out. Make another loader and training, or yield the "
                "samples from an IterableDataset",
                type(self._loader.dataset).__name__, size, self._dataset_size,
            )  # fmt: skip
            self._dataset_size = None

    def _look(self, batch: Any) -> None:
        """Find, by the first two batches, ranks and workers that have the same samples, and orders that differ."""
        if len(self._checksums) == 2:
            return
        self._checksums.append(checksum_of(batch))
        if len(self._checksums) == 1 and self._counts_samples:
            _warn_of_labels_left_out(batch)
        if len(self._checksums) == 1 and self._world_size > 1:
            check_alike(self._loader)
            if self._looks_for_repeats:
                refuse_repeats(self._loader, self._checksums[0])
        elif len(self._checksums) == 2 and self._looks_for_repeats:
            refuse_repeats_by_workers(self._loader, self._checksums)

    def _size_of(self, batch: Any, batches: CountedBatches) -> float:
        """Return what a batch counts for: as it was asked for, else its number of samples."""
        if self._count is None:
            return batch_size_of(batch) if batches.samples is None else batches.samples
        size = float(self._count(batch))  # perhaps a tensor
        if not 0 <= size < inf:
            raise ConfigError(
                f"`batch_size_of` must return a number that is not negative, but has returned {size:g} ({this_rank()})"
            )
        return int(size) if size.is_integer() else size

    def _in_step(
        self, batches: CountedBatches, order: GlobalOrder | None, shares: Sequence[int] | None, first: int
    ) -> Iterator[Batch]:
        for index in count(first):
            batch = next(batches, _NONE)
            self._look(batch)
            if order is not None and shares is not None:
                sizes: Sequence[float | None] = [order.size_of(index, share) or None for share in shares]
            else:
                own = None if batch is _NONE else self._size_of(batch, batches)
                sizes = self._exchanged_sizes(own, compares=self._compares and index < first + HEAD_LENGTH)
            if all(size is None for size in sizes):
                return
            is_own = batch is not _NONE
            if is_own:
                self._stand_in = batch
            held = [size is not None for size in sizes]
            if not self._all_have_a_batch and not all(held):  # at the first one only
                given = broadcast_object(self._stand_in if held[self._rank] else None, src=held.index(True))
                self._stand_in = self._stand_in if held[self._rank] else given
            self._all_have_a_batch = True
            known = [size or 0 for size in sizes]
            mean = sum(known) / self._world_size
            yield Batch(self._stand_in, known[self._rank], mean, is_own, batches.indices, not all(held))

    def _exchanged_sizes(self, own: float | None, *, compares: bool) -> list[float | None]:
        """Return the number of samples in each rank's batch; None for ranks that have run out.

        With `compares`, the ranks also compare the first samples of the stream.
        """
        gathered = all_gather_object((own, self._loader.head if compares else ()))
        if compares:
            check_heads(self._loader, [head for _, head in gathered])
        return [size for size, _ in gathered]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers on exit, such as the running statistics of BatchNorm, also if others replace them."""
    # Also the names of buffers that are None, which the public functions leave out.
    held = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)


def prefetching(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that copies a batch to an accelerator, on a stream of its own.

    What the device has been given before goes on; what it is given afterwards waits for the copy. So the batch of a
    step arrives during the step before, as long as no step lets the host wait for the device. No batch is taken from
    the loader earlier than without this: its position, and the random numbers that it draws, stay those of the step.
    What has a `.to` of its own (but a `TensorDict`), and sparse or nested tensors, are copied on the present stream.

    Args:
        device: the accelerator.

    **Cost**: memory for the batches of the steps that the host is ahead of the device.
    """
    stream = torch.Stream(device)

    def prefetch(batch: Any) -> Any:
        copies: list[Tensor] = []

        def copied(node: Any) -> Any:
            if not isinstance(node, Tensor):
                return node if has_own_to(node) and not is_tensordict(node) else map_children(copied, node)
            if not node.is_cpu or node.layout is not torch.strided:  # the others have no `record_stream` (2.13)
                return node
            copies.append(node.to(device, non_blocking=True))
            return copies[-1]

        with stream:
            moved = copied(batch)
        present = torch.accelerator.current_stream()
        present.wait_stream(stream)
        for copy in copies:
            copy.record_stream(present)  # else the memory might be given to a later batch too early
        return move_to_device(moved, device)

    return prefetch


def _dataset_size(loader: Any) -> int | None:
    """Return the length of a loader's dataset, if its sampler has counted it once for all; else None."""
    return length_of(getattr(loader, "dataset", None)) if isinstance(drawn_from(loader)[0], OrderSampler) else None


def _shard_of(loader: Any) -> int:
    """Return the number of the shard that a loader yields; 0 if it is not known."""
    if isinstance(loader, StreamLoader):
        return loader.dataset.shard[0]
    sampler, _ = drawn_from(loader)
    return int(getattr(sampler, "rank", 0))


def _layout_of(loader: Any) -> list[Any]:
    """Return what must be the same for a pass to go on after so many batches: [shards, batch size, workers]."""
    sampler, batch_size = drawn_from(loader)
    shards = getattr(sampler, "num_replicas", getattr(sampler, "world_size", None))
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return [shards, batch_size, None]
    return [shards, loader.batch_size, max(1, loader.num_workers)]


def _warn_of_labels_left_out(batch: Any) -> None:
    """Warn of labels that a mean leaves out, as those of padding: the mean over ranks is not that over the others."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor) and labels.is_cpu and labels.dim() > 1 and bool((labels == _LEFT_OUT).any()):
        _logger.warning(
            "some `labels` of the first batch are %d, which losses leave out, but each sample counts alike, however "
            "many labels it has: the updates differ from those of one process with the same global batch. Give "
            "batch_size_of, such as lambda batch: int((batch['labels'] != %d).sum()); for a causal language model, of "
            "batch['labels'][:, 1:]",
            _LEFT_OUT, _LEFT_OUT,
        )  # fmt: skip
