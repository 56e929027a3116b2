"""The search for a learning rate: updates at rising rates, and the rate at which the loss falls most steeply.

The updates are those of the training (`rehearse`), before it begins: with the strategy, accumulation, mixed precision
and clipping of the run, but without hooks and schedules. The search for a batch size makes such updates, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.dataset import batch_size_of, loader_state, restore_loader_state, set_epoch
from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.dataset.rank_aware import parts_of
from lockstep.dist import all_gather_object
from lockstep.errors import ConfigError, require_count
from lockstep.model import train_step_of, unwrap_model
from lockstep.optim import OptimWrapperDict
from lockstep.runner.loops import NO_BATCHES
from lockstep.runner.run import TrainRun
from lockstep.runner.seeds import part_ranks
from lockstep.runner.uneven_inputs import Batch, buffers_kept
from lockstep.tree import tree_map

LR_SEARCH = "lr_search"  # the mode of its records
DIVERGENCE = 4.0  # as in fastai's and Lightning's finders
_FEWEST_STEPS = 10
_WIDTH = 0.05  # of the window that smooths the losses: its standard deviation, as a share of the range
_PLATEAU = 0.75  # of the whole fall: the loss begins to fall for good where it was last so high
_DECAY = 0.9  # of the running mean by which the search notices that the loss diverges
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LRSearch:
    """What a search for a learning rate has found; the same on every rank.

    Attributes:
        lrs: the rates, ascending: values for the optimizer's argument `lr`.
        losses: the loss at each rate: the mean over the samples of the update, on all ranks.
        smoothed: the smoothed losses.
        suggestion: the rate at which the smoothed loss falls most steeply before it rises; None if it does not fall.
        factors: the rate of each parameter group, as a multiple of `lrs`.
        has_diverged: whether the search stopped early because the loss diverged.
        run_dir: the folder of the run, whose records hold these values.
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None
    factors: list[float] = field(default_factory=lambda: [1.0])
    has_diverged: bool = False
    run_dir: Path | None = None

    @property
    def still_falls(self) -> bool:
        """Whether the loss is lowest at the highest rate, so that higher ones should be tried."""
        finite = [loss for loss in self.smoothed if math.isfinite(loss)]
        return not self.has_diverged and self.smoothed[-1] == min(finite)


def check_range(start: float, end: float, steps: int, divergence: float = DIVERGENCE) -> None:
    """Check the arguments of a search, before anything is built.

    Raises:
        ConfigError: one of them is out of range.
    """
    for name, value, bound, what in (
        ("start", start, 0, "a rate above 0"),
        ("end", end, start, f"a rate above `start`, which is {start!r}"),
        ("divergence", divergence, 1, "a factor above 1"),
    ):
        if isinstance(value, bool) or not (isinstance(value, int | float) and bound < value < math.inf):
            raise ConfigError(f"`{name}` must be {what}, but is {value!r}")
    require_count("steps", steps, least=_FEWEST_STEPS)


def search_lr(run: TrainRun, start: float, end: float, steps: int, divergence: float) -> LRSearch:
    """Train `run` at rates from `start` to `end`, note the losses, and restore it.

    The rate is multiplied by the same factor after each update; parameter groups keep the ratio of their rates. Updates
    are those of the training: same strategy, accumulation, mixed precision, clipping and weights of samples. Hooks and
    schedules do not act. The search ends early when the loss is no longer finite, or its running mean exceeds its
    minimum by the factor `divergence`.

    Args:
        run: a run that has been built, and has not trained yet.
        start: the first rate.
        end: the last rate.
        steps: number of updates, at least 10.
        divergence: as above.

    **Collective**: every rank. **Cost**: as `rehearse` and `restoring_run`.

    **Source**: the range test of Smith 2015, "Cyclical Learning Rates for Training Neural Networks", section 3.3, with
    an exponential rise, the stopping rule and the steepest descent of fastai's and Lightning's finders.

    Raises:
        ConfigError: the rate of this training can't be searched, or the first loss is not finite.
    """
    factors = _factors(run)
    groups = run.optim_wrapper.param_groups
    lrs: list[float] = []
    losses: list[float] = []
    has_diverged, mean, lowest = False, 0.0, math.inf
    with restoring_run(run):
        rates = [start * (end / start) ** (step / (steps - 1)) for step in range(steps)]
        updates = rehearse(run)
        for lr in rates:
            for group, factor in zip(groups, factors, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * factor)
                else:
                    group["lr"] = lr * factor
            loss = next(updates).loss
            if loss is None:
                raise ConfigError(
                    "`train_step` of the model must return its total under 'loss' to search a learning rate, but "
                    "returned none"
                )
            if not lrs and not math.isfinite(loss):
                raise ConfigError(
                    f"the loss must be finite before training, but is {loss} at the first rate, {lr:g}. Check the "
                    "model and the data; torch.autograd.set_detect_anomaly(True) names the operation"
                )
            lrs.append(lr)
            losses.append(loss)
            mean = _DECAY * mean + (1 - _DECAY) * loss
            present = mean / (1 - _DECAY ** len(losses))
            lowest = min(lowest, present)
            # Also where the loss is not finite, in which no comparison is true.
            if has_diverged := not present - lowest <= (divergence - 1) * abs(lowest):
                break
        updates.close()
    smoothed = smooth(losses, _WIDTH * (steps - 1))
    found = LRSearch(lrs, losses, smoothed, _steepest(lrs, losses, smoothed), factors, has_diverged, run.run_dir)
    _record(run, found)
    return found


def smooth(losses: Sequence[float], width: float) -> list[float]:
    """Return means weighted by a Gaussian of standard deviation `width`, in steps; without losses that are not finite.

    The window is centred, because a running mean lags behind: its steepest descent comes at too high a rate.

    Example:
        >>> smooth([1.0, 1.0, math.inf], 0.5)
        [1.0, 1.0, inf]
    """
    known = [(step, loss) for step, loss in enumerate(losses) if math.isfinite(loss)]
    means = []
    for step, loss in enumerate(losses):
        weights = [math.exp(-0.5 * ((step - other) / width) ** 2) for other, _ in known]
        total = sum(weight * value for weight, (_, value) in zip(weights, known, strict=True))
        means.append(total / sum(weights) if math.isfinite(loss) else loss)
    return means


def _steepest(lrs: Sequence[float], losses: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Return the rate of the steepest descent before the loss first rises; None if it falls by less than its noise."""
    count = sum(map(math.isfinite, smoothed))
    noise = 2 * median(abs(losses[step] - losses[step - 1]) for step in range(1, count)) if count > 1 else 0.0
    lowest = 0
    for step in range(count):
        fall = smoothed[0] - smoothed[lowest]
        if smoothed[step] < smoothed[lowest]:
            lowest = step
        elif fall > noise and smoothed[step] - smoothed[lowest] > fall / 2:
            break  # a loss that has jumped up may fall back steeply
    if lowest < 2 or smoothed[0] - smoothed[lowest] <= noise:
        return None
    top = max(smoothed[:lowest])
    high = smoothed[lowest] + _PLATEAU * (top - smoothed[lowest])
    begin = max(step for step in range(lowest) if smoothed[step] >= high)  # dips of the noise lie before
    return lrs[min(range(max(1, begin), lowest), key=lambda step: smoothed[step + 1] - smoothed[step - 1])]


def _factors(run: TrainRun) -> list[float]:
    """Return the rate of each parameter group as a multiple of the optimizer's argument `lr`.

    Raises:
        ConfigError: the rate of this training can't be searched.
    """
    wrapper = run.optim_wrapper
    if isinstance(wrapper, OptimWrapperDict):
        raise ConfigError(
            f"`optim_wrapper` must have one optimizer to search its learning rate, but has {len(wrapper)} "
            f"({', '.join(wrapper)}), whose losses differ. Search with one of them in a training of its own"
        )
    name = type(wrapper.optimizer).__name__
    rates = run.initial_lrs
    known = [float(rate) for rate in rates if isinstance(rate, Tensor | int | float) and rate > 0]
    if len(known) < len(rates):
        raise ConfigError(
            f"the learning rates of {name} must be above 0 to be searched in their ratio, but are {rates}. Give "
            "`lr` any such value"
        )
    default = getattr(wrapper.optimizer, "defaults", {}).get("lr")
    reference = float(default) if isinstance(default, Tensor | int | float) and default > 0 else known[0]
    return [rate / reference for rate in known]


def _record(run: TrainRun, found: LRSearch) -> None:
    """Write one record for each update; the last one has the suggestion."""
    if run.rank == 0:
        rows = list(zip(found.lrs, found.losses, found.smoothed, strict=True))
        for step, (lr, loss, smoothed) in enumerate(rows, start=1):
            record = {"mode": LR_SEARCH, "epoch": 1, "iter": step, "lr": lr, "loss": loss, "smoothed_loss": smoothed}
            last = {"suggestion": found.suggestion} if step == len(rows) else {}
            run.records.write({**record, **last}, flush=bool(last))
    _logger.info(
        "searched %d learning rates from %.3g to %.3g: %s",
        len(found.lrs), found.lrs[0], found.lrs[-1],
        "the loss does not fall at any of them" if found.suggestion is None else f"{found.suggestion:.2g} is suggested",
    )  # fmt: skip


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
    for index, batch in enumerate(_endless_batches(run)):
        wrapper.begin_iteration(index)
        wrapper.count_samples(batch.samples, batch.mean_samples)
        batch_size = batch_size or batch_size_of(batch.data)
        with nullcontext() if batch.is_own else buffers_kept(run.model):
            outputs = step(batch.data, wrapper)
        if batch.samples:
            loss: Any = (outputs or {}).get("loss")
            has_loss = has_loss and isinstance(loss, Tensor | int | float)
            total += batch.samples * float(loss) if has_loss else 0.0
            samples += batch.samples
        if isinstance(wrapper, OptimWrapperDict) or wrapper.should_update():
            sums = all_gather_object((total, samples, has_loss))
            mean = sum(one for one, *_ in sums) / (sum(count for _, count, _ in sums) or 1)
            yield Update(mean if all(known for *_, known in sums) else None, batch_size)
            total, samples, batch_size = 0.0, 0, 0


@contextmanager
def restoring_run(run: TrainRun) -> Iterator[None]:
    """Let a block train a run that has just been built, and restore the run at the end, unless there is an error.

    Restored are model, optimizer, loss scale, random state and position in the data, as a checkpoint holds them, and
    buffers that are not persistent. A sampler or dataset with a state of its own is restored if a checkpoint can do so.

    **Collective**: every rank. **Cost**: memory for a copy of this rank's part of the parameters and of the optimizer's
    state.
    """
    strategy, wrapper, loader, core = run.strategy, run.optim_wrapper, run.train_dataloader, unwrap_model(run.model)
    model_state, optim_state = tree_map(_copied, strategy.model_state()), tree_map(_copied, strategy.optim_state())
    scale = tree_map(_copied, wrapper.extra_state())
    modes = [(module, module.training) for module in run.model.modules()]
    generators = [(generator, generator.get_state()) for generator in _generators(loader)]
    random, position = random_state(), loader_state(loader)
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
    restore_loader_state(loader, position)
    set_random_state(random)


def _endless_batches(run: TrainRun) -> Iterator[Batch]:
    for epoch in count(run.epoch):
        set_epoch(run.train_dataloader, epoch)
        empty = True
        for batch in run.train_loop.even_batches.iterate():
            empty = False
            yield batch
        if empty:
            raise ConfigError(NO_BATCHES)


def _generators(loader: Any) -> list[torch.Generator]:
    batches = getattr(loader, "batch_sampler", None)
    parts = [loader, *parts_of(getattr(loader, "sampler", None)), *parts_of(batches)]
    found = [getattr(part, "generator", None) for part in parts]
    return [one for one in found if isinstance(one, torch.Generator)]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
