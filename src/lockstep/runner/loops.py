"""The training loops: fetch a batch, take a step, call the hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

from torch import Tensor

from lockstep.dataset import set_epoch
from lockstep.errors import ConfigError, require_count
from lockstep.groups import resolve
from lockstep.launch.worker import iteration_teller
from lockstep.model import train_step_of, unwrap_model
from lockstep.model.compiling import begin_compiled_step
from lockstep.model.wrapper import note_no_backward
from lockstep.optim import OptimWrapperDict
from lockstep.registry import LOOPS
from lockstep.runner.run import TrainRun
from lockstep.runner.same_options import check_same_options
from lockstep.runner.seeds import part_ranks
from lockstep.runner.uneven_inputs import BEGINNING, Passes, Place, Turn, buffers_kept

CountSamples: TypeAlias = Callable[[Any], int]

DEFAULT_INTERVAL = 1000
"""Iterations from one validation to the next, and from one checkpoint to the next, where epochs are not counted."""
NO_BATCHES = "`train_dataloader` must yield at least one batch per pass, but yields none"


class TrainLoop(ABC):
    """Base class of epoch-based and iteration-based training loops.

    Attributes:
        epoch: number of complete passes through the data.
        iter: number of complete iterations.
        epoch_length: iterations in a pass, as many as the rank with the most batches needs; None if that is not known.
        epoch_begin: `iter` at the beginning of the present epoch.
        epoch_end: `iter` at its end; None if that is not known. An epoch in which training resumed, with a global batch
            of another size, has more or fewer iterations than `epoch_length`.
        samples: number of this rank's samples in the present batch that count; 0 if this rank has run out of batches
            and others have not.
        batch_size_of: returns what a batch counts for; None for its number of samples.
        stop_training: set it to end the training after the present epoch or iteration.
    """

    max_epochs: int | None
    max_iters: int

    def __init__(
        self,
        runner: TrainRun,
        dataloader: Any,
        val_begin: int,
        val_interval: int,
        dynamic_intervals: Sequence[tuple[int, int]] | None,
        batch_size_of: CountSamples | None,
    ) -> None:
        self.runner = runner
        self.dataloader = dataloader
        self.batch_size_of = batch_size_of
        self.passes = Passes(dataloader, batch_size_of)
        self.epoch_length = self.passes.length
        lengths = self.passes.lengths or [0]
        if min(lengths) < max(lengths):
            runner.logger.info(
                "the ranks have between %d and %d batches per pass: those that run out wait for the others, repeating "
                "their last batch, which counts for nothing",
                min(lengths), max(lengths),
            )  # fmt: skip
        self.val_begin = val_begin
        self.val_interval = val_interval
        self._intervals = _intervals(val_interval, dynamic_intervals)
        self.epoch = 0
        self.iter = 0
        self.epoch_begin = 0
        self.epoch_end = self.epoch_length
        self._begin = BEGINNING
        self.samples = 0
        self.stop_training = False
        self._left_out: set[str] = set()
        self._has_begun = False

    @abstractmethod
    def run(self) -> None:
        """Train until the end."""

    def position(self, epoch: int, iteration: int) -> dict[str, Any]:
        """Return the position in the data after so many complete epochs and iterations; see `Passes.position`."""
        return self.passes.position(epoch, iteration - self.epoch_begin if epoch == self.epoch else 0)

    def restore(self, iteration: int, position: Mapping[str, Any]) -> Place | None:
        """Continue after so many iterations, at a position in the data that `position` returned.

        Returns:
            The place in the present epoch; None if the position can't be found, so that its epoch begins anew.
        """
        place, deal = self.passes.place_of(position), self.passes.deal
        self.iter = iteration
        self.epoch = 0 if deal is not None and deal.is_endless else position["epoch"]
        self._begin = place or BEGINNING
        self.epoch_begin = iteration - self._begin.turns
        left = self.passes.turns_after(self._begin)
        self.epoch_end = None if left is None else iteration + left
        return place

    def _complete_epoch(self) -> None:
        """Count the present epoch, and begin the next one."""
        self.epoch += 1
        self.epoch_begin, self._begin = self.iter, BEGINNING
        self.epoch_end = None if self.epoch_length is None else self.iter + self.epoch_length

    def _iters_until(self, max_epochs: int) -> int:
        """Return `iter` at the end of epoch `max_epochs`."""
        return (self.epoch_end or 0) + (max_epochs - self.epoch - 1) * (self.epoch_length or 0)

    def _prepare(self) -> None:
        runner = self.runner
        runner.optim_wrapper.initialize_count_status(runner.model, self.iter, self.max_iters)
        self._step = train_step_of(runner.model)

    def _tell_if_complete(self, left: int, done: str) -> None:
        """Say that a resumed training has no epochs or iterations `left`; `done` says how many it has."""
        if left <= 0 and self.iter > 0:
            self.runner.logger.info("nothing is left to train: the resumed training has completed %s", done)

    def _begin_training(self) -> None:
        """Switch the model to training mode, and check what it is updated by.

        A warning names parameters that require a gradient but will not be updated.

        **Collective**: every rank.

        Raises:
            ConfigError: on every rank, if options of optimizers or schedules differ between ranks.
        """
        runner = self.runner
        check_same_options(runner)
        if not self._has_begun:
            self._has_begun = True
            part_ranks(runner.args.randomness, runner.seed + self.iter, runner.data_shard.rank)
        self._tell_iteration = iteration_teller()
        self._tell_iteration(self.iter)
        runner.model.train()
        runner.set_optimizer_mode(training=True)
        names = [
            name for name in runner.optim_wrapper.left_out(unwrap_model(runner.model)) if name not in self._left_out
        ]
        if names:
            self._left_out.update(names)
            runner.logger.warning(
                "%d parameters require a gradient, but the optimizer has not been given them and never updates them: "
                "%s. Give it all parameters, or freeze these with requires_grad_(False)",
                len(names), ", ".join(names),
            )  # fmt: skip

    def _end_training(self) -> None:
        """Warn of gradients that are not used, and let the model have the weights to evaluate."""
        self.runner.optim_wrapper.warn_of_open_window()
        self.runner.set_optimizer_mode(training=False)

    def _turns(self) -> Iterator[Turn]:
        """Return the turns of the present pass; between two updates, the training may stop or save."""
        wrapper = self.runner.optim_wrapper
        wrappers = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        may_act = (
            wrappers[0].should_update if len(wrappers) == 1 else lambda: all(one.should_update() for one in wrappers)
        )
        return self.runner.agreement.points(self._checked(self.passes.turns(self._begin)), may_act)

    def _checked(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """Yield the turns, and raise an error if there are more of them than the length of the loader says."""
        for turn in turns:
            if self.max_epochs is not None and self.epoch_end is not None and self.iter >= self.epoch_end:
                expected = self.epoch_end - self.epoch_begin
                raise wrong_length(expected, f"has another one in epoch {self.epoch + 1}")
            yield turn

    def _endless_turns(self) -> Iterator[Turn]:
        """Return the turns of the present pass and of those after it."""
        while True:
            set_epoch(self.dataloader, self.epoch)
            empty = self._begin == BEGINNING
            for turn in self._turns():
                empty = False
                yield turn
            if empty:
                raise no_batches(self.dataloader)
            self._complete_epoch()

    def _run_iter(self, batch_idx: int, turn: Turn) -> None:
        runner, data_batch, optim_wrapper = self.runner, turn.batch, self.runner.optim_wrapper
        self.samples = turn.samples
        optim_wrapper.begin_iteration(self.iter)
        optim_wrapper.count_samples(turn.samples, turn.mean_samples)
        runner.hooks.call("before_train_iter", runner, batch_idx=batch_idx, data_batch=data_batch)
        before, moved = optim_wrapper.inner_count, runner.prefetch(data_batch)
        begin_compiled_step()
        if turn.is_own:
            outputs = self._step(moved, optim_wrapper)
        else:
            with buffers_kept(runner.model):  # a stand-in changes neither gradients nor running statistics
                outputs = self._step(moved, optim_wrapper)
        if optim_wrapper.inner_count == before:
            note_no_backward(resolve(None))
        outputs = _values_to_log(outputs)
        runner.hooks.call("after_train_iter", runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs)
        self.iter += 1
        self._tell_iteration(self.iter)
        runner.saving.collect()

    def _make_up_validation(self, done: int, last: int) -> None:
        """Validate if the checkpoint was saved just before a validation, as checkpoints at regular intervals are.

        So a resumed run has all the metrics of a run that was never interrupted.
        """
        loop = self.runner.val_loop
        if done and loop is not None and loop.at_iter != self.iter and self._is_validation_due(done, last):
            self.runner.logger.info("validating first: the checkpoint was saved just before a validation")
            with self.passes.drawing_on():
                loop.run()

    def _validate_if_due(self, done: int, last: int) -> None:
        loop = self.runner.val_loop
        if loop is not None and self._is_validation_due(done, last):
            loop.run()
            self._begin_training()

    def _is_validation_due(self, done: int, last: int) -> bool:
        if done < self.val_begin:
            return False
        interval = next(interval for begin, interval in reversed(self._intervals) if done >= begin)
        return done % interval == 0 or done == last or self.stop_training


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """A loop that trains for a number of passes through the data.

    Args:
        runner: the run; its model is trained.
        dataloader: this rank's shard of the data, with a length. Ranks may hold unequal amounts; see `Passes`.
        max_epochs: number of passes.
        val_begin: the epoch after which the first validation may come.
        val_interval: number of epochs from one validation to the next; the last epoch always ends in one.
        dynamic_intervals: pairs (epoch, interval): from that epoch on, that interval holds.
        batch_size_of: returns what a batch counts for, if that is not its number of samples: for instance its number of
            tokens. The gradient of an update is the mean over what it counts, on all ranks.
    """

    epoch_length: int

    def __init__(
        self,
        runner: TrainRun,
        dataloader: Any,
        max_epochs: int,
        val_begin: int = 1,
        val_interval: int = 1,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        batch_size_of: CountSamples | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals, batch_size_of)
        if self.passes.length is None:
            raise ConfigError(
                "`train_dataloader` must have a length to be counted in epochs, but "
                f"{type(dataloader).__name__} has none. Use train_cfg=dict(by_epoch=False, "
                "max_iters=...)"
            )
        if self.passes.length == 0:
            raise no_batches(dataloader)
        require_count("max_epochs", max_epochs)
        self.max_epochs: int = max_epochs
        self.max_iters = self.max_epochs * self.epoch_length

    def restore(self, iteration: int, position: Mapping[str, Any]) -> Place | None:
        """Continue after so many iterations, at a position in the data; `max_iters` is as the rest of it needs."""
        place = super().restore(iteration, position)
        self.max_iters = max(iteration, self._iters_until(self.max_epochs))
        return place

    def run(self) -> None:
        """Train until `max_epochs`, validating in between."""
        self._prepare()
        self._tell_if_complete(self.max_epochs - self.epoch, f"{self.epoch} of {self.max_epochs} epochs")
        self.runner.call_hook("before_train")
        if self.iter == self.epoch_begin:
            self._make_up_validation(self.epoch, self.max_epochs)
            self._has_begun |= self.passes.draw_on()  # ranks that go on draw different numbers already
        while self.epoch < self.max_epochs and not self.stop_training:
            begin, end = self.epoch_begin, self.epoch_end
            self._run_epoch()
            self._validate_if_due(self.epoch, self.max_epochs)
            self._check_length(self.epoch_begin - begin, (end or 0) - begin)
        self._end_training()
        self.runner.call_hook("after_train")

    def _check_length(self, done: int, expected: int) -> None:
        """Raise an error if an epoch was of another length: schedules and checkpoints rely on equal epochs.

        After the last epoch, which has been trained, it is a warning.
        """
        if self.stop_training or done == expected:
            return
        error = wrong_length(expected, f"had {done} in epoch {self.epoch}")
        if self.epoch < self.max_epochs:
            raise error
        self.runner.logger.warning("%s", error)

    def _run_epoch(self) -> None:
        self.runner.call_hook("before_train_epoch")
        self._begin_training()
        for batch_idx, turn in enumerate(self._turns(), start=self._begin.turns):
            self._run_iter(batch_idx, turn)
        self.runner.call_hook("after_train_epoch")
        self._complete_epoch()


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """A loop that trains for a number of iterations, with as many passes through the data as needed.

    Args:
        runner: the run; its model is trained.
        dataloader: this rank's shard of the data.
        max_iters: number of iterations.
        val_begin: the iteration after which the first validation may come.
        val_interval: number of iterations from one validation to the next; the last iteration always ends in one.
        dynamic_intervals: pairs (iteration, interval): from that iteration on, that interval holds.
        batch_size_of: as for `EpochBasedTrainLoop`.
    """

    max_epochs = None

    def __init__(
        self,
        runner: TrainRun,
        dataloader: Any,
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = DEFAULT_INTERVAL,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        batch_size_of: CountSamples | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals, batch_size_of)
        require_count("max_iters", max_iters)
        self.max_iters = max_iters

    def run(self) -> None:
        """Train until `max_iters`, validating in between."""
        self._prepare()
        self._tell_if_complete(self.max_iters - self.iter, f"{self.iter} of {self.max_iters} iterations")
        turns = self._endless_turns()
        self.runner.call_hook("before_train")
        self._make_up_validation(self.iter, self.max_iters)
        self.runner.call_hook("before_train_epoch")
        self._begin_training()
        while self.iter < self.max_iters and not self.stop_training:
            self._run_iter(self.iter, next(turns))
            if self.runner.val_loop is not None:
                self._validate_if_due(self.iter, self.max_iters)
        self._end_training()
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")


def wrong_length(expected: int, what: str) -> ConfigError:
    """Return the error for a loader that yields more or fewer batches than its length says."""
    return ConfigError(
        f"`train_dataloader` must have {expected} iterations in every epoch, as its length says, but {what}. Let "
        "`__len__` of the sampler or the dataset say what it yields, the same in every epoch, or use "
        "train_cfg=dict(by_epoch=False, max_iters=...)"
    )


def no_batches(loader: Any, name: str = "train_dataloader") -> ConfigError:
    """Return the error for a loader that yields nothing."""
    why = ": its samples do not fill one, and drop_last=True" if getattr(loader, "drop_last", False) else ""
    return ConfigError(NO_BATCHES.replace("train_dataloader", name) + why)


def _values_to_log(outputs: Any) -> dict[str, Any]:
    """Return the values to log from a training step, perhaps the model's own.

    Tensors are copied: a parameter, a buffer or an output of a CUDA graph is written again in the next step, and all of
    them are read much later.
    """
    if outputs is None:
        return {}
    if type(outputs) is not dict and not isinstance(outputs, Mapping):
        raise TypeError(
            "`train_step` must return a dict of values to log, as in {'loss': loss.detach()}, or None, but returned a "
            f"{type(outputs).__name__}"
        )
    values = dict(outputs)
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            if value.numel() == 1:
                values[name] = value.detach().clone()
                continue
        elif isinstance(value, int | float):
            continue
        elif isinstance(value, Real):  # of numpy
            values[name] = float(value)
            continue
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"`train_step` must return numbers and scalar tensors to log, but returned {what} as {name!r}")
    return values


def _intervals(first: int, later: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Return pairs of the epoch or iteration from which on an interval between validations holds, and the interval."""
    require_count("val_interval", first)
    steps = [(0, first)]
    for item in later or ():
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise ConfigError(f"`dynamic_intervals` must hold pairs (from when on, interval), but holds {item!r}")
        for number in item:
            require_count("dynamic_intervals", number)
        if item[0] <= steps[-1][0]:
            raise ConfigError(f"`dynamic_intervals` must be in order of time, but are {list(later or ())}")
        steps.append((item[0], item[1]))
    return steps
