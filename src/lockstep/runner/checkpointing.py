"""Saving a run that trains: at once, while it goes on, or where a signal stops it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from lockstep.calls import unlike_most
from lockstep.checkpoint import Planner, save_state
from lockstep.checkpoint.background import BackgroundSaver
from lockstep.dataset.random_state import random_state
from lockstep.dist.agreement import differing
from lockstep.errors import DistError, DivergenceError, Preempted, ranks_in_words
from lockstep.location import Location, RemotePath
from lockstep.model import ModelWrapper, unwrap_model
from lockstep.optim import OptimWrapperDict
from lockstep.weights import describe_model

_NOT_WRITTEN = "a checkpoint could not be written"
_logger = logging.getLogger("lockstep.runner")


class Save(NamedTuple):
    """A checkpoint to write.

    Attributes:
        directory: the checkpoint.
        epoch: number of complete epochs.
        iteration: number of complete iterations.
        is_last: whether it becomes the checkpoint to resume from.
        has_optimizer: whether it has the optimizer's state.
        meta: further entries of its metadata.
        may_fail: whether a failure is only a warning.
        when_ended: called with whether the checkpoint is complete.
    """

    directory: Location
    epoch: int
    iteration: int
    is_last: bool
    has_optimizer: bool
    meta: Mapping[str, Any]
    may_fail: bool
    when_ended: Callable[[bool], None] | None


class Saving:
    """Writes the checkpoints of a run, one at a time.

    Args:
        run: the run, a `TrainRun`.

    Attributes:
        saved_iter: number of iterations after which the last checkpoint was saved that has the optimizer's state.
        saved_epoch: number of complete epochs in it.
        is_stopping: whether all ranks save the last checkpoint, at which they stop.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._planner = Planner([run.run_dir])
        self._background = BackgroundSaver(self._planner)
        self._pending: Save | None = None  # in the background
        self._has_warned = False
        self.saved_iter = self.saved_epoch = 0
        self.is_stopping = False

    @property
    def begun_iter(self) -> int:
        """As `saved_iter`, also of a checkpoint that is still being saved."""
        pending = self._pending
        if pending is not None and pending.is_last and pending.has_optimizer:
            return pending.iteration
        return self.saved_iter

    def save(self, save: Save, *, async_save: bool) -> None:
        """Save what resuming needs; see `TrainRun.save_checkpoint`. **Collective**: every rank."""
        self.finish()
        run = self._run
        last_of = _root_of(run, save.directory) if save.is_last else None
        if save.has_optimizer and run.optim_wrapper.has_open_window and save.iteration != run.max_iters:
            self._warn_of_open_window(save)
        _require_same_updates(run)
        with run.evaluated(), run.train_loop.as_resumed():
            state, meta = self._state(save)
            if isinstance(run.model, ModelWrapper):
                run.model.begin_save()  # after hooks: ReplicaCheckHook compares more, and its error says since when
            with self._ending(save):
                if async_save and run.agreement.is_open:  # else the ranks have no store that they can share
                    job = self._background.start(save.directory, state, meta, last_of)
                    job.add_done_callback(partial(self._stop_if_fatal, save))
                    self._pending = save
                else:
                    save_state(save.directory, state, meta, last_of, self._planner)

    def _warn_of_open_window(self, save: Save) -> None:
        """Say, once, that gradients that wait for their update are not saved."""
        if self._run.agreement.is_asked:
            return  # the run goes on to the update, and resumes from the checkpoint that it saves then
        if not self._has_warned:
            _logger.warning(
                "%s is saved inside an accumulation window: a run that resumes from it, or from another one like it, "
                "loses the gradients of the backward passes since the last update. In a training by epochs, end "
                "windows with them by accumulate_across_epochs=False, beside `accumulative_counts`. By iterations, "
                "save (and validate, for save_best) after a multiple of `accumulative_counts`",
                save.directory.name,
            )  # fmt: skip
        self._has_warned = True

    def collect(self) -> None:
        """Do what was to be done when the save in the background was complete, if it is. No collective."""
        # An error that ends the training is raised where all ranks have agreed to stop.
        save, job = self._pending, self._background.job
        if save is not None and job is not None and job.done() and not _is_fatal(save, job.exception()):
            self.finish()

    def _stop_if_fatal(self, save: Save, job: Future[None]) -> None:
        if _is_fatal(save, job.exception()):
            self._run.agreement.ask(_NOT_WRITTEN)

    def finish(self) -> None:
        """Wait until the save in the background is complete.

        Raises:
            OSError: some rank could not write it. It is the same on every rank.
        """
        if (save := self._pending) is not None:
            with self._ending(save):
                try:
                    self._background.wait()
                finally:
                    if self._background.job is None:  # else the wait was interrupted, and the save goes on
                        self._pending = None

    @contextmanager
    def until_complete(self) -> Iterator[None]:
        """Wait for the save in the background at the end; after an error, not for long."""
        try:
            yield
        except BaseException:
            self._pending = None  # nobody may take it for complete
            self._background.abandon()
            raise
        self.finish()

    @contextmanager
    def at_stop(self) -> Iterator[None]:
        """Save where a signal stops the training, which runs inside, unless that has been saved already.

        **Collective**: every rank.

        Raises:
            OSError: the training was stopped because a checkpoint could not be written.
        """
        run = self._run
        try:
            yield
        except Preempted as stop:
            self.finish()
            self.is_stopping = True
            is_saved = run.iter <= self.saved_iter and (run.max_epochs is None or run.epoch <= self.saved_epoch)
            # Since then it may have validated, which a training that resumes must know where it makes up for none.
            may_have_validated = run.iter > 0 and not run.train_loop.makes_up_validations
            if not is_saved or run.train_loop.ends_here or may_have_validated:
                run.save_checkpoint(run.checkpoint_dir, f"iter_{run.iter}", epoch=run.epoch, iteration=run.iter)
            done = "before the first iteration: nothing is saved. Start the same command again"
            if run.iter > 0:
                done = f"after iteration {run.iter}, which is saved. Start again with resume=True, or --resume"
            _logger.warning("%s: stopped %s (exit code %d)", stop.reason, done, stop.EXIT_CODE)
            raise

    def _state(self, save: Save) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is saved, and the metadata."""
        run = self._run
        model_state, core = run.strategy.model_state(), unwrap_model(run.model)
        checkpoint: dict[str, Any] = {
            "model": model_state,
            "meta": {
                **save.meta,
                "weights": describe_model(core, model_state),
                "frozen": [name for name, parameter in core.named_parameters() if not parameter.requires_grad],
                "strategy": type(run.strategy).__name__,
                "epoch": save.epoch,
                "iter": save.iteration,
                "position": run.train_loop.position(save.epoch, save.iteration),
                "world_size": run.world_size,
                "data_shares": run.data_shard.size,
                "rank_states": run.world_size,
                "seed": run.seed,
                "validated_iter": None if run.val_loop is None else run.val_loop.at_iter,
                "has_optimizer": save.has_optimizer,
                "optim_wrapper": run.optim_wrapper.extra_state(),
                "begun_with": run.begun_with,
                "load_from": run.args.beginning,
                "param_schedulers": [scheduler.state_dict() for scheduler in run.param_schedulers],
                "schedules_by_epoch": [getattr(scheduler, "by_epoch", None) for scheduler in run.param_schedulers],
            },
        }
        if save.has_optimizer:
            checkpoint["optimizer"] = run.strategy.optim_state()
        run.call_hook("before_save_checkpoint", checkpoint=checkpoint)
        meta = checkpoint.pop("meta")
        loop = run.train_loop
        own = {"random": random_state(), "data": loop.even_batches.state(), "stops": loop.will_stop(meta["position"])}
        checkpoint["ranks"] = {str(run.rank): own}  # the state of this rank alone
        return checkpoint, meta

    @contextmanager
    def _ending(self, save: Save) -> Iterator[None]:
        """Do what follows a save, which is written inside. An error of it is the same on every rank."""
        ended = save.when_ended or (lambda is_complete: None)
        try:
            yield
        except OSError as error:
            ended(False)
            if _is_fatal(save, error):
                raise
            _logger.warning("%s. Training goes on without it, because of on_save_error='warn'", error)
        else:
            if self._pending is save:  # it has only begun
                return
            if save.is_last and save.has_optimizer:
                self.saved_iter, self.saved_epoch = save.iteration, save.epoch
            _logger.debug("saved %s", save.directory)
            ended(True)


def _is_fatal(save: Save, error: BaseException | None) -> bool:
    """Return whether an error of a save ends the training; with `may_fail`, one of the disk does not."""
    is_of_disk = isinstance(error, OSError) and not isinstance(error, DistError)  # CollectiveTimeoutError is both
    return error is not None and not (save.may_fail and is_of_disk)


def _require_same_updates(run: Any) -> None:
    """Raise a `DivergenceError` on every rank if ranks have trained with other optimizers, or otherwise often.

    Each rank then has updated its replica or, which nothing else shows, its shards of other parameters.

    **Collective**: every rank. **Cost**: one exchange between the hosts.
    """
    wrapper = run.optim_wrapper
    parts = wrapper.items() if isinstance(wrapper, OptimWrapperDict) else [("", wrapper)]
    if (by_rank := differing({name: part.inner_count for name, part in parts})) is None:
        return
    name = next(name for name in by_rank[0] if len({counts[name] for counts in by_rank}) > 1)
    counts = dict(enumerate(counts[name] for counts in by_rank))
    ranks = unlike_most(counts)
    usual = next(count for rank, count in counts.items() if rank not in ranks)
    raise DivergenceError(
        f"all ranks must train the same parts of the model, but the optimizer{f' `{name}`' if name else ''} has had "
        f"{counts[ranks[0]]} backward passes on {ranks_in_words(ranks)} of {run.world_size}, and {usual} on the "
        "others, where a checkpoint was to be saved. What chooses an optimizer, or whether there is a step, must "
        "choose alike on every rank: by the iteration, by random numbers of a seed that all ranks share, or by a value "
        "that was reduced over the ranks",
        name=name,
        ranks=ranks,
    )


def _root_of(run: Any, directory: Location) -> Location:
    """Return where the pointer to the last checkpoint is kept: the work_dir, or its counterpart in a bucket."""
    if not isinstance(directory, RemotePath):
        work_dir: Location = run.work_dir
        return work_dir
    return directory.parent.parent if directory.parent.name == run.run_dir.name else directory.parent
