"""Iteration over data in lockstep, even if the ranks hold different numbers of batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.dataset import Amount, amount_of, batch_size_of, length_of, position_of, restore_position, skip_batches
from lockstep.dist import all_gather, all_gather_object, broadcast_object, get_rank, get_world_size

_logger = logging.getLogger(__name__)
_NONE = object()
_UNKNOWN = -1


class Turn(NamedTuple):
    """One iteration of a pass.

    Attributes:
        batch: this rank's batch, or a stand-in if this rank has run out.
        samples: how many of its samples count; 0 for a stand-in.
        mean_samples: the mean of `samples` over the ranks.
        is_own: whether the batch is this rank's own, not a stand-in.
    """

    batch: Any
    samples: int
    mean_samples: float
    is_own: bool


class Passes:
    """Passes through a data loader, in which all ranks take the same number of turns.

    A rank that has run out repeats its last batch until the others have finished, because their forward and backward
    passes may need it. A rank without any batch receives one from another rank. (`SyncBatchNorm` also normalises over
    such stand-ins; ordinary BatchNorm normalises on each rank separately.)

    If the samplers say how many samples there will be, nothing is sent, except a batch for a rank that has none.
    Otherwise the ranks exchange the size of every batch.

    Args:
        loader: this rank's shard of the data.
        count: returns the size of a batch, if that is not the sampler's number of samples: for instance the number of
            tokens. If it is given, the ranks exchange the size of every batch.

    **Collective**: every rank makes it and goes through it. **Cost**: at the beginning, one all_gather_object of a few
    numbers; then, for each batch whose size is not known in advance, one all_gather of 8 bytes.

    Attributes:
        lengths: batches of each rank in a pass; None if that is not known.
        length: turns in a pass, as many as the rank with the most batches has; None if that is not known.
        taken: turns of the present pass so far, or, after `restore`, of the pass to continue.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> turns = list(Passes(["ab", "cd"] if get_rank() == 0 else ["e"]).turns())
        >>> [turn.batch for turn in turns] == (["ab", "cd"], ["e", "e"])[get_rank()]
        True
        >>> [turn.samples for turn in turns] == ([1, 1], [1, 0])[get_rank()]
        True
    """

    def __init__(self, loader: Any, count: Callable[[Any], int] | None = None) -> None:
        self._loader = loader
        self._count = count or batch_size_of
        self._rank, self._world_size = get_rank(), get_world_size()
        own = amount_of(loader) if count is None else None
        self._amounts, self.lengths = _agree(own, length_of(loader))
        self.length = None if self.lengths is None else max(self.lengths)
        self._is_even = self._world_size == 1 or (self._amounts is not None and len(set(self._amounts)) == 1)
        self.taken = 0
        self._resumption: tuple[Any, Callable[[], None]] | None = None
        self._stand_in: Any = _NONE
        self._all_have_a_batch = False

    def turns(self, done: int = 0) -> Iterator[Turn]:
        """Yield the turns of one pass, beginning after the first `done`."""
        self.taken = done
        batches = self._batches_from(done)
        if not self._is_even:
            yield from self._turns_in_step(batches, done)
            return
        amount = None if self._amounts is None else self._amounts[self._rank]
        for index, batch in enumerate(batches, start=done):
            self.taken = index + 1
            samples = int(self._count(batch)) if amount is None else amount.size_of(index)
            yield Turn(batch, samples, samples, True)

    def state(self) -> dict[str, Any]:
        """Return this rank's position in the present pass."""
        return {"taken": self.taken, "position": position_of(self._loader)}

    def restore(self, state: Mapping[str, Any], then: Callable[[], None]) -> None:
        """Let the next call of `turns` continue from a position that `state` returned.

        Args:
            state: the state of the same rank, from a job with the same number of ranks.
            then: called when the loader is at that position, before it yields a batch.
        """
        self.taken = state["taken"]
        self._resumption = state["position"], then

    def _batches_from(self, done: int) -> Iterator[Any]:
        """Return the batches of one pass without the first `done`."""
        (position, then), self._resumption = self._resumption or (None, _nothing), None
        if done == 0:
            then()
            return iter(self._loader)
        is_there = restore_position(self._loader, position) or skip_batches(self._loader, done)
        batches: Iterator[Any] = iter(self._loader)
        if not is_there:
            _logger.warning(
                "%d batches of %s are read and discarded, to go on after them. Datasets with state_dict and "
                "load_state_dict can do without, and samplers that can skip",
                done, _described(self._loader),
            )  # fmt: skip
            next(islice(batches, done, done), None)
        then()
        return batches

    def _turns_in_step(self, batches: Iterator[Any], done: int) -> Iterator[Turn]:
        for index in count(done):
            batch = next(batches, _NONE)
            self.taken = index + 1
            sizes = self._sizes(index, batch)
            if all(size is None for size in sizes):
                return
            is_own = batch is not _NONE
            if is_own:
                self._stand_in = batch
            self._serve([size is not None for size in sizes])
            known = [size or 0 for size in sizes]
            yield Turn(self._stand_in, known[self._rank], sum(known) / self._world_size, is_own)

    def _sizes(self, index: int, batch: Any) -> Sequence[int | None]:
        """Return the number of samples in each rank's batch; None for ranks that have run out."""
        if self._amounts is not None:
            return [amount.size_of(index) or None for amount in self._amounts]
        own = _UNKNOWN if batch is _NONE else int(self._count(batch))  # perhaps a tensor
        told = [int(size) for size in all_gather(torch.tensor(own))]
        return [None if size == _UNKNOWN else size for size in told]

    def _serve(self, held: list[bool]) -> None:
        """Make sure that every rank has a batch to take its turn with; needed at the first turn only."""
        if not self._all_have_a_batch and not all(held):
            batch = broadcast_object(self._stand_in if held[self._rank] else None, src=held.index(True))
            if not held[self._rank]:
                self._stand_in = batch
        self._all_have_a_batch = True


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers on exit, such as the running statistics of BatchNorm."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _agree(own: Amount | None, length: int | None) -> tuple[list[Amount] | None, list[int] | None]:
    """Return each rank's amount of data and number of batches; None for what not every rank knows."""
    told = all_gather_object((own, length))
    amounts = [amount for amount, _ in told if amount is not None]
    lengths = [length for _, length in told if length is not None]
    return amounts if len(amounts) == len(told) else None, lengths if len(lengths) == len(told) else None


def _described(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    return type(getattr(dataset, "dataset", dataset) or loader).__name__


def _nothing() -> None:
    """Do nothing."""
