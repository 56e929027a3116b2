"""Updates of a real training before it begins, and restoring what they change.

The searches for a learning rate and a batch size train in this way: with the strategy, accumulation, mixed precision
and clipping of the run, but without hooks and schedules.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.dataset import batch_size_of, position_of, restore_position, set_epoch
from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.dataset.rank_aware import parts_of
from lockstep.dist import all_gather_object
from lockstep.errors import ConfigError
from lockstep.model import train_step_of, unwrap_model
from lockstep.optim import OptimWrapperDict
from lockstep.runner.loops import NO_BATCHES
from lockstep.runner.run import TrainRun
from lockstep.runner.seeds import part_ranks
from lockstep.runner.uneven_inputs import Turn, buffers_kept
from lockstep.tree import tree_map


class Update(NamedTuple):
    """One update of the parameters.

    Attributes:
        loss: the mean over its samples, on all ranks; the same on every rank. None if a training step returns none.
        batch_size: samples in this rank's first batch.
    """

    loss: float | None
    batch_size: int


def rehearse(run: TrainRun) -> Generator[Update]:
    """Train, and yield after each update, for as long as it is asked for more.

    It goes through the data from the beginning of the epoch that is next. Code that receives an update may change
    learning rates before the following one.

    **Collective**: every rank, equally often. **Cost**: per update one all_gather_object of two numbers, and a wait
    for the device.

    With several optimizers, each iteration counts as an update.

    Raises:
        ConfigError: there are no batches.
    """
    wrapper, step = run.optim_wrapper, train_step_of(run.model)
    wrapper.initialize_count_status(run.model)
    part_ranks(run.args.randomness, run.seed, run.data_shard.rank)
    run.model.train()
    run.set_optimizer_mode(training=True)
    total, samples, batch_size, has_loss = 0.0, 0, 0, True
    for index, turn in enumerate(_endless_turns(run)):
        wrapper.begin_iteration(index)
        wrapper.count_samples(turn.samples, turn.mean_samples)
        batch_size = batch_size or batch_size_of(turn.batch)
        with nullcontext() if turn.is_own else buffers_kept(run.model):
            outputs = step(turn.batch, wrapper)
        if turn.samples:
            loss: Any = (outputs or {}).get("loss")
            has_loss = has_loss and isinstance(loss, Tensor | int | float)
            total += turn.samples * float(loss) if has_loss else 0.0
            samples += turn.samples
        if isinstance(wrapper, OptimWrapperDict) or wrapper.should_update():
            sums = all_gather_object((total, samples, has_loss))
            mean = sum(own for own, *_ in sums) / (sum(own for _, own, _ in sums) or 1)
            yield Update(mean if all(known for *_, known in sums) else None, batch_size)
            total, samples, batch_size = 0.0, 0, 0


@contextmanager
def run_kept(run: TrainRun) -> Iterator[None]:
    """Restore at the end, unless there is an error, what training changes in a run that has just been built.

    That is what a checkpoint holds (model, optimizer, loss scale, random state, position in the data), and buffers that
    are not persistent. A sampler or dataset with a state of its own is restored if a checkpoint can do so.

    **Collective**: every rank. **Cost**: memory for a copy of this rank's part of the parameters and of the optimizer's
    state.
    """
    strategy, wrapper, loader, core = run.strategy, run.optim_wrapper, run.train_dataloader, unwrap_model(run.model)
    model_state, optim_state = tree_map(_copied, strategy.model_state()), tree_map(_copied, strategy.optim_state())
    scale, modes = (
        tree_map(_copied, wrapper.extra_state()),
        [(module, module.training) for module in run.model.modules()],
    )
    generators = [(generator, generator.get_state()) for generator in _generators(loader)]
    random, position = random_state(), position_of(loader)
    with buffers_kept(core):
        yield
    strategy.load_state(model_state, optim_state)
    wrapper.load_extra_state(scale)
    for module, mode in modes:
        module.training = mode
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # persistent workers would go on with the random numbers that they have drawn
    set_epoch(loader, run.epoch)
    for generator, state in generators:
        generator.set_state(state)
    restore_position(loader, position)
    set_random_state(random)


def _endless_turns(run: TrainRun) -> Iterator[Turn]:
    passes = copy(run.train_loop.passes)  # that of the training stays where it is
    for epoch in count(run.epoch):
        set_epoch(run.train_dataloader, epoch)
        empty = True
        for turn in passes.turns():
            empty = False
            yield turn
        if empty:
            raise ConfigError(NO_BATCHES)


def _generators(loader: Any) -> list[torch.Generator]:
    batches = getattr(loader, "batch_sampler", None)
    parts = [loader, *parts_of(getattr(loader, "sampler", None)), *parts_of(batches)]
    found = [getattr(part, "generator", None) for part in parts]
    return [one for one in found if isinstance(one, torch.Generator)]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
