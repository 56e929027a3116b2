"""`Run`: the parts of a training, validation or test run.

A `Runner` builds one and passes it to loops, hooks and checkpoints: it is the `runner` argument of a hook. `Workspace`
holds what exists before anything is built, `Run` adds what every run has, and `TrainRun` what training needs in
addition. The modules of hooks and loops import this one, which has none of their types.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack
from weakref import ref

import torch
from rich.console import Console
from torch import nn

from lockstep.checkpoint.loading import Stored
from lockstep.dataset import DataShard
from lockstep.dataset.stream import end_workers
from lockstep.device import get_device
from lockstep.errors import ConfigError, no_attribute, require_one_of
from lockstep.location import Location, locate
from lockstep.logging import JsonLinesSink, MessageHub
from lockstep.model import unwrap_model
from lockstep.model.preprocessor import move_to_device
from lockstep.model.shards import reshard
from lockstep.optim import OptimWrapper, ParamScheduler
from lockstep.runner.arguments import RunnerArguments, named_loaders
from lockstep.runner.checkpointing import Save, Saving
from lockstep.runner.preemption import Agreement
from lockstep.runner.uneven_inputs import prefetching
from lockstep.strategy import Strategy
from lockstep.visualization import Visualizers
from lockstep.weights import Weights, load_weights, save_pretrained
from lockstep.weights.export import PretrainedOptions
from lockstep.weights.loading import REVISE_KEYS

_logger = logging.getLogger("lockstep.runner")


@dataclass(kw_only=True, eq=False)
class Workspace:
    """The ranks and the folder of a run: what exists before anything is built.

    Attributes:
        args: the arguments of the Runner.
        cfg: the config that the Runner was made from; None if there is none.
        work_dir: the folder of all runs of one experiment.
        rank: the rank of this process.
        world_size: number of processes.
        seed: the seed of all random numbers.
        run_dir: the folder of this run, within the work_dir.
        checkpoint_dir: where its checkpoints go by default: the run's folder, or its folder in the `out_dir` of
            CheckpointHook.
        stored: the checkpoint that training resumes from, open until it has been restored; None without one.
        console: where messages are shown; silent on all ranks but 0.
        records: the run's `metrics.jsonl`; rank 0 writes to it.
        message_hub: holds values that the parts of a run share.
        trains: whether it is ready for a training, which resumes, and writes checkpoints.
        skipped: what is wrong with checkpoints that it would rather have resumed from.
        logger: shows messages on rank 0, and writes them to the run's folder.
    """

    args: RunnerArguments
    cfg: Any
    work_dir: Path
    rank: int
    world_size: int
    seed: int
    run_dir: Path
    checkpoint_dir: Location
    stored: Stored | None
    console: Console
    records: JsonLinesSink
    message_hub: MessageHub
    trains: bool
    skipped: Sequence[str] = ()
    logger: logging.Logger = _logger

    @property
    def resume_from(self) -> Location | None:
        """The checkpoint that training resumes from; None without one."""
        return None if self.stored is None else self.stored.directory

    @property
    def distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.world_size > 1

    def close(self, *, failed: bool) -> None:
        """Close the records, and the checkpoint that training resumes from; after an error, `failed`."""
        self.records.close()
        if self.stored is not None:
            self.stored.close()


@dataclass(kw_only=True, eq=False)
class Run(Workspace):
    """A model on its ranks, and the parts that train or evaluate it.

    Attributes:
        strategy: how the model is distributed over ranks.
        model: the model as it is trained: on its device, and wrapped.
        data_shard: which of the samples this rank processes.
        hooks: a `HookList`, in the order in which they are called.
        visualizer: where scalars, images and the config go in addition; on all ranks but 0, nowhere.
        param_schedulers: the schedulers of learning rates; empty for a run that only evaluates.
        val_loop: the loop that validates, an `EvalLoop`; None without one.
        test_loop: the loop that tests; None without one.
        predict_loop: the loop that predicts or has predicted; None before, and again once a later evaluation begins.
        last_evaluation: the one of these loops that ran last; None before.
        loaded: on rank 0, the checkpoint whose weights are evaluated instead of those that were trained, and its epoch
            and iteration, for records.
        agreement: lets a training stop on all ranks at the same point.
    """

    strategy: Strategy
    model: nn.Module
    data_shard: DataShard
    hooks: Any
    visualizer: Visualizers
    param_schedulers: list[ParamScheduler] = field(default_factory=list)
    val_loop: Any = None
    test_loop: Any = None
    predict_loop: Any = None
    last_evaluation: Any = None
    loaded: dict[str, Any] = field(default_factory=dict)
    agreement: Agreement = field(default_factory=Agreement)

    @property
    def epoch(self) -> int:
        """Complete epochs: 0 at every point within the first one, and without training."""
        return 0 if (loop := self._training) is None else loop.epoch

    @property
    def iter(self) -> int:
        """Complete iterations: the hooks of the first one see 0, as without training; it rises after them."""
        return 0 if (loop := self._training) is None else loop.iter

    @property
    def max_epochs(self) -> int | None:
        """Length of the training in epochs; None in an iteration-based loop, and without training."""
        return None if (loop := self._training) is None else loop.max_epochs

    @property
    def max_iters(self) -> int:
        """Length of the training in iterations; 0 without training."""
        return 0 if (loop := self._training) is None else loop.max_iters

    @property
    def _training(self) -> Any:
        return getattr(self, "train_loop", None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property has raised an AttributeError, which names what was wrong
                return object.__getattribute__(self, name)
            raise no_attribute(self, name)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at a point; see `lockstep.hooks.Hook`.

        Another name is a point of your own: the hooks that have a method of this name are called.
        """
        self.hooks.call(fn_name, self, **kwargs)

    def register_hook(self, hook: Any, priority: str | int | None = None) -> None:
        """Add a hook, or the config of one, which is called from now on; a `priority` overrides the hook's own."""
        self.hooks.register(hook, priority)

    def load_checkpoint(
        self,
        filename: str | Path,
        *,
        strict: bool | None = None,
        revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
    ) -> None:
        """Load weights; see `Runner.load_checkpoint`. **Collective**: every rank."""
        weights = Weights(locate(filename), strict, revise_keys)
        load_weights(self.strategy, unwrap_model(self.model), weights, training=isinstance(self, TrainRun))
        self.call_hook("after_load_weights")

    def save_pretrained(self, save_directory: str | Path, **options: Unpack[PretrainedOptions]) -> None:
        """Write the model for `from_pretrained`; see `Runner.save_pretrained`. **Collective**: every rank."""
        with self.evaluated() if isinstance(self, TrainRun) else nullcontext():
            self._save_pretrained(save_directory, options)

    def _save_pretrained(self, save_directory: str | Path, options: PretrainedOptions) -> None:
        ema = options.get("ema")
        state: dict[str, Any] = self.strategy.model_state()
        if isinstance(self, TrainRun):
            checkpoint: dict[str, Any] = {"model": state, "meta": {}}
            self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
            state, trained = checkpoint["model"], checkpoint.get("ema")
            if ema and trained is None:
                raise ConfigError("`ema` must be True only beside EMAHook, but there is no average of weights")
            if ema is False and trained is not None:
                state = {**state, **trained}
        elif ema is not None:
            raise ConfigError(
                f"`ema` must be None in a run that does not train, and has loaded one kind of weights, but is {ema}. "
                "Use lockstep export, which has both kinds of a checkpoint"
            )
        save_pretrained(unwrap_model(self.model), state, save_directory, options)

    def tell_hub(self) -> None:
        """Register the run's progress and name with the message hub, which reads their current values when asked."""
        run = ref(self)  # the hub outlives the run
        for name in ("epoch", "iter", "max_epochs", "max_iters", "seed"):
            self.message_hub.provide_info(name, partial(_attribute, run, name))
        self.message_hub.provide_info("experiment_name", partial(_attribute, run, "run_dir", "name"))
        self.message_hub.provide_info(
            "dataset_meta", partial(_attribute, run, "train_dataloader", "dataset", "metainfo")
        )

    def set_optimizer_mode(self, *, training: bool) -> None:
        """Let the model have the weights that its optimizer trains, or those to evaluate; here it has none."""

    @cached_property
    def to_device(self) -> Callable[[Any], Any]:
        """Moves a batch to the device, on a stream of its own if `prefetch_to_device` asks for it.

        What a step takes out of a dict, as a loss that pops its labels, hooks and metrics still have.
        """
        if get_device() == "cpu":
            return lambda batch: copy(batch) if isinstance(batch, MutableMapping) else batch
        device = torch.device(get_device(), torch.accelerator.current_device_index())
        return prefetching(device) if self.args.prefetch_to_device else partial(move_to_device, device=device)

    def close(self, *, failed: bool) -> None:
        """Close hooks, visualizers, records, and data loaders, whose workers end; which after an error might hang."""
        with ExitStack() as stack:  # from the last to the first, also where one of them fails
            stack.callback(super().close, failed=failed)
            stack.callback(self.visualizer.close, failed=failed)
            stack.callback(self.hooks.close)
        if not failed:
            for loader in self._dataloaders():
                if getattr(loader, "persistent_workers", False):  # as garbage, they would take 10 s each (torch 2.13)
                    end_workers(loader)

    def _dataloaders(self) -> list[Any]:
        loops = [loop for loop in (self.val_loop, self.test_loop, self.predict_loop) if loop is not None]
        return [loader for loop in loops for loader in named_loaders(loop.dataloader).values()]


@dataclass(kw_only=True, eq=False)
class TrainRun(Run):
    """A run that trains.

    The loop is created together with the run, because each refers to the other.

    Args:
        make_train_loop: returns the loop for this run.

    Attributes:
        optim_wrapper: updates the model.
        train_dataloader: this rank's shard of the training data.
        train_loop: the loop that trains, a `TrainLoop`.
        first_options: all options of each parameter group before a schedule acts.
        begun_with: what the config says of these options and of the schedules, in JSON values.
        saving: writes checkpoints.
    """

    optim_wrapper: OptimWrapper
    train_dataloader: Any
    train_loop: Any = field(init=False)
    first_options: list[dict[str, Any]] = field(default_factory=list)
    begun_with: dict[str, Any] = field(default_factory=dict)
    saving: Saving = field(init=False)
    make_train_loop: InitVar[Callable[[TrainRun], Any]]

    def __post_init__(self, make_train_loop: Callable[[TrainRun], Any]) -> None:
        self.saving = Saving(self)
        self.train_loop = make_train_loop(self)

    def _dataloaders(self) -> list[Any]:
        return [self.train_dataloader, *super()._dataloaders()]

    def set_optimizer_mode(self, *, training: bool) -> None:
        """Let the model have the weights that its optimizer trains, or those that it evaluates and saves."""
        if self.optim_wrapper.has_modes:
            reshard(unwrap_model(self.model))  # after a forward pass without a backward pass
            self.optim_wrapper.set_mode(training=training)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Let the model have the weights to evaluate; afterwards, those that it had."""
        is_training = self.optim_wrapper.has_modes and self.optim_wrapper.is_training
        self.set_optimizer_mode(training=False)
        try:
            yield
        finally:
            if is_training:
                self.set_optimizer_mode(training=True)

    def save_checkpoint(
        self,
        out_dir: str | Location,
        filename: str | None = None,
        *,
        epoch: int | None = None,
        iteration: int | None = None,
        is_last: bool = True,
        save_optimizer: bool = True,
        meta: Mapping[str, Any] | None = None,
        async_save: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
        when_ended: Callable[[bool], None] | None = None,
    ) -> Location:
        """Save what resuming needs in the folder `filename` of `out_dir`.

        Args:
            out_dir: the folder of the checkpoint, also a URL; without `filename` the checkpoint itself, relative to the
                run's folder.
            filename: name of the checkpoint.
            epoch: number of complete epochs; by default the run's own count, with the epoch that is ending.
            iteration: number of complete iterations; by default the run's own count, in `after_train_iter` with the
                iteration that is ending.
            is_last: make it the checkpoint to resume from.
            save_optimizer: save the optimizer's state; a run that resumes without it starts with a new optimizer state.
            meta: further entries of what `lockstep.checkpoint.read_meta` returns; plain values.
            async_save: return as soon as each rank has copied its part, and write the copy while training goes on.
                The next save, and the end of the training, wait until this one is complete.
            on_save_error: `"raise"` if the checkpoint can't be written; `"warn"` to go on without it. An asynchronous
                save that fails stops the training after the iteration that is in progress then, and raises there.
            when_ended: called on each rank when the save has ended, with whether the checkpoint is complete: before
                this returns, or, with `async_save`, between two later iterations, before the next save or at the end.
                Not called if the training fails for another reason.

        **Collective**: every rank. **Cost**: of `async_save`, memory in the host for a copy of the rank's part.

        Raises:
            OSError: some rank could not write, also in the asynchronous save before this one.
            ConfigError: `on_save_error` is something else.
        """
        require_one_of("on_save_error", on_save_error, ("raise", "warn"))
        place = locate(out_dir)
        if filename is not None:
            directory = place / filename
        else:
            directory = self.run_dir / place if isinstance(place, Path) else place
        epochs, iterations = self._complete(by_epoch=not getattr(self.train_loop, "is_ending_iter", False))
        epoch = epochs if epoch is None else epoch
        iteration = iterations if iteration is None else iteration
        save = Save(
            directory, epoch, iteration, is_last, save_optimizer, meta or {}, on_save_error == "warn", when_ended
        )
        self.saving.save(save, async_save=async_save)
        return directory

    def _complete(self, *, by_epoch: bool) -> tuple[int, int]:
        """Return how many epochs and iterations are complete, at the end of an epoch or else of an iteration."""
        if not by_epoch:
            return self.epoch, self.iter + 1
        # The loop counts an epoch when its hooks have been called.
        is_at_end = self.iter == self.train_loop.epoch_end
        return self.epoch + is_at_end, self.iter


def _attribute(run: ref[Run], *names: str) -> Any:
    """Return a nested attribute of a run, or None if one is missing."""
    found: Any = run()
    for name in names:
        found = getattr(found, name, None)
    return found
