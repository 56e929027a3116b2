"""`Session`: what a hand-written training loop needs on any number of ranks."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.dataset import build_dataloader, length_of
from lockstep.device import get_device
from lockstep.dist import all_gather_object, get_dist_info, get_rank, get_world_size
from lockstep.errors import ConfigError, listed, no_attribute
from lockstep.location import Location
from lockstep.model import uncompiled, unwrap_model
from lockstep.model.steps import lacks_labels, parse_losses
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.optim.several import with_joined
from lockstep.registry import OPTIM_WRAPPERS
from lockstep.runner.arguments import ARGUMENTS, fault_of_prepared, unknown_argument
from lockstep.runner.data_workers import prepare_workers
from lockstep.runner.run import TrainRun
from lockstep.runner.runner import Runner
from lockstep.runner.seeds import set_randomness
from lockstep.runner.start import join_ranks
from lockstep.session.evaluation import OwnEvaluation
from lockstep.session.loop import OwnLoop, tell_of_unsaved
from lockstep.session.schedules import schedules_some
from lockstep.session.steps import guard_steps, refuse_other_places
from lockstep.watch.ending import raised_error
from lockstep.weights.export import PretrainedOptions

_Models: TypeAlias = nn.Module | Mapping[str, nn.Module]
_Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Any]


class Session:
    """The ranks, the data, the checkpoints and the records of a training loop that the user writes.

    A loop for one process becomes one for any strategy and any number of ranks by five changes::

        session = Session("work_dirs/mine", strategy="fsdp")
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for epoch in session.epochs(10):  # instead of range(10)
            for inputs, targets in loader:
                loss = loss_function(model(inputs), targets)
                session.step(loss)  # instead of loss.backward(), optimizer.step() and optimizer.zero_grad()

    Create the session before the model: it joins the ranks and seeds their random generators. Each epoch ends in a
    checkpoint, from which `resume=True` continues, also on another number of ranks and under another strategy. Records,
    hooks, the progress bar and the report are those of a `Runner`.

    Between the start and the end of an iteration, calls of `model` go through the strategy. Elsewhere, for instance in
    a validation, they only compute.

    Args:
        work_dir: the folder for this experiment; each session creates its own folder in it.
        strategy: name, config or object; by default `ddp` on several ranks, else `single`.
        accumulative_counts: number of calls of `step` whose gradients are averaged into one update.
        batch_size_of: what a batch counts for in these averages: a function of the batch, as the loader yields it, such
            as its number of tokens. By default its number of samples. The loss must be the mean over what it counts.
        clip_grad: `dict(max_norm=...)` or `dict(type="value", clip_value=...)`; see `OptimWrapper`.
        accumulate_across_epochs: whether such a window goes on over the end of an epoch; see `OptimWrapper`.
        amp: `"bfloat16"` or `"float16"` for mixed precision: calls of `model` compute under autocast, and return
            float32.
        resume: resume from the last checkpoint in the work_dir if there is one; with `load_from`, see `Runner`.
        load_from: a checkpoint, a folder or a file of weights; see `Runner`.
        **options: further arguments of `Runner`: `launcher`, `env_cfg`, `resume_options`, `randomness`,
            `visualizer`, `default_hooks`, `custom_hooks`, `experiment_name`, `log_level`, `compile`, `default_scope`,
            `auto_scale_lr`, `stop_signals`, `prefetch_to_device`, `channels_last`.

    **Collective**: every rank.

    Example::

        >>> from tempfile import mkdtemp
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> session = Session(mkdtemp(), randomness=dict(seed=0), log_level="ERROR")
        >>> model = nn.Linear(2, 1)
        >>> data = TensorDataset(torch.ones(6, 2), torch.ones(6, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=2))
        >>> for epoch in session.epochs(2):  # doctest: +ELLIPSIS
        ...     for inputs, targets in loader:
        ...         session.step(nn.functional.mse_loss(model(inputs), targets))
        trained in ...
        >>> session.iter
        6

    Raises:
        TypeError: an option is not known, or has the wrong type.
    """

    def __init__(
        self,
        work_dir: str | Path,
        *,
        strategy: Any = None,
        accumulative_counts: int = 1,
        batch_size_of: Callable[[Any], float] | None = None,
        clip_grad: Mapping[str, Any] | None = None,
        accumulate_across_epochs: bool = True,
        amp: str | None = None,
        resume: bool = False,
        load_from: str | Path | None = None,
        **options: Any,
    ) -> None:
        if (unknown := unknown_argument(options, "Session", _KNOWN, _DONE_IN_THE_LOOP)) is not None:
            raise unknown
        self._make_loop = partial(OwnLoop, batch_size_of=batch_size_of)
        self._optim: dict[str, Any] = {
            "accumulative_counts": accumulative_counts,
            "clip_grad": clip_grad,
            "accumulate_across_epochs": accumulate_across_epochs,
        }
        if amp is not None:
            self._optim |= {"type": "AmpOptimWrapper", "dtype": amp}
        self._options = dict(options, work_dir=work_dir, strategy=strategy, resume=resume, load_from=load_from)
        # Checked now, so that a wrong option is reported before the model is built.
        OPTIM_WRAPPERS.build({"type": "OptimWrapper", "optimizer": SGD([torch.zeros(1, device="cpu")]), **self._optim})
        self._runner = Runner(nn.Identity(), **self._options)
        join_ranks(options.get("launcher"), options.get("env_cfg"))
        set_randomness(options.get("randomness"))
        self.rank, self.world_size = get_dist_info()
        self.device = torch.device(get_device())
        self._loop: OwnLoop | None = None
        self._closing = ExitStack()
        self._is_entered = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def run(self) -> TrainRun:
        """The run, which hooks receive: model, optim wrapper, records, message hub."""
        return self._prepared().runner

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self._prepared().epoch

    @property
    def iter(self) -> int:
        """Number of complete iterations."""
        return self._prepared().iter

    @property
    def batch_idx(self) -> int:
        """Number of the present batch in its epoch, from 0; one that goes on after a stop counts the batches before it.

        They count as they were, also where batches have another size now, of which the epoch would have another number.
        """
        loop = self._prepared()
        return loop.iter - loop.epoch_begin

    @property
    def work_dir(self) -> Path:
        """The folder of all sessions of this experiment."""
        return self.run.work_dir

    @property
    def run_dir(self) -> Path:
        """The folder of this session, within the work_dir."""
        return self.run.run_dir

    @property
    def best_checkpoint(self) -> Location | None:
        """The best checkpoint by the first metric of `save_best`, of this training or else the last in the work_dir."""
        return self._runner.best_checkpoint

    @overload
    def prepare(
        self, model: _Models, optimizer: _Optimizers, dataloader: None = None, *, schedulers: Any = ()
    ) -> tuple[nn.Module, OptimWrapper]: ...
    @overload
    def prepare(
        self, model: _Models, optimizer: _Optimizers, dataloader: Any, schedulers: Any = ()
    ) -> tuple[nn.Module, OptimWrapper, PreparedLoader]: ...
    def prepare(
        self, model: _Models, optimizer: _Optimizers, dataloader: Any = None, schedulers: Any = (), *more: Any
    ) -> tuple[nn.Module, OptimWrapper] | tuple[nn.Module, OptimWrapper, PreparedLoader]:
        """Distribute the model over the ranks, share out the data, and resume if asked to.

        Args:
            model: the user's own module; or several that are trained together, in a dict or an `nn.ModuleDict`.
            optimizer: a new optimizer over the model's parameters; a list of some that one loss updates together, which
                are joined (`JoinedOptimizer`); the config of one; or a dict of such by the names of the model's
                children, each of which a loss of its own updates.
            dataloader: a `DataLoader` over all data, the config of one, or any iterable of batches; see
                `build_dataloader`. Without a length, as of a stream, it is gone through by `iterations`. None for a
                loop that makes its data itself; `iterations` counts it.
            schedulers: one object or several with `state_dict()` and `load_state_dict()` in JSON values, such as
                schedulers of learning rates of torch and of transformers. They are saved and resumed; the loop steps
                them, and may do so after the batches of an epoch, whose checkpoint is saved at the end of the loop's
                body then.
            *more: nothing; what stands here, as several models one after the other, is an error that says how.

        Returns:
            The module, on its device; the optim wrapper; and, if there is a `dataloader`, the loader of this rank's
            batches, which are moved to the device.

        **Collective**: every rank, once.

        Raises:
            ConfigError: the strategy can't train the model; there is a `batch_size_of`, but no `dataloader`; or a
                scheduler is over an optimizer that is not handed in.
            TypeError: an argument has the wrong type, or stands in the place of another one.
        """
        if self._loop is not None:
            raise RuntimeError("prepare() has been called already: a session trains one model")
        refuse_other_places(model, optimizer, dataloader, schedulers, *more)
        optimizer = with_joined(optimizer)
        if dataloader is None and self._make_loop.keywords["batch_size_of"] is not None:
            raise ConfigError(
                "`batch_size_of` must be None where prepare() gets no data loader, because there is no batch to count. "
                "For a mean over what all ranks have made, call session.step(losses.sum() * session.world_size / n), "
                "in which n is their number on all ranks, by all_reduce"
            )
        optim: Any = {"optimizer": optimizer, **self._optim}
        if isinstance(optimizer, Mapping) and "type" not in optimizer:  # by name
            if "optimizer" in optimizer:
                raise ConfigError("`optimizer` must not have the name 'optimizer', a key of configs. Rename that part")
            optim = {name: {"optimizer": one, **self._optim} for name, one in optimizer.items()}
        parts = model.values() if isinstance(model, Mapping) else [model]
        if not all(isinstance(part, nn.Module) for part in parts):
            remedy = f". Make a module of the class: {model.__name__}(...)" if isinstance(model, type) else ""
            raise TypeError(f"`model` must be a torch.nn.Module or a dict of modules, but is {model!r}{remedy}")
        if isinstance(model, Mapping | nn.ModuleDict):
            model = Parts(dict(model.items()))
        model = uncompiled(model)
        names = [name for name, _ in model.named_children()]
        if "optimizer" not in optim and (others := [name for name in optim if name not in names]):
            raise ConfigError(
                f"`optimizer` must have the names of parts of the model, {listed(names)}, but has others: "
                f"{listed(others)}. Name each optimizer after one part; it may have parameters of others"
            )
        schedules = [*schedulers] if isinstance(schedulers, list | tuple) else [schedulers]
        optimizers = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
        for argument, given in {"optimizer": optimizers, "dataloader": [dataloader], "schedulers": schedules}.items():
            for one in given:
                says = fault_of_prepared(one)
                if isinstance(one, OptimWrapper | PreparedLoader):
                    says = f"must be your own, but is a {type(one).__name__}, which prepare() has returned before"
                if says is not None:
                    raise TypeError(f"`{argument}` {says}")
        within = [part for one in optimizers for part in getattr(one, "__dict__", {}).values()]  # as in Lookahead
        groups = [group for one in [*optimizers, *within] for group in getattr(one, "param_groups", ())]
        for one in schedules:
            if hasattr(one, "__iter__") or not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise TypeError(
                    f"`schedulers` must have state_dict() and load_state_dict(), but has {one!r} of type "
                    f"{type(one).__name__}. Make them over your optimizer before prepare(), as in StepLR(optimizer, "
                    "10); data to evaluate on go to prepare_evaluation(), and there is one loader to train on: join "
                    "several sets, as by torch.utils.data.StackDataset"
                )
            if not schedules_some(one, groups):
                raise ConfigError(
                    f"`schedulers` must be over an optimizer that prepare() gets, but {type(one).__name__} is over "
                    f"another {type(one.optimizer).__name__}, so that it would change no rate. Make the optimizer "
                    "first, then the schedule over it, and hand in both; not the config of an optimizer"
                )
        options = dict(self._options)
        options["default_hooks"] = {"param_scheduler": None, **(options.get("default_hooks") or {})}
        data = _NO_DATA if dataloader is None else dataloader
        self._runner = Runner(model, train_dataloader=data, optim_wrapper=optim, **options)
        vars(model)["train_step"] = _SessionStep(calls_parts=isinstance(model, Parts))
        run = self._closing.enter_context(self._runner.training(self._make_loop, schedules))
        assert isinstance(run.train_loop, OwnLoop)
        self._loop, self._evaluation = run.train_loop, OwnEvaluation(run.train_loop)
        self._closing.push(self._loop.save_at_close)
        wrapper = run.optim_wrapper
        for name, one in wrapper.items() if isinstance(wrapper, OptimWrapperDict) else [(None, wrapper)]:
            if isinstance(one.optimizer, torch.optim.Optimizer):  # not an engine's own
                guard_steps(self._loop, one, name)
        # While threads can still be started: an `atexit` function comes too late to write a checkpoint. There is no
        # public way (Python 3.11 to 3.14).
        at_exit = partial(_close_at_exit, weakref.ref(self), self._loop.unsaved, os.getpid())
        threading._register_atexit(at_exit)  # type: ignore[attr-defined]
        if dataloader is None:
            self._loop.has_data = False
            return unwrap_model(run.model), run.optim_wrapper
        loader = PreparedLoader(run.train_dataloader, self._loop.batches, self._loop.even_batches.lengths or ())
        return unwrap_model(run.model), run.optim_wrapper, loader

    if not TYPE_CHECKING:  # type checkers would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property has raised an AttributeError, which names what was wrong
                return object.__getattribute__(self, name)
            raise no_attribute(self, name)

    def prepare_evaluation(self, dataloader: Any) -> PreparedLoader:
        """Return a loader of this rank's share of the data, in their order and each sample once, for `gather`.

        All ranks get equally many batches, because some strategies need all ranks in each forward pass: a rank that has
        run out gets its last batch again, which `gather` leaves out. During a pass, hooks give the model what a Runner
        validates: EMAHook its averaged weights. A pass must end before the next one begins.

        **Collective**: every rank, and so is each pass through the loader.
        """
        run = self.run
        loader = build_dataloader(dataloader, seed=run.seed, evaluation=True, shard=run.data_shard[:2])
        prepare_workers(loader, run.args.stop_signals)
        return PreparedLoader(loader, partial(self._evaluation.batches, loader), all_gather_object(length_of(loader)))

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left, from 0 or from where training resumed to `count` - 1.

        In each, the loop must go through the prepared loader. One that it leaves early counts as a whole one. The
        session is closed after the last one; as a context manager, at the end of its block. **Collective**: every rank.
        """
        return self._closed_after(self._prepared().epochs(count))

    def iterations(self, count: int) -> Iterator[Any]:
        """Yield this rank's batches until `count` iterations are complete; without data, the iterations' numbers.

        A pass that ends is followed by the next one. The last iteration ends in a checkpoint, and so does every
        1000th: `default_hooks=dict(checkpoint=dict(interval=...))` chooses another number. **Collective**: every rank.
        """
        return self._closed_after(self._prepared().iterations(count))

    def step(self, loss: Any, **values: Any) -> None:
        """Run the backward pass, and at the end of a window clip the gradients, update, and clear the gradients.

        Args:
            loss: the mean over this rank's batch, which is weighted so that every sample counts alike, or whatever
                `batch_size_of` counts: a scalar tensor; or what a model returns that computes it, see `parse_losses`.
            **values: further numbers or scalar tensors to record.

        **Collective**: every rank.

        Raises:
            ValueError: the loss is not a scalar, or requires no gradient.
            TypeError: there is no loss, it is no tensor, or a value can't be recorded.
            RuntimeError: the batch is one of a loader of `prepare_evaluation`, or there is no iteration.
        """
        loop = self._prepared()
        self._evaluation.require_none()
        loop.require_iteration("session.step() makes the update of a training iteration", "Call it for each batch")
        if isinstance(loss, Real):
            raise TypeError(
                f"`loss` must be a scalar tensor, but is the number {loss!r} (rank {self.rank} of {self.world_size}). "
                "Leave out .item() or float(): the backward pass needs the tensor"
            )
        self._require_one_optimizer("session.step(loss)", "update_params(loss)")
        try:
            total, logged = parse_losses(loss)
        except TypeError as error:
            if lacking := lacks_labels(unwrap_model(self.run.model), loop.batch):
                raise TypeError(f"{lacking} (rank {self.rank} of {self.world_size})") from error
            raise
        loop.log({**logged, **values})
        self.run.optim_wrapper.update_params(total)

    @property
    def is_update(self) -> bool:
        """Whether the `step` of this iteration ended in an update: the moment to step a scheduler that counts updates.

        False where it has made none, or float16 has skipped the update. **Cost**: in float16, reading it waits for an
        accelerator.
        """
        self._require_one_optimizer("session.is_update", "should_update(), after its update_params")
        wrapper = self.run.optim_wrapper
        return self._prepared().has_backward and wrapper.should_update() and not wrapper.has_skipped

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Record numbers or scalar tensors of the present iteration; records hold means over samples and ranks.

        Raises:
            RuntimeError: there is none, as after the batches of an epoch or in a validation: use `log_metrics`.
            TypeError: a value can't be recorded.
        """
        if values is not None and "step" in more:
            raise TypeError("log() must be given values alone: a session counts the iterations. Leave out `step`")
        self._prepared().require_iteration(
            "session.log() records values of a training iteration",
            "Record what a validation or an epoch gives by session.log_metrics(loss=...), the same on every rank: "
            "compute it from what session.gather() returns",
        )
        self._prepared().log({**(values or {}), **more})

    def log_metrics(self, **metrics: Any) -> None:
        """Record the metrics of a validation; hooks such as `save_best` get them.

        **Collective**: every rank.

        Raises:
            ConfigError: they are not the same on every rank.
        """
        self._prepared().log_metrics(metrics)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of mixed precision and accumulation, in which to call parts of the model by themselves."""
        return self.run.optim_wrapper.optim_context(self.run.model)

    def gather(self, *tensors: Tensor, sync_grads: bool = False) -> Any:
        """Return each tensor's rows of all ranks, on every rank, each sample once and in the order of the loader.

        Args:
            *tensors: one row per sample of the present batch, of a loader from `prepare_evaluation` or the training's.
            sync_grads: let gradients flow back to every rank, as for a loss over the samples of all ranks, of which
                every rank must then run a backward pass. See `all_gather`.

        Returns:
            One tensor, or a tuple of as many as were given. **Shapes**: [samples on this rank, ...] -> [samples on all
            ranks, ...].

        **Collective**: every rank, alike in each iteration. **Cost**: the tensors' bytes, as of `all_gather`.

        Raises:
            TypeError: something else is given than tensors with rows.
            ValueError: they have different numbers of rows, or rows of other shapes on other ranks.
            ConfigError: with `sync_grads`, some ranks compute on the same samples.
        """
        self._prepared()
        return self._evaluation.gather(tensors, sync_grads=sync_grads)

    def save(self, name: str | None = None, *, async_save: bool = False) -> None:
        """Save a checkpoint in the session's folder: now, or, within an iteration, at its end. The log says when.

        If the loop leaves the iteration instead, by `break`, `return` or an error, the checkpoint is saved when the
        next epoch begins or the session is closed, which happens at the end of the script at the latest. An iteration
        that has made a `step` counts then. On several ranks, it is saved unless some of them go on.

        Args:
            name: its name; by default `iter_` and the number of complete iterations.
            async_save: write a copy while the training goes on; see `TrainRun.save_checkpoint`.

        **Collective**: every rank.

        Raises:
            ConfigError: the name leads elsewhere than to a folder in the session's.
        """
        if name is not None and (Path(name).name != name or name == ".."):
            raise ConfigError(f"`name` must be the name of a folder in {self.run.checkpoint_dir}, but is {name!r}")
        self._prepared().save(name, async_save)

    def save_pretrained(self, save_directory: str | Path, **options: Unpack[PretrainedOptions]) -> None:
        """Write the model's weights, and what `from_pretrained` needs beside them; see `Runner.save_pretrained`.

        Args:
            save_directory: a new or empty folder, or with `overwrite=True` any, or the URL of one that fsspec can open.
            **options: `max_shard_size`, `dtype`, `prefix`, `ema`, `overwrite`. Of several models, `prefix` says which.

        **Collective**: every rank.
        """
        self.run.save_pretrained(save_directory, **options)

    def stop(self) -> None:
        """End the training after this epoch, which one rank may ask for; of `iterations`, after this iteration.

        In a loop of `iterations`, every rank must call it in the same one.
        """
        self._prepared().stop_training = True

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        _, error, _ = exception
        if isinstance(error, TypeError) and _OF_A_SCHEDULER in str(error):
            self.run.logger.error(
                "a scheduler takes your own optimizer, and not the wrapper that prepare() has returned: make it before "
                "prepare(), and hand it in, by prepare(..., schedulers=scheduler), so that it is saved and resumed"
            )
        return self._closing.__exit__(*exception)

    def _closed_after(self, loop: Iterator[Any]) -> Iterator[Any]:
        """Go through a loop; warn before of a scheduler, which torch's note in the optimizer, that is not saved."""
        run = self.run
        for optimizer in run.optim_wrapper.optimizers:
            groups = [group for group in optimizer.param_groups if "initial_lr" in group]
            if groups and not any(schedules_some(one, groups) for one in run.param_schedulers):
                run.logger.warning(
                    "%s has a scheduler that is not handed to prepare(..., schedulers=...), before which it must be "
                    "made: its position is not saved, so that a session that resumes begins it anew",
                    type(optimizer).__name__,
                )
        with nullcontext() if self._is_entered else self._closing:
            yield from loop

    def _require_one_optimizer(self, what: str, instead: str) -> None:
        if isinstance(self.run.optim_wrapper, OptimWrapperDict):
            names = list(self.run.optim_wrapper)
            raise TypeError(
                f"{what} is for one optimizer, but there are several ({', '.join(names)}). Call "
                f"optimizers[{names[0]!r}].{instead}, where `optimizers` is what prepare() has returned; or, where one "
                "loss trains what all of them have, hand in one optimizer made of them: docs/recipes.md#muon"
            )

    def _prepared(self) -> OwnLoop:
        if self._loop is None:
            raise RuntimeError("session.prepare(model, optimizer, dataloader) must be called first")
        return self._loop


class PreparedLoader:
    """A data loader of this rank's batches, on its device; its other attributes are those of `loader`.

    Args:
        loader: the loader.
        batches: returns an iterator over the batches of one pass.
        lengths: how many batches each rank has of its own, as far as that is known.
    """

    def __init__(self, loader: Any, batches: Callable[[], Iterator[Any]], lengths: Sequence[int | None]) -> None:
        self.loader = loader
        self._batches = batches
        self._lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

    def __len__(self) -> int:
        """Return how many batches a pass has on every rank; of a loader whose length varies, how many this rank has."""
        own = len(self.loader)
        known = [length for length in self._lengths if length is not None]
        if len(known) < get_world_size() or known[get_rank()] != own:  # which may vary with the epoch
            return own
        return max(known)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy, which has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)


class Parts(nn.ModuleDict):
    """Modules that are called one by one; FSDP refuses a container without a `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error that says what to call instead."""
        raise TypeError(f"call one of the models ({', '.join(self)}), as in model[{next(iter(self))!r}](...)")


_OF_A_SCHEDULER = f"{OptimWrapper.__name__} is not an Optimizer"  # what torch says
_NO_DATA: Mapping[str, Any] = {"dataset": range(1), "sampler": {"type": "InfiniteSampler", "shuffle": False}}
_OF_A_RUNNER = {
    "cfg", "data_preprocessor", "loss", "model", "optim_wrapper", "param_scheduler", "train_cfg", "train_dataloader",
}  # fmt: skip
_KNOWN = [name for name in ARGUMENTS if name not in _OF_A_RUNNER and not name.startswith(("val_", "test_"))]
_KNOWN += ["accumulative_counts", "accumulate_across_epochs", "batch_size_of", "clip_grad", "amp"]
_DONE_IN_THE_LOOP = (
    ". What a session trains is handed to prepare(model, optimizer, dataloader, schedulers=...); the loop goes through "
    "session.epochs(count) or session.iterations(count), prepares its batches, and validates over "
    "prepare_evaluation(dataloader), recording by log_metrics()"
)


@dataclass
class _SessionStep:
    """Stands for the training step of a model that a session trains: to a strategy, it is a step of the user's own."""

    calls_parts: bool  # by themselves
    is_of_session: ClassVar[bool] = True

    def __call__(self, data: Any, optim_wrapper: Any) -> Any:
        raise RuntimeError("this model is trained by the loop of a Session, so that no Runner can train it")


def _close_at_exit(session: weakref.ref[Session], unsaved: list[str], pid: int) -> None:
    """Close a session that is open at the end of the script, to save what it was asked for; not in a forked process."""
    if os.getpid() != pid:
        return
    error = raised_error()
    if (found := session()) is not None:
        found.__exit__(error and type(error), error, None)
    if error is None:
        tell_of_unsaved(unsaved)
