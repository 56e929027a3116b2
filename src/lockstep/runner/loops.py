"""The loops that train: fetch a batch, take a step, call the hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeAlias

from torch import Tensor

from lockstep.dataset import set_epoch
from lockstep.dataset.position import BEGINNING, Position
from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.dist import all_gather_object
from lockstep.errors import CollectiveMismatchError, ConfigError, counted, listed, require_count
from lockstep.groups import resolve
from lockstep.launch.worker import note_trained
from lockstep.model import train_step_of, unwrap_model
from lockstep.model.compiling import begin_compiled_step
from lockstep.model.shards import reshard
from lockstep.model.steps import values_to_log
from lockstep.model.wrapper import note_no_backward
from lockstep.optim import OptimWrapperDict
from lockstep.registry import LOOPS
from lockstep.runner.options import check_same_options
from lockstep.runner.run import TrainRun
from lockstep.runner.seeds import part_ranks, random_state_kept
from lockstep.runner.uneven_inputs import Batch, EvenBatches, buffers_kept

CountSamples: TypeAlias = Callable[[Any], float]

_MOST_WITHOUT = 3  # iterations at the beginning, none of which makes a backward pass

DEFAULT_INTERVAL = 1000
"""Iterations from one validation to the next, and from one checkpoint to the next, where epochs are not counted."""


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
        iter_ended: when the hooks of the last iteration, or those before it, had ended, by `perf_counter`; what follows
            waits for data.
        batch_size_of: returns what a batch counts for; None for its number of samples.
        stop_training: set it to end the training after the present epoch, on any rank; in a loop that counts
            iterations on every rank, to end it after the present one.
        is_ending_iter: whether `after_train_iter` is being called: the iteration is done, but not in `iter` yet.
        makes_up_validations: whether a resumed training makes up for a validation that was abandoned. One that has a
            `run` of its own does not.
    """

    max_epochs: int | None
    max_iters: int
    makes_up_validations = False

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
        self.even_batches = EvenBatches(dataloader, batch_size_of, runner.data_shard.size)
        self.epoch_length = self.even_batches.length
        lengths = self.even_batches.lengths or [0]
        if min(lengths) < max(lengths):
            runner.logger.info(
                "the ranks have between %d and %d batches per pass: those that run out wait for the others, repeating "
                "their last batch, which counts for nothing in an update; but a loss of rows that it gathers from all "
                "ranks has that batch, unless session.gather(..., sync_grads=True) gathers them",
                min(lengths), max(lengths),
            )  # fmt: skip
        require_count("val_begin", val_begin, least=0)
        self.val_begin = val_begin
        self.val_interval = val_interval
        self._intervals = _intervals(val_interval, dynamic_intervals)
        self.epoch = 0
        self.iter = 0
        self.epoch_begin = 0
        self.epoch_end = self.epoch_length
        self._begin = BEGINNING
        self.samples: float = 1  # in a loop of the user's own, which does not say
        self.rates_of_step: dict[str, float] = {}  # there, where code may change them after a step
        self.iter_ended = 0.0
        self.stop_training = False
        self._will_stop = False  # after the present epoch, as was asked for before the training resumed
        self._left_out: set[str] = set()
        self._has_begun = False
        self.has_validated = False  # the resumed training, after its last step and before it saved the checkpoint
        self._iters_open = 0  # in a row after which gradients of some optimizer wait for their update
        # Parameters, in the checkpoint; until the first iteration after it.
        self.frozen_before: set[str] | None = None
        self.is_ending_iter = False
        self.iters_with_backward = self.iters_without = 0  # since the training began or resumed

    @property
    def unit(self) -> str:
        """What batches are counted in: with `batch_size_of` they may be tokens, or anything else."""
        return "samples" if self.batch_size_of is None else "units"

    @abstractmethod
    def run(self) -> None:
        """Train until the end."""

    def position(self, epoch: int, iteration: int) -> dict[str, Any]:
        """Return the position in the data after so many complete epochs and iterations; see `EvenBatches.position`."""
        if epoch != self.epoch:
            return self.even_batches.position(epoch)
        return self.even_batches.position(epoch, iteration - self.epoch_begin, self._begin)

    def resume(self, iteration: int, epoch: int, begin: Position) -> None:
        """Go on after so many iterations and epochs, at `begin` in the present epoch."""
        order, left = self.even_batches.global_order, self.even_batches.batches_after(begin)
        self.iter, self._begin = iteration, begin
        self.epoch = 0 if order is not None and order.is_endless else epoch
        self.epoch_begin, self.epoch_end = iteration - begin.batches, None if left is None else iteration + left

    def resume_within(self, position: Mapping[str, Any], *, will_stop: bool) -> None:
        """Stop at the end of the epoch at `position`, or before the next one, if that was asked for before."""
        if self._is_within(position):
            self._will_stop = will_stop
        else:
            self.stop_training = will_stop

    @property
    def ends_after_epoch(self) -> bool:
        """Whether a resumed training goes on to the end of its epoch alone, as was asked for before it had stopped."""
        return self._will_stop

    def will_stop(self, position: Mapping[str, Any]) -> bool:
        """Return whether this rank has asked for an end of the training that has not come yet at `position`.

        One that has come does not end a training that goes on from there for longer.
        """
        return self.stop_training and (self._is_within(position) or self.runner.saving.is_stopping)

    def as_resumed(self) -> AbstractContextManager[None]:
        """Return a context in which the run is as a training begins that goes on from here."""
        return nullcontext()

    @property
    def ends_here(self) -> bool:
        """Whether the training ends here, but for a validation, because that was asked for. The same on every rank."""
        return self.stop_training and (self.max_epochs is None or self.iter == self.epoch_begin)

    def _is_within(self, position: Mapping[str, Any]) -> bool:
        return self.max_epochs is not None and bool(position["batches"] or position.get("logged"))

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
        self._writes = self._count_writes()

    def _tell_if_complete(self, done: int, wanted: int, noun: str) -> None:
        """Say that a resumed training has `done` as many epochs or iterations as are `wanted`, or more."""
        if done >= wanted and self.iter > 0:
            has = f"{counted(done, noun)}, of {wanted} asked for"
            self.runner.logger.info("nothing is left to train: the resumed training has completed %s", has)

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
        if self.iter > 0:
            note_trained()
        self.stop_training, self._will_stop = self.stop_training or self._will_stop, False
        runner.model.train()
        runner.set_optimizer_mode(training=True)
        reshard(unwrap_model(runner.model))  # a validation leaves FSDP's outermost weights gathered, as other tensors
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
        self.iter_ended = perf_counter()

    def _is_stopped(self) -> bool:
        """Return whether a rank has set `stop_training`, and set it on all. **Collective**: every rank."""
        if self.runner.distributed:
            self.stop_training = any(all_gather_object(self.stop_training))
        return self.stop_training

    def _call_after_epoch(self, done: int, left_by: str | None) -> None:
        """Call the hooks after an epoch; where this rank has left it early, and alone, the error says so."""
        try:
            self.runner.call_hook("after_train_epoch")
        except CollectiveMismatchError as error:
            self.iter = done
            if left_by is not None:
                error.add_note(
                    f"Rank {self.runner.rank} has left the loop after {counted(done, 'iteration')}, by {left_by}. "
                    "Leave it on all ranks in the same iteration, or stop after an epoch, for which one rank may ask"
                )
            raise

    def _end_training(self) -> None:
        """Warn of gradients that are not used, and let the model have the weights to evaluate."""
        self.runner.optim_wrapper.warn_of_open_window()
        self.runner.set_optimizer_mode(training=False)

    def _stop_if_asked(self) -> None:
        """Let the ranks stop here, if that was asked for and no gradients wait for their update.

        There may be no iteration after which the windows of several optimizers are all closed: after two of the
        longest, their gradients are lost.
        """
        wrapper = self.runner.optim_wrapper
        if wrapper.has_open_window:
            self._iters_open += 1
            if not isinstance(wrapper, OptimWrapperDict) or self._iters_open < 2 * wrapper.accumulative_counts:
                return
        self._iters_open = 0
        self.runner.agreement.stop_if_asked()

    def _too_many_batches(self) -> ConfigError:
        """Return the error for an epoch that has more batches than the length of the loader says."""
        expected = (self.epoch_end or 0) - self.epoch_begin
        return wrong_length(expected, f"has another one in epoch {self.epoch + 1}")

    def _endless_batches(self) -> Iterator[Batch]:
        """Yield the batches of the present pass and of those after it."""
        while True:
            set_epoch(self.dataloader, self.epoch)
            is_empty = self._begin.is_beginning
            for batch in self.even_batches.iterate(self._begin):
                is_empty = False
                yield batch
            if is_empty:
                raise no_batches(self.dataloader)
            self._complete_epoch()

    def _run_iter(self, batch_idx: int, batch: Batch) -> None:
        """Take a training step on a batch, and call the hooks before and after it."""
        runner = self.runner
        self._begin_iter(batch_idx, batch)
        moved = runner.to_device(batch.data)
        begin_compiled_step()
        # A repeated batch changes neither gradients nor running statistics.
        with nullcontext() if batch.is_own else buffers_kept(runner.model):
            try:
                outputs = self._step(moved, runner.optim_wrapper)
            except TypeError as error:
                _note_lists(error, batch.data)
                raise
        values = values_to_log(outputs)
        self._end_iter(batch_idx, batch, values)
        if self.iters_with_backward:
            return
        is_end = self.iter in (self.epoch_end, self.max_iters)
        if self.iters_without == _MOST_WITHOUT or is_end:
            told = (
                f"{counted(self.iters_without, 'iteration')} have made no backward pass by the optim wrapper: a loss "
                f"that `train_step` of {type(unwrap_model(runner.model)).__name__} only returns is recorded, and "
                "loss.backward() is neither accumulated nor averaged over ranks. Call "
                "optim_wrapper.update_params(loss)"
            )
            if is_end and self._writes == self._count_writes() and any("loss" in name for name in values):
                raise ConfigError(f"nothing is trained: {told}")
            if self.iters_without == _MOST_WITHOUT:
                runner.logger.warning("%s", told)

    def _count_writes(self) -> int:
        """Return how often the parameters have been written, also by steps around the optim wrapper.

        The number of states counts, too: an optimizer that writes into `parameter.data` leaves no other trace.
        """
        writes = sum(own._version for own in unwrap_model(self.runner.model).parameters() if not own.is_inference())
        return writes + sum(len(optimizer.state) for optimizer in self.runner.optim_wrapper.optimizers)

    def _begin_iter(self, batch_idx: int, batch: Batch) -> None:
        runner = self.runner
        self.samples = batch.samples
        runner.optim_wrapper.begin_iteration(self.iter, None if self.max_epochs is None else self.epoch_end)
        runner.optim_wrapper.count_samples(batch.samples, batch.mean_samples)
        runner.hooks.call("before_train_iter", runner, batch_idx=batch_idx, data_batch=batch.data)
        self._backward_passes = runner.optim_wrapper.inner_count

    def _end_iter(self, batch_idx: int, batch: Batch, outputs: dict[str, Any]) -> None:
        runner = self.runner
        if runner.optim_wrapper.inner_count == self._backward_passes:
            note_no_backward(resolve(None))
            self.iters_without += 1
        else:
            self.iters_with_backward += 1
        self.is_ending_iter = True  # it counts in checkpoints that hooks save now
        runner.hooks.call("after_train_iter", runner, batch_idx=batch_idx, data_batch=batch.data, outputs=outputs)
        self.is_ending_iter = False
        self.iter += 1
        note_trained()
        if self.frozen_before is not None:
            self._tell_of_frozen(self.frozen_before)
            self.frozen_before = None
        runner.saving.collect()
        self.iter_ended = perf_counter()

    def _tell_of_frozen(self, before: Collection[str]) -> None:
        """Warn, after the first iteration of a resumed training, of parameters that it freezes or trains otherwise.

        Only now, as a step may freeze a part of the model for a while, such as the discriminator of a GAN.

        Args:
            before: the names of those that were frozen when the checkpoint was saved.
        """
        named = {name: one.requires_grad for name, one in unwrap_model(self.runner.model).named_parameters()}
        trained = [name for name, is_trained in named.items() if is_trained and name in before]
        frozen = [name for name, is_trained in named.items() if not is_trained and name not in before]
        for now, former, names in (("trained", "frozen", trained), ("frozen", "trained", frozen)):
            if names:
                self.runner.logger.warning(
                    "%s now, but %s when the checkpoint was saved: %s. If that is not on purpose, what had changed it "
                    "has not run again: code that does so in one epoch must do it in all later ones, as in `if "
                    "runner.epoch >= 2`",
                    now, former, listed(names),
                )  # fmt: skip

    def _make_up_validation(self, done: int, last: int) -> None:
        """Validate if the checkpoint was saved just before a validation, as checkpoints at regular intervals are.

        So a resumed run has all the metrics of a run that was never interrupted.
        """
        loop = self.runner.val_loop
        if done and loop is not None and loop.at_iter != self.iter and self._is_validation_due(done, last):
            self.runner.logger.info("validating first: the checkpoint was saved just before a validation")
            if self._begin.random is None:
                with random_state_kept():
                    loop.run()
                return
            set_random_state(self._begin.random)
            loop.run()
            self._begin = replace(self._begin, random=random_state())

    def _restore_random_state(self) -> None:
        """Go on with the random numbers of the checkpoint, if the training resumes."""
        if self._begin.random is not None:
            set_random_state(self._begin.random)
            self._begin = replace(self._begin, random=None)
            self._has_begun = True  # ranks draw different numbers already

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
        dataloader: this rank's shard of the data, with a length. Ranks may hold unequal amounts; see `EvenBatches`.
        max_epochs: number of passes.
        val_begin: the epoch after which the first validation may come, also the one at the end.
        val_interval: number of epochs from one validation to the next; the last epoch also ends in one.
        dynamic_intervals: pairs (epoch, interval): from that epoch on, that interval holds.
        batch_size_of: returns what a batch counts for, if that is not its number of samples: for instance its number of
            tokens. The gradient of an update is the mean over what it counts, on all ranks.
            A batch that counts for 0 may have any loss, but needs finite gradients, as torch's losses with
            `ignore_index` have: divide a mean of your own by at least 1.
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
        if self.even_batches.length is None:
            raise ConfigError(
                "`train_dataloader` must have a length to be counted in epochs, but "
                f"{type(dataloader).__name__} has none. Use train_cfg=dict(by_epoch=False, "
                "max_iters=...)"
            )
        if self.even_batches.length == 0:
            raise no_batches(dataloader)
        require_count("max_epochs", max_epochs)
        self.max_epochs: int = max_epochs
        self.max_iters = self.max_epochs * self.epoch_length

    def resume(self, iteration: int, epoch: int, begin: Position) -> None:
        """Go on after so many iterations and epochs, and let `max_iters` be as the rest of the data needs."""
        super().resume(iteration, epoch, begin)
        self.max_iters = max(iteration, self._iters_until(self.max_epochs))

    def run(self) -> None:
        """Train until `max_epochs`, validating in between."""
        self.makes_up_validations = True
        self._prepare()
        self._tell_if_complete(self.epoch, self.max_epochs, "epoch")
        self.runner.call_hook("before_train")
        if self.iter == self.epoch_begin:
            self._make_up_validation(self.epoch, self.max_epochs)
            self._restore_random_state()  # what draws a number before the first batch did so, too
        while self.epoch < self.max_epochs and not self._is_stopped():
            begin, end = self.epoch_begin, self.epoch_end
            self._run_epoch()
            self._is_stopped()  # whether the validation that follows is the last one depends on it
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
        self._stop_if_asked()
        for batch_idx, batch in enumerate(self.even_batches.iterate(self._begin), start=self._begin.batches):
            if self.iter == self.epoch_end:
                raise self._too_many_batches()
            self._run_iter(batch_idx, batch)
            self._stop_if_asked()
        self.runner.call_hook("after_train_epoch")
        self._complete_epoch()


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """A loop that trains for a number of iterations, with as many passes through the data as needed.

    Args:
        runner: the run; its model is trained.
        dataloader: this rank's shard of the data.
        max_iters: number of iterations.
        val_begin: the iteration after which the first validation may come, also the one at the end.
        val_interval: number of iterations from one validation to the next; the last iteration also ends in one.
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
        self.makes_up_validations = True
        self._prepare()
        self._tell_if_complete(self.iter, self.max_iters, "iteration")
        batches = self._endless_batches()
        self.runner.call_hook("before_train")
        self._make_up_validation(self.iter, self.max_iters)
        self.runner.call_hook("before_train_epoch")
        self._begin_training()
        while self.iter < self.max_iters and not self.stop_training:
            self._stop_if_asked()
            self._run_iter(self.iter, next(batches))
            self._validate_if_due(self.iter, self.max_iters)
        self._end_training()
        self._call_after_epoch(self.iter, "`stop_training`" if self.stop_training else None)
        self.runner.call_hook("after_train")


def wrong_length(expected: int, what: str) -> ConfigError:
    """Return the error for a loader that yields more or fewer batches than its length says."""
    return ConfigError(
        f"`train_dataloader` must have {expected} iterations in every epoch, as its length says, but {what}. Let "
        "`__len__` of the sampler or the dataset say what it yields, the same in every epoch, or count iterations: by "
        "train_cfg=dict(by_epoch=False, max_iters=...), in a loop by hand by session.iterations(count)"
    )


def no_batches(loader: Any, name: str = "train_dataloader") -> ConfigError:
    """Return the error for a loader that yields nothing."""
    why = ": its samples do not fill one, and drop_last=True" if getattr(loader, "drop_last", False) else ""
    return ConfigError(f"`{name}` must yield at least one batch per pass, but yields none{why}")


def _note_lists(error: TypeError, batch: Any) -> None:
    """Add to an error of a step that a batch has lists of tensors, as the default collate function makes of lists."""
    items = batch.items() if isinstance(batch, Mapping) else ()
    lists = [repr(key) for key, value in items if isinstance(value, list) and value and isinstance(value[0], Tensor)]
    if lists:
        error.add_note(
            f"{listed(lists)} of the batch: a list of tensors, as torch's collate function makes of samples that have "
            "lists, and pseudo_collate of all. Give tensors there, as by data.with_format('torch') of the package "
            "datasets, or a `collate_fn`; or let the model, or a data preprocessor, take lists"
        )


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
