"""`OwnLoop`: the training loop of a session, whose iterations run in the user's own code."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dataset.position import deals_batches
from lockstep.dataset.random_state import set_random_state
from lockstep.device import get_device
from lockstep.dist.agreement import differing
from lockstep.errors import ConfigError, Preempted
from lockstep.evaluator.evaluator import plain_value
from lockstep.groups import this_rank
from lockstep.logging.meters import kept_scalar
from lockstep.model import ModelWrapper, unwrap_model
from lockstep.model.compiling import begin_compiled_step
from lockstep.model.wrapper import all_entered, forwarded
from lockstep.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from lockstep.runner.loops import DEFAULT_INTERVAL, CountSamples, TrainLoop, no_batches, wrong_length
from lockstep.runner.preemption import ranks_meet
from lockstep.runner.run import TrainRun
from lockstep.runner.seeds import random_state_kept
from lockstep.runner.uneven_inputs import Batch, buffers_kept
from lockstep.session.epoch_body import EpochBody, rest_of_body
from lockstep.session.schedules import schedules_at, warn_of_length, warn_of_rest
from lockstep.tree import tree_map

_logger = logging.getLogger(__name__)
_HALF = (torch.float16, torch.bfloat16)


_RUNS_REST = (
    "the checkpoint was saved in the body of epoch %d, after its batches: the body runs once more, without batches, "
    "for what it lacks, such as a validation"
)


class OwnLoop(TrainLoop):
    """A training loop whose iterations run in the user's own code.

    Args:
        run: the run.
        batch_size_of: what a batch counts for; by default its number of samples.
    """

    makes_up_validations = True  # the user's code validates again

    def __init__(self, run: TrainRun, batch_size_of: CountSamples | None = None) -> None:
        super().__init__(run, run.train_dataloader, 1, 1, None, batch_size_of)
        if self.even_batches.length == 0:
            raise no_batches(self.dataloader, "dataloader")
        # Without a length, iterations are counted, as in an iteration-based loop of a Runner.
        self.max_epochs = None if self.even_batches.length is None else 0
        if self.max_epochs is None:
            self.val_interval = DEFAULT_INTERVAL
        self.max_iters = 0
        self.counts = True  # whether the present batch is this rank's own
        self.deals_batches = deals_batches(self.dataloader)  # whether ranks take the present batches in turns
        self.has_data = True  # otherwise the numbers of iterations take the place of batches
        self._values: dict[str, Any] = {}
        self.batch: Any = None  # of the present iteration, on the host
        self._is_open = False  # within an epoch
        self._may_begin = False  # a pass: once in each of `epochs`
        self._told = 0, 0  # an iteration after which hooks were told of metrics, and how often
        # What had been done in the rest of an epoch's body when the checkpoint that is resumed from was saved there.
        self._before_rest: dict[str, Any] | None = None
        self.is_stepping = False  # within an iteration
        self.is_evaluating = False  # within a pass over data to evaluate on
        self._is_uncounted = False  # an iteration has begun, and has not ended: the user's code may have left it
        self._present: tuple[int, Batch] | None = None  # the number and the batch of that iteration
        self._iterated = False  # since the last look at the count of backward passes
        self._counted = self._backward_passes = 0
        self._has_warned = False
        self._body = EpochBody(run)
        self._to_save: list[tuple[str | None, bool]] = []  # names, and whether in the background
        self._is_complete = False
        self.unsaved: list[str] = []  # what to say at the end of a script whose loop was left by `break`

    def run(self) -> None:
        """Raise an error: the user's code runs this loop."""
        raise RuntimeError("the loop of a session is run by the user's own code")

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left."""
        run = self.runner
        if self.max_epochs is None:
            what = f"{type(self.dataloader).__name__} has none" if self.has_data else "none was handed in"
            raise ConfigError(
                f"epochs must be those of a data loader with a length, but {what}. Use `for batch in "
                "session.iterations(count)`"
            )
        self.max_epochs, self.max_iters = count, max(self.iter, self._iters_until(count))
        run.optim_wrapper.initialize_count_status(run.model, self.iter, self.max_iters)
        self._counted = run.optim_wrapper.inner_count
        self._is_complete = False
        run.call_hook("before_train")
        is_rest = self._begin_rest(count)
        if not is_rest:
            self._tell_if_complete(self.epoch, count, "epoch")
        # In what is left of an epoch, a schedule may have no step to make.
        first, begun_at = self.epoch, set() if self._begin.batches else schedules_at(self.runner)
        self._go_on_drawing()  # a validation, and a stop in it, may come before the batches
        while is_rest or (self.epoch < count and not self._is_stopped()):
            before, self._may_begin = self.epoch - is_rest, True
            self._body.begin()
            try:
                yield before
            except GeneratorExit:  # by `break`
                self._body.is_running = self._body.rest_follows = False
                # It has ended: a checkpoint that is still to be saved is not to end the training that resumes from it.
                self.stop_training = False
                raise
            if self._is_open or self._body.has_changed:
                run.saving.saved_iter = 0  # what was saved in this body lacks the rest of it
            if self._is_open:
                self._body.rest_follows = False
                self._end_epoch()
            self._body.note_end(self.epoch)
            self._body.end()
            is_rest = False
            if self.epoch in (first + 2, count):
                warn_of_rest(run, begun_at)
                warn_of_length(run, begun_at, self.epoch - first, count - self.epoch)
                begun_at = set()
            if self.epoch == before:
                raise _wrong_passes(f"epoch {before} has not begun to")
        self._body.is_running = False
        self._end_training()
        run.call_hook("after_train")
        run.call_hook("after_run")
        self._is_complete = True

    def position(self, epoch: int, iteration: int) -> dict[str, Any]:
        """Return the position in the data; see `TrainLoop.position`.

        After an epoch's batches, where a schedule may still make a step, the epoch has not ended: a training that
        resumes there goes through the rest of its body. So it does after a stop in a validation. Where the epoch has
        ended before the rest of its body, the records say whether that is still to run; see `rest_of_body`.
        """
        if self._goes_on_in_body:
            before = self._body.counts
            done = iteration - before["epoch_begin"]
            found = self.even_batches.position(before["epoch"], done, before["_begin"])
            return {**found, **self._body.position(has_ended=not self._is_open)}
        own: dict[str, Any] = {} if self._body.counts else self._body.position()
        if self._body.rest_follows:
            at, told = self._told
            own = {"rest": {"told": told if at == iteration else 0, **self._body.done_in_rest()}}
        return {**super().position(epoch, iteration), **own}

    def as_resumed(self) -> AbstractContextManager[None]:
        """Have the schedules and options of optimizers from which the rest of the body runs once more."""
        return self._body.as_resumed() if self._goes_on_in_body or self._body.rest_follows else nullcontext()

    @property
    def _goes_on_in_body(self) -> bool:
        """Whether a training that is resumed now goes through the rest of this body, after the batches."""
        return bool(self._body.counts) and (self._body.has_stopped or self._is_open)

    def resume_within(self, position: Mapping[str, Any], *, will_stop: bool) -> None:
        """Pass over those calls of `log_metrics` in the body of this epoch that have been made before the stop."""
        self._will_stop = will_stop
        self._body.restore(position, in_batches=bool(self._begin.batches))
        rest = position.get("rest")
        if rest is not None:
            self._before_rest = {"told": int(rest["told"]), "logged": int(rest["logged"])}
            self._before_rest["has_changed"] = bool(rest["has_changed"])

    @property
    def ends_here(self) -> bool:
        """Whether the training ends here: never where it can be stopped, since the user's code validates before."""
        return False

    def iterations(self, count: int) -> Iterator[Any]:
        """Yield this rank's batches until `count` iterations are complete, of as many passes as that takes."""
        run = self.runner
        self.max_epochs, self.max_iters, self.val_interval = None, count, DEFAULT_INTERVAL
        run.optim_wrapper.initialize_count_status(run.model, self.iter, count)
        self._counted = run.optim_wrapper.inner_count
        self._tell_if_complete(self.iter, count, "iteration")
        self._is_complete = False
        run.call_hook("before_train")
        run.call_hook("before_train_epoch")
        self._begin_training()
        if self.iter < count and not self.stop_training:
            with run.saving.at_stop():
                self._stop_if_asked()
                yield from self._batches(self._endless_batches(), self.iter)
        self._warn_of_missing_steps("the training")
        self._end_training()
        self._call_after_epoch(self.iter, "stop()" if self.stop_training else None)
        run.call_hook("after_train")
        run.call_hook("after_run")
        self._is_complete = True

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches in the present epoch; the code that receives one makes one training step."""
        if not self._may_begin:
            raise _wrong_passes("this is one more" if self.max_epochs else "none has begun")
        is_rest, self._may_begin = self._body.rest_follows, False
        self._is_open = not is_rest
        if self._body.begin_batches(are_resumed=is_rest or bool(self._begin.batches)):
            self.runner.logger.info(
                "the body of this epoch had run before the stop up to its batches: schedules and options of optimizers "
                "that it has changed again are those of the checkpoint"
            )
        if is_rest:
            self._body.end_first_part()
            self.runner.set_optimizer_mode(training=False)
            self._body.end_batches()
            return
        self._tell_of_rest()
        if isinstance(self.runner.model, ModelWrapper):
            self.runner.model.begin_epoch()
        self.runner.call_hook("before_train_epoch")
        self._begin_training()
        self._go_on_drawing()
        with self.runner.saving.at_stop():
            try:
                self._stop_if_asked()
            except Preempted:
                self._body.go_back()
                raise
            self._body.end_first_part()
            try:
                yield from self._batches(self.even_batches.iterate(self._begin), self._begin.batches)
            except GeneratorExit:  # by `break`
                self._body.end_batches()
                raise
        if self.iter < (self.epoch_end or 0):
            self.runner.logger.warning("%s", wrong_length(
                (self.epoch_end or 0) - self.epoch_begin,
                f"had {self.iter - self.epoch_begin} in epoch {self.epoch + 1}, after which `session.iter` goes on as "
                "if it had had all of them",
            ))  # fmt: skip
        self.runner.set_optimizer_mode(training=False)  # for a validation of the user's own
        self._body.end_batches()
        if self.runner.param_schedulers:
            # The user's code may step them now, which the checkpoint of this epoch must have. It counts already.
            self._count_epoch()
        else:
            counts, self._body.rest_follows = self._counts(), True
            self._body.end_batches()
            self._end_epoch()
            self._body.counts = counts

    def _begin_rest(self, count: int) -> bool:
        """Return whether the rest of the last epoch's body runs once more, as after a kill in it; of `count` at most.

        The checkpoint of the epoch was saved before. Hooks are told what they had been told since, as far as it is on
        record, and the calls of `log_metrics` that gave it are passed over.
        """
        before, run = self._before_rest, self.runner
        if before is None or self.iter == 0 or self.iter != self.epoch_begin:
            return False
        self._told = self.iter, before["told"]
        rest = rest_of_body(run, self.epoch, before)
        if rest.logged:
            run.logger.info(
                "hooks are told again what log_metrics() was given after the checkpoint that is resumed from was saved"
            )
            for metrics in rest.logged:
                self._tell_hooks(metrics)
        if not rest.is_left or self.epoch > count:
            return False
        self._body.rest_follows = True
        self._body.restore({"logged": before["logged"] + len(rest.logged)}, in_batches=True)
        run.logger.info(_RUNS_REST, self.epoch)
        return True

    def _go_on_drawing(self) -> None:
        """Draw random numbers from where the checkpoint is, which a stop before the next batch saves again."""
        if self._begin.random is not None:
            set_random_state(self._begin.random)

    def _counts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("epoch", "epoch_begin", "epoch_end", "_begin")}

    def _count_epoch(self) -> None:
        """Count the present epoch, of whose body the rest is still to run."""
        self._body.counts, self._is_uncounted = self._counts(), False
        self.iter = self.epoch_end or 0
        self._complete_epoch()

    @property
    def has_backward(self) -> bool:
        """Whether the present iteration has made a backward pass."""
        return self.runner.optim_wrapper.inner_count > self._backward_passes

    @property
    def _was_left(self) -> bool:
        """Whether the user's code has left the batches of this epoch by `break`."""
        return self._is_open and not self.is_stepping and not self._body.counts

    def _tell_of_rest(self) -> None:
        """Say what the user's code sees of an epoch that goes on after some of its batches."""
        done, left = self._begin.batches, (self.epoch_end or 0) - self.iter
        if done and left:
            self.runner.logger.info(
                "the loader yields the %d batches of the epoch that are left: enumerate() of it begins at 0, and "
                "session.batch_idx at %d", left, done,
            )  # fmt: skip
        elif done:
            self.runner.logger.info(_RUNS_REST, self.epoch + 1)

    def _batches(self, batches: Iterator[Batch], start: int) -> Iterator[Any]:
        """Yield each batch for one iteration of the user's code."""
        run, is_endless = self.runner, self.max_epochs is None
        is_plain = unwrap_model(run.model) is run.model and type(run.optim_wrapper) is OptimWrapper
        nothing: AbstractContextManager[None] = nullcontext()
        for batch_idx, batch in enumerate(batches, start=start):
            if not is_endless and self.iter == self.epoch_end:
                raise self._too_many_batches()
            self.counts, self._values, self.batch = batch.is_own, {}, batch.data
            self.rates_of_step.clear()
            self._begin_iter(batch_idx, batch)
            self.is_stepping = self._is_uncounted = True
            self._present = batch_idx, batch
            try:
                with nothing if is_plain else self._led(), nothing if batch.is_own else buffers_kept(run.model):
                    moved = run.to_device(batch.data) if self.has_data else self.iter
                    begin_compiled_step()
                    yield moved
            finally:
                self.is_stepping = False
            self._iterated = True
            self._end_iter(batch_idx, batch, self._values)
            if is_endless and (self.iter >= self.max_iters or self.stop_training):
                return
            self._stop_if_asked()

    def _end_iter(self, batch_idx: int, batch: Batch, outputs: dict[str, Any]) -> None:
        super()._end_iter(batch_idx, batch, outputs)
        self._is_uncounted, self.batch, self._present = False, None, None
        self._save_requested()
        self.iter_ended = perf_counter()

    def end_left_iter(self) -> None:
        """End an iteration that the user's code has left after its step, which hooks must see, too.

        Not where it is left, since that may be by an error of this rank alone.
        """
        if self._present is not None and self._is_uncounted and not self.is_stepping and self.has_backward:
            self._end_iter(*self._present, self._values)

    def stop_in_validation(self) -> None:
        """Stop here if that was asked for, on all ranks: a resumed training goes through the validation anew."""
        try:
            self.runner.agreement.stop_if_asked()
        except Preempted:
            if self._was_left:
                self._save_requested()
                self._count_epoch()
            if self._body.counts:  # a resumed training goes through the rest of the body anew
                self._body.has_stopped = True
                self.runner.saving.saved_iter = self.iter - 1  # another checkpoint may be of after the body
            self._body.go_back()
            raise

    def require_iteration(self, what: str, remedy: str) -> None:
        """Refuse a call in no iteration: no record would have its values, and no count its update."""
        if self.is_evaluating or not self._is_uncounted:
            where = "a pass over a loader of prepare_evaluation()" if self.is_evaluating else "no iteration"
            raise RuntimeError(f"{what}, but was called in {where} ({this_rank()}). {remedy}")

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values to the record of the present iteration."""
        for name, value in values.items():
            self._values[name] = kept_scalar(name, value)

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Call the hooks of a validation."""
        self.end_left_iter()
        run, metrics = self.runner, {name: plain_value(value) for name, value in metrics.items()}
        if not self.is_stepping and self._body.passes_over_metrics():
            run.logger.info("log_metrics() is passed over: this part of the epoch's body had logged before the stop")
            return
        if by_rank := differing(metrics):
            metrics = by_rank[0]  # where they differ in last digits alone, as on unlike processors
            other = next((rank for rank, one in enumerate(by_rank) if not _close(one, metrics)), None)
            if other is not None:
                raise ConfigError(
                    f"log_metrics() must be given the same values on every rank, but has {metrics} on rank 0 and "
                    f"{by_rank[other]} on rank {other} (rank {run.rank} of {run.world_size}). Compute them from what "
                    "session.gather() returns in a pass through a loader of prepare_evaluation(), or reduce them"
                )
        self._tell_hooks(metrics)

    def _tell_hooks(self, metrics: dict[str, Any]) -> None:
        run = self.runner
        if run.val_loop is None:
            # What hooks ask of a loop that validates.
            run.val_loop = SimpleNamespace(dataloader=None, evaluator=None, length=None, units={}, metric_names=None)
        with self._counted_so_far(), random_state_kept():
            at, told = self._told
            self._told = self.iter, 1 + (told if at == self.iter else 0)
            run.val_loop.metrics, run.val_loop.at_iter, run.last_evaluation = metrics, self.iter, run.val_loop
            run.call_hook("after_val_epoch", metrics=metrics)
            run.call_hook("after_val")

    @contextmanager
    def _counted_so_far(self) -> Iterator[None]:
        """Count the iteration that has made its step, and an epoch left by `break`, in what hooks save now."""
        before, counts = self._counts() | {"iter": self.iter, "_is_uncounted": self._is_uncounted}, self._body.counts
        if self._was_left:
            self._count_epoch()
        elif self._is_uncounted and self.has_backward:
            self.iter += 1
        try:
            yield
        finally:
            vars(self).update(before)
            self._body.counts = counts

    def save(self, name: str | None, async_save: bool) -> None:
        """Save a checkpoint after the present iteration, or now if there is none."""
        if self.is_stepping:
            self._to_save.append((name, async_save))
            self.runner.logger.info("%s is saved at the end of the present iteration", name or f"iter_{self.iter + 1}")
            return
        self.end_left_iter()
        self._save_requested()  # in an iteration that was left without a step
        self._to_save.append((name, async_save))
        self.unsaved.clear()
        with self._counted_so_far() if self._body.is_running else nullcontext():
            self._save_requested()

    def _save_requested(self) -> None:
        """Save the checkpoints for which `save` was called. An iteration that was left counts once it has a step."""
        run = self.runner
        done = self.iter + (self._is_uncounted and self.has_backward)
        while self._to_save:
            name, async_save = self._to_save.pop(0)
            saved = run.save_checkpoint(
                run.checkpoint_dir, name or f"iter_{done}", epoch=self.epoch, iteration=done, async_save=async_save
            )
            run.logger.info("%s %s, after %d iterations", "saving" if async_save else "saved", saved, done)

    def save_at_close(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Save what `save` was called for in an iteration that the user's code has left, also by an error.

        An error may have ended this rank alone. So several ranks save only if all of them come here.
        """
        if self._to_save:
            self._save_left(kind)
        if kind is None or kind is GeneratorExit:
            self._note_unsaved()
        if kind is None:
            tell_of_unsaved(self.unsaved)

    def _note_unsaved(self) -> None:
        """Note what a loop that is left early has trained since its last checkpoint.

        It is not saved: an error also leaves a loop by GeneratorExit, maybe on this rank alone, or with weights of NaN.
        """
        run, done = self.runner, self.iter + (self._is_uncounted and self.has_backward)
        is_meant = any(
            getattr(hook, "save_last", False) and getattr(hook, "save_optimizer", True) for hook in run.hooks
        )
        if run.rank == 0 and is_meant and done > run.saving.begun_iter and not self._is_complete:
            self.unsaved.append(
                f"the loop of {run.run_dir} was left after iteration {done}, and what it has trained since iteration "
                f"{run.saving.begun_iter} is in no checkpoint: `break` out of session.epochs() or session.iterations() "
                "saves nothing. Call session.stop() instead, which ends the training and saves it (`break` may still "
                "leave the batches of that epoch), or session.save() after the loop"
            )

    def _save_left(self, kind: type[BaseException] | None) -> None:
        names = ", ".join(name or "a checkpoint" for name, _ in self._to_save)
        try:
            if kind is not None and not ranks_meet():
                self._to_save.clear()
                raise RuntimeError("not all ranks have left the loop")
            self.is_stepping = False
            self.end_left_iter()
            self._save_requested()
        except Exception as fault:
            if kind is None:
                raise
            self.runner.logger.error("%s, asked for by save(), could not be saved: %s", names, fault)

    def _warn_of_missing_steps(self, where: str) -> None:
        """Warn, once, if iterations have made no backward pass through the optim wrapper."""
        count = self.runner.optim_wrapper.inner_count
        stepped, without = self.iters_with_backward, self.iters_without
        if self.has_data and 0 < stepped <= without and not self._has_warned:
            self._has_warned = True
            self.runner.logger.warning(
                "%d of %d iterations have made no call of session.step(loss), so that their batches count for nothing. "
                "To accumulate, give the Session accumulative_counts=..., and call it in each iteration",
                without, stepped + without,
            )  # fmt: skip
        if self._iterated and count == self._counted and not self._has_warned:
            self._has_warned = True
            names = list(self.runner.optim_wrapper) if isinstance(self.runner.optim_wrapper, OptimWrapperDict) else []
            self.runner.logger.warning(
                "%s has ended without a call of %s, so that the strategy has trained nothing. Call it "
                "in each iteration, instead of loss.backward(), optimizer.step() and optimizer.zero_grad()",
                where, f"optimizers[{names[0]!r}].update_params(loss)" if names else "session.step(loss)",
            )  # fmt: skip
        self._iterated, self._counted = False, count

    def _end_epoch(self) -> None:
        vars(self).update(self._body.take_counts())
        self.end_left_iter()
        self._save_requested()  # in an iteration that was left without a step
        self._is_uncounted = False
        self._warn_of_missing_steps(f"epoch {self.epoch}")
        self._is_open = False
        done, self.iter = self.iter, self.epoch_end or 0  # also where the epoch was left early
        if not self._body.has_ended:
            self._call_after_epoch(done, "`break` or `return`" if done < self.iter else None)
        self._body.has_ended = False
        self._complete_epoch()

    @contextmanager
    def _led(self) -> Iterator[None]:
        """Lead calls of the user's module through the strategy, for one iteration."""
        model, optim_wrapper = self.runner.model, self.runner.optim_wrapper
        core = unwrap_model(model)

        def call(*args: Any, **kwargs: Any) -> Any:
            with optim_wrapper.optim_context(model):
                return _in_float32(model(*args, **kwargs))

        with ExitStack() as stack:
            if isinstance(model, ModelWrapper):
                stack.enter_context(model.step_context(optim_wrapper))
            stack.enter_context(forwarded(core, call))
            if isinstance(core, nn.ModuleDict):  # several models, which are called one by one
                wrappers = optim_wrapper.values() if isinstance(optim_wrapper, OptimWrapperDict) else [optim_wrapper]
                if amp := [one for one in wrappers if isinstance(one, AmpOptimWrapper)]:
                    for part in core.values():
                        stack.enter_context(forwarded(part, partial(_call_in_half, part, amp)))
            yield


def tell_of_unsaved(unsaved: list[str]) -> None:
    """Warn, once, of what a loop that was left has not saved."""
    while unsaved:
        _logger.warning(unsaved.pop())


def _wrong_passes(fault: str) -> RuntimeError:
    return RuntimeError(
        f"the loader of session.prepare() must be gone through once in each of session.epochs(...), but {fault}. To "
        "look at a batch before, take one of your own DataLoader; a validation goes through a loader of "
        "prepare_evaluation(); session.iterations(count) counts iterations over any number of passes"
    )


def _close(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether metrics are the same, but for the last digits of numbers."""
    pairs = [(value, other.get(name)) for name, value in one.items()]
    return one.keys() == other.keys() and all(
        isinstance(mine, float) and isinstance(theirs, float) and math.isclose(mine, theirs, rel_tol=1e-5)
        for mine, theirs in pairs
        if repr(mine) != repr(theirs)
    )


def _call_in_half(model: nn.Module, wrappers: Sequence[AmpOptimWrapper], /, *args: Any, **kwargs: Any) -> Any:
    """Call one of several models under autocast; within `session.forward_context`, as it is."""
    if torch.is_autocast_enabled(get_device()):
        return model(*args, **kwargs)
    with all_entered(wrapper.autocast() for wrapper in wrappers):
        return _in_float32(model(*args, **kwargs))


def _in_float32(outputs: Any) -> Any:
    """Return the outputs of a forward pass under autocast with half precision converted back, for any loss function."""
    if not torch.is_autocast_enabled(get_device()):
        return outputs
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x, outputs)
