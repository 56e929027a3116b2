"""`Runner`: from a model and data to a trained model, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from torch import nn

from lockstep.checkpoint import read_meta
from lockstep.config.python_file import refuse_in_config
from lockstep.dataset import DataShard, agree_on_shard
from lockstep.dist import run_on_main
from lockstep.errors import ConfigError, Preempted, building, error_in_words, no_attribute
from lockstep.evaluator import Evaluator
from lockstep.evaluator.metric import Predictions
from lockstep.location import Location, locate
from lockstep.logging import MessageHub
from lockstep.model import steps, unwrap_model
from lockstep.optim import OptimWrapper
from lockstep.registry import RUNNERS
from lockstep.runner import build, description, resume_from, resuming, start
from lockstep.runner.arguments import (
    ARGUMENTS,
    DEFAULT_OPTIM_WRAPPER,
    DEFAULT_TRAIN_CFG,
    RunnerArguments,
    named_loaders,
    taking,
)
from lockstep.runner.evaluation_loops import EvalLoop, PredictLoop
from lockstep.runner.hook import Hook, HookList
from lockstep.runner.run import Run, TrainRun, Workspace
from lockstep.strategy import Strategy, build_strategy
from lockstep.weights import Weights, load_weights
from lockstep.weights.export import PretrainedOptions
from lockstep.weights.loading import REVISE_KEYS
from lockstep.weights.source import find_checkpoint

_numbers = itertools.count()  # of the Runners of this process
_BEFORE_A_RUN = {
    **dict.fromkeys(("epoch", "iter", "max_iters"), 0),
    **dict.fromkeys(("max_epochs", "val_loop", "test_loop", "predict_loop", "last_evaluation"), None),
}
_OWN = ("args", "message_hub", "logger")  # attributes of a Runner that a run has, too
if TYPE_CHECKING:
    _AttributesOfRun = TrainRun
else:
    _AttributesOfRun = object  # a Runner has them by `__getattr__`


@RUNNERS.register_module()
class Runner(_AttributesOfRun):
    """Trains, validates and tests a model.

    The constructor only checks the arguments. `train()`, `val()` and `test()` join the ranks, build the parts of a
    `Run` in the order of their code, and run it. Every part is an object or a config dict; a part that is left out gets
    a default, which is logged. From then on, the parts of the run are also attributes of the Runner.

    Args:
        model: any `torch.nn.Module`: a `BaseModel`, a module that returns its loss, or one that is already wrapped; or
            a function that returns one.
        work_dir: the folder for this experiment; each run creates its own folder in it.
        train_dataloader: a `DataLoader` or the config of one; see `build_dataloader`.
        val_dataloader: the same, for validation; of several sets, a dict or a list of loaders. A set's name is put
            before the names of its metrics, as in `clean/accuracy`.
        test_dataloader: the same, for testing.
        train_cfg: `by_epoch` and `max_epochs` or `max_iters`, `val_begin`, `val_interval`, `dynamic_intervals`,
            `batch_size_of`; or the `type` of a loop with its arguments.
        val_cfg: arguments of the validation loop: `fp16`, `dtype`.
        test_cfg: arguments of the test loop.
        optim_wrapper: an optim wrapper, an optimizer, a list of some that are joined, or a config with the key
            `optimizer`.
        param_scheduler: schedules of learning rates; see `build_param_schedulers`.
        val_evaluator: one or more metrics, or an `Evaluator`; for several sets, one for all, or a dict with one by the
            name of a set. By default the metric is the loss: `loss`, or what `forward` returns, also in evaluation.
        test_evaluator: the same, for testing.
        default_hooks: changes to the default hooks, by name; None removes one.
        custom_hooks: further hooks.
        strategy: name, config or object; by default `ddp` on several ranks, else `single`.
        launcher: what started the ranks: `"pytorch"`, `"slurm"`, `"mpi"`, `"none"`; by default inferred from the
            environment. If a group exists already, it is used.
        env_cfg: `dist_cfg` (arguments of `init_dist`), `cudnn_benchmark`, `float32_matmul_precision` (`"high"` lets
            multiplications of float32 matrices use TF32), `mp_cfg`, `resource_limit`.
        load_from: a checkpoint, a run's folder or a work_dir, of which the last checkpoint is taken; a folder of
            HuggingFace's; or a file of weights, safetensors or of `torch.save`. All may also be URLs that fsspec can
            open, such as `s3://BUCKET/NAME`.
        resume: resume from the last checkpoint in the work_dir, or in the `out_dir` of CheckpointHook, if there is one.
            With `load_from`, from the last one of a training that began there, so that the same command goes on after
            a stop; if there is none, from `load_from`, or, if that has weights alone, with these.
        resume_options: which options of the optimizer and which schedules hold after resuming: `"config"` for what the
            config says now, where that is not what it said when the checkpoint was saved; `"checkpoint"` for what was
            saved.
        randomness: `seed`, `deterministic` and `diff_rank_seed`. By default, ranks build model and data from the same
            random numbers, and then draw different ones for dropout and noise; with `diff_rank_seed=False` the same.
        compile: compile the model; under FSDP, compile each of its repeated blocks. A dict gives arguments for
            `torch.compile`.
        auto_scale_lr: with `enable=True`, multiply learning rates by the global batch size divided by
            `base_batch_size`, the batch size that they are meant for.
        log_level: the lowest level of messages that are shown; progress counts as "INFO"; the result is always shown.
        visualizer: an object with `add_scalars(scalars, step)`, its config, or a list of those; by default TensorBoard
            if it is installed.
        experiment_name: put before the time in the name of the run's folder.
        data_preprocessor: preprocesses batches before the model; not used if the model's config names one.
        default_scope: the registry scope in which names are looked up first, before lockstep's own.
        cfg: the config that the arguments come from; saved with the run. Its `sync_bn` converts BatchNorms. Without a
            `strategy`, its keys `model_wrapper_cfg` and `find_unused_parameters` say how the model is wrapped.
        loss: for a model whose `forward` returns outputs: `loss(outputs, targets)`, such as `nn.CrossEntropyLoss()`, or
            a function `loss(outputs, batch)`, or the config of one. Validation then computes the metric `loss` and
            needs no evaluator; see `OutsideLoss` for the forms of a batch.
        stop_signals: signals that ask the training to stop, sent to any rank: all ranks complete the same iteration,
            save it, and end with exit code 75. An empty list leaves the signals as they are.
        prefetch_to_device: copy batches to an accelerator on a stream of their own, during the step before; see
            `lockstep.runner.uneven_inputs.prefetching`.
        channels_last: convert the weights of convolutions to `torch.channels_last`, and so what they compute; under
            `single` and `ddp`.

    Example::

        Runner(model, "work_dir", train_dataloader=loader, launcher="pytorch").train()
    """

    _run_type: ClassVar[type[Run]] = Run
    _train_run_type: ClassVar[type[TrainRun]] = TrainRun

    @taking(RunnerArguments)
    def __init__(self, args: RunnerArguments) -> None:
        refuse_in_config()
        if isinstance(args.model, nn.Module):
            steps.forget_session(args.model)
        self.args = args
        self.message_hub = MessageHub()
        self._number = next(_numbers)
        self.logger = Workspace.logger
        self._custom_hooks: list[tuple[Any, str | int | None]] = [
            (hook, None) for hook in args.custom_hooks or () if hook is not None
        ]
        self._load_from = None if args.load_from is None else Weights(locate(args.load_from))
        self._workspace: Workspace | None = None
        self._began = 0.0  # when all was built and loaded
        self._run: Run | None = None
        self._has_trained = False
        self._is_running = False
        self._is_open = False  # and `before_run` need not be called
        self._is_loaded = False  # what `load_from` names
        self._has_weights = False  # of init_weights, or of a checkpoint

    @classmethod
    def from_cfg(cls, cfg: Mapping[str, Any]) -> Runner:
        """Return the runner that a config describes: its keys are the arguments of `Runner`.

        Raises:
            ConfigError: `model` or `work_dir` is missing.
        """
        return cls(**RunnerArguments.keywords_of(cfg))

    @property
    def run(self) -> Run:
        """The run that train(), val() or test() has built, which loops and hooks receive."""
        if self._run is None:
            raise _not_built("run")
        return self._run

    if not TYPE_CHECKING:

        @property
        def cfg(self) -> Any:
            """The config that the arguments come from."""
            return self.args.cfg

        @property
        def work_dir(self) -> Path:
            """The folder for this experiment."""
            return Path(self.args.work_dir)

        @property
        def _names_of_run(self) -> set[str]:
            return {*dir(self._train_run_type), *self._train_run_type.__dataclass_fields__}

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuse an attribute of the run, which would not see the value."""
            if name not in _OWN and not hasattr(type(self), name) and name in self._names_of_run:
                remedy = f"Give the Runner the argument `{name}`" if name in ARGUMENTS else "Give the Runner arguments"
                raise AttributeError(
                    f"`{name}` of a Runner can't be set: it is that of the run which train(), val() or test() builds. "
                    f"{remedy}; a hook may set what its `runner`, the run, has"
                )
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the run; before there is one, its initial value."""
            if name == "run":  # Python asks here, too, when the property has raised
                raise _not_built(name)
            if name not in (of_run := self._names_of_run):
                raise no_attribute(self, name, of_run)
            built = self._run or self._workspace
            if hasattr(built, name):
                return getattr(built, name)
            if name in _BEFORE_A_RUN:
                return _BEFORE_A_RUN[name]
            raise _not_built(name)

    def train(self) -> nn.Module:
        """Train, validate when due, and return the model.

        **Collective**: every rank of the job.

        Raises:
            ConfigError: there are no data to train on, or the arguments do not fit together.
            RuntimeError: this Runner has trained already.
            Preempted: a signal of `stop_signals` asked the training to stop, and the ranks have saved it.
        """
        if self.args.train_dataloader is None:
            raise ConfigError("`train_dataloader` must be given to train, but is None: a DataLoader, or its config")
        if self._has_trained:
            raise RuntimeError("this Runner has trained already; make another one to train again")
        with self.training() as run:
            with run.saving.at_stop():
                run.train_loop.run()
            run.call_hook("after_run")
        return run.model

    @contextmanager
    def training(
        self,
        make_train_loop: Callable[[TrainRun], Any] | None = None,
        param_schedulers: list[Any] | None = None,
    ) -> Iterator[TrainRun]:
        """Build a run that trains, and close at the end what it has opened: `train()` without the training itself.

        Args:
            make_train_loop: returns its loop; by default that of `train_cfg`.
            param_schedulers: by default those of `param_scheduler`.

        **Collective**: every rank of the job.
        """
        with self._running("trained", trains=True) as space, start.told_of_others(space):
            run = self._train_run(space, make_train_loop, param_schedulers)
            self._has_trained = True
            self._begin(run)
            with start.stoppable(run), run.saving.until_complete():
                yield run

    def val(self, checkpoint: str | Path | None = None) -> dict[str, Any]:
        """Validate, and return the metrics, the same on every rank.

        Args:
            checkpoint: load these weights before, as `load_checkpoint` does; `"best"` for `best_checkpoint`. The model
                keeps them.

        **Collective**: every rank of the job.

        Raises:
            ConfigError: there is no such checkpoint, its weights are those of another model, or there are no data.
        """
        return self._evaluate("val", checkpoint, partial(self._make_eval_loop, "val"))

    def test(self, checkpoint: str | Path | None = None) -> dict[str, Any]:
        """Test, and return the metrics, the same on every rank; see `val`.

        **Collective**: every rank of the job.
        """
        return self._evaluate("test", checkpoint, partial(self._make_eval_loop, "test"))

    def predict(
        self, dataloader: Any = None, *, out_dir: str | Path | None = None, checkpoint: str | Path | None = None
    ) -> list[Any] | None:
        """Return what the model predicts for each sample, in the order of the dataset, each sample once.

        A prediction is what `forward` returns, or the model's own `test_step`, split into samples; see `per_sample`.
        Targets and the loss are not needed. Hooks act as in a test, and `test_cfg` says the precision.

        Args:
            dataloader: a `DataLoader` or the config of one, which may shuffle; by default `test_dataloader`. Its
                batches may be with or without targets.
            out_dir: write each prediction to a file of its own in this folder, `00000012.pt` for the sample with index
                12, which `torch.load` reads; and return None. All ranks must see the folder.
            checkpoint: load these weights before; see `val`.

        Returns:
            On rank 0, the predictions in CPU memory. On the other ranks, None.

        **Collective**: every rank of the job. **Cost**: memory on rank 0 for all predictions; with `out_dir`, for those
        of a batch.

        Raises:
            TypeError: what the model returns can't be split into samples.
            ConfigError: there is not one loader; or, with `out_dir`, its samples have no indices.
        """
        loader = self.args.test_dataloader if dataloader is None else dataloader
        if loader is None or "" not in (several := named_loaders(loader)):
            found = "None" if loader is None else f"several: {', '.join(several)}"
            raise ConfigError(f"`dataloader` must be one data loader to predict for, but is {found}")
        keeper = Predictions(out_dir)

        cfg = self.args.test_cfg if isinstance(self.args.test_cfg, Mapping) else {}
        precision = {name: cfg[name] for name in ("fp16", "dtype") if name in cfg}

        def make_loop(run: Run) -> EvalLoop:
            own = build.build_loader("test", loader, run, run.data_shard)
            run.predict_loop = loop = PredictLoop(run, own, Evaluator(keeper), **precision)
            return loop

        self._evaluate("predict", checkpoint, make_loop)
        return keeper.collected

    @property
    def best_checkpoint(self) -> Location | None:
        """The best checkpoint by the first metric of `save_best`, of this training or else the last in the work_dir."""
        return resume_from.best_checkpoint(self.args, self._hooks, self._run)

    @property
    def _hooks(self) -> list[Any]:
        return [hook for hook, _ in self._custom_hooks]

    def register_hook(self, hook: Hook | Mapping[str, Any], priority: str | int | None = None) -> None:
        """Add a hook; a `priority` overrides its own. If a run exists, the hook is called from then on."""
        self._custom_hooks.append((hook, priority))
        if self._run is not None:
            self._run.register_hook(hook, priority)

    def load_checkpoint(
        self,
        filename: str | Path,
        *,
        strict: bool | None = None,
        revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
    ) -> None:
        """Load weights now, or, if there is no model yet, as soon as it is built.

        Args:
            filename: a checkpoint, a run's folder or a work_dir; a folder of HuggingFace's; or a file of weights.
            strict: raise an error if weights are missing, unknown or of another shape; else log a warning. By default
                this is False for a model that is to be trained, else True.
            revise_keys: patterns in the names of the weights, and their replacements.

        **Collective**: every rank.
        """
        if self._run is None:
            self._load_from = Weights(locate(filename), strict, revise_keys)
        else:
            self._run.load_checkpoint(filename, strict=strict, revise_keys=revise_keys)
            self._has_weights = self._is_loaded = True
            if self._run.rank == 0:  # which writes the records
                found = find_checkpoint(locate(filename))
                meta = {} if found is None else read_meta(found)
                place = {key: value for key, value in meta.items() if key in ("epoch", "iter")}
                self._run.loaded = {"checkpoint": str(filename), **place}

    def save_pretrained(self, save_directory: str | Path, **options: Unpack[PretrainedOptions]) -> None:
        """Write the model's weights as safetensors, and beside them what `from_pretrained` needs, if it has one.

        Of a model of transformers these are its configs; of a model of peft, only the active adapter is written, with
        its config. Of a module that contains one of them, this one is written. Tied weights are written once, and
        weights that are trained in half precision in float32, as their masters.

        Args:
            save_directory: a new or empty folder, or with `overwrite=True` any, or the URL of one that fsspec can open.
            **options: see `PretrainedOptions`.

        **Collective**: every rank; rank 0 writes. **Cost**: one all-gather per sharded tensor, and memory for it; of
        DeepSpeed and ColossalAI, CPU memory for this rank's rows of all sharded tensors.

        Raises:
            ConfigError: the folder is not empty or cannot be written, or several parts of the model could be meant.

        Example::

            runner.save_pretrained("my_model")  # then AutoModelForCausalLM.from_pretrained("my_model")
        """
        self.run.save_pretrained(save_directory, **options)

    @contextmanager
    def _running(self, what: str, *, trains: bool = False) -> Iterator[Workspace]:
        """Log to the run's folder, and close what has been opened, even after an error."""
        if self._is_running:  # its end would close the records, visualizers and workers of the run around it
            raise RuntimeError(
                f"this Runner is running, and can't be {what} by one of its own hooks or steps. What a validation "
                "predicts is the argument `outputs` of after_val_iter; further data to validate on are further "
                'entries of `val_dataloader`, as in {"clean": ..., "noisy": ...}'
            )
        space = self._workspace
        if space is None:
            space = start.open_workspace(self.args, self._load_from, self.message_hub, self._hooks, trains=trains)
            self._workspace = space
        elif trains and not space.trains:
            start.let_train(space, self._load_from, self._hooks)
        self.message_hub.make_current()
        with start.logging_to_folder(space):
            failed = self._is_running = True
            is_complete = False
            try:
                yield space
                failed, is_complete = False, True
            except Preempted:
                failed = False  # trackers must not call it a failure: it goes on when it is started again
                raise
            except Exception as error:
                description.note_failure(error, self._run or space)
                raise
            finally:
                self._is_running = False
                try:
                    (self._run or space).close(failed=failed)
                except Exception as error:
                    if is_complete:
                        raise
                    # The error that ended the run is raised.
                    self.logger.warning("not everything can be closed: %s", error_in_words(error))
            description.print_summary(self.run, what, perf_counter() - self._began)

    def _train_run(
        self,
        space: Workspace,
        make_train_loop: Callable[[TrainRun], Any] | None = None,
        param_schedulers: list[Any] | None = None,
    ) -> TrainRun:
        """Build the run, unless a subclass has done so before; see `training`."""
        if isinstance(self._run, TrainRun):
            return self._run
        strategy, model = self._strategy_and_model(training=True)
        optim = self._or_default("optim_wrapper", DEFAULT_OPTIM_WRAPPER)
        optim_wrapper, parts = self._prepare(space, strategy, model, optim)
        assert optim_wrapper is not None, "a strategy that is given an optimizer returns its wrapper"
        train_dataloader = self._build_loader("train", space, parts["data_shard"])
        if make_train_loop is None:
            train_cfg = self._or_default("train_cfg", DEFAULT_TRAIN_CFG)
            make_train_loop = partial(build.build_train_loop, train_cfg)
        run = self._train_run_type(
            **parts, optim_wrapper=optim_wrapper, train_dataloader=train_dataloader, make_train_loop=make_train_loop
        )
        build.set_schedules(run, param_schedulers)
        if self.args.val_dataloader is not None:
            self._make_eval_loop("val", run)
        return run

    def _strategy_and_model(self, *, training: bool) -> tuple[Strategy, nn.Module]:
        """Return the strategy and model of the previous run, or new ones, which are not yet prepared."""
        if self._run is not None:
            strategy, model = self._run.strategy, self._run.model
        else:
            with building("strategy"):
                strategy = build_strategy(build.strategy_of(self.args))
            model = build.build_model(self.args, strategy)
        # A module that is handed in only to be evaluated may have trained already.
        if training or (self._load_from is None and not isinstance(self.args.model, nn.Module)):
            self._init_weights(model)
        return strategy, model

    def _init_weights(self, model: nn.Module) -> None:
        """Let the model initialise its weights, unless it has those of a checkpoint, or has done so before."""
        if not self._has_weights and build.init_weights(model) and self._run is not None:
            self.logger.warning(
                "`init_weights` of %s initialises the weights now, at the start of the training: those that were "
                "evaluated before are others",
                type(unwrap_model(model)).__name__,
            )
        self._has_weights = True

    def _prepare(
        self, space: Workspace, strategy: Strategy, model: nn.Module, optim: Any = None
    ) -> tuple[OptimWrapper | None, dict[str, Any]]:
        """Return the optim wrapper, if the model is trained, and the parts that every run has."""
        model, optim_wrapper = strategy.prepare(model, optim)
        shard = agree_on_shard(*strategy.data_shard)
        self.logger.info("model: %s", description.describe_model(model, strategy))
        visualizer = build.build_visualizer(self.args.visualizer, space.rank)
        own = {
            "strategy": strategy,
            "model": model,
            "data_shard": shard,
            "hooks": HookList(owner=self._number),
            "visualizer": visualizer,
        }
        return optim_wrapper, {**vars(space), **own}

    def _evaluate(
        self,
        mode: Literal["val", "test", "predict"],
        checkpoint: str | Path | None,
        make_loop: Callable[[Run], EvalLoop],
    ) -> dict[str, Any]:
        verb = {"val": "validate"}.get(mode, mode)
        if checkpoint is not None and not isinstance(checkpoint, str | PathLike | Location):
            raise TypeError(
                f"`checkpoint` must be the path of a checkpoint, but is of type {type(checkpoint).__name__}. Data to "
                f"{verb} are `{mode.replace('predict', 'test')}_dataloader` of the Runner; predict(dataloader) takes "
                "others"
            )
        if mode != "predict" and getattr(self.args, f"{mode}_dataloader") is None:
            raise ConfigError(f"`{mode}_dataloader` must be given to {verb}, but is None")
        with self._running(f"{verb.removesuffix('e')}ed") as space:
            if checkpoint is not None:
                if checkpoint == "best":
                    checkpoint = str(run_on_main(lambda: resume_from.find_best(self.args, self._hooks, self._run)))
                self.load_checkpoint(checkpoint, strict=True)
            run = self._run
            if run is None:
                _, parts = self._prepare(space, *self._strategy_and_model(training=False))
                run = self._run_type(**parts)
            loop = make_loop(run)
            self._begin(run)
            metrics: dict[str, Any] = loop.run()
            run.call_hook("after_run")
        return metrics

    def _build_loader(self, mode: Literal["train", "val", "test"], space: Workspace, shard: DataShard) -> Any:
        """Return the loader of this rank's shard of the data for a mode. **Collective**: every rank."""
        return build.build_loader(mode, getattr(self.args, f"{mode}_dataloader"), space, shard)

    def _make_eval_loop(self, mode: Literal["val", "test"], run: Run) -> EvalLoop:
        """Return the run's validation or test loop, and build it if there is none."""
        loop: EvalLoop | None = getattr(run, f"{mode}_loop")
        if loop is None:
            loop = build.build_eval_loop(mode, run, self._build_loader(mode, run, run.data_shard))
            setattr(run, f"{mode}_loop", loop)
        run.predict_loop = None
        return loop

    def _begin(self, run: Run) -> None:
        """Open the run's records, and call `before_run`; of a new run, build the hooks before, and restore it after."""
        if run is self._run:
            self._open(run)
        self._hook_and_load(run)
        self._is_open = False
        self._began = perf_counter()

    def _open(self, run: Run) -> None:
        """Open the run's records, and call `before_run`, unless that was called when the run was built."""
        description.write_environment(run)
        description.begin_records(run)
        if not self._is_open:
            run.call_hook("before_run")
        self._is_open = True

    def _hook_and_load(self, run: Run) -> None:
        """Build the run's hooks, open it, and restore its state; for an existing run that has it, do nothing."""
        if run is not self._run:
            run.tell_hub()
            for hook in build.default_hooks(self.args.default_hooks):
                with building("default_hooks"):
                    run.register_hook(hook)
            for hook, priority in self._custom_hooks:
                with building("custom_hooks"):
                    run.register_hook(hook, priority)
            self._run = run
            self._open(run)  # before the state is restored: what a hook sets up in `before_run` must not replace it
        elif self._is_loaded:
            return
        weights = self._load_from
        if weights is None and run.stored is not None:
            weights = Weights(run.stored.directory, strict=True)
        if isinstance(run, TrainRun) and (self.args.resume or run.stored is not None):
            resuming.resume_run(run)
            weights = weights if run.stored is None else None
        if not self._is_loaded and weights is not None:  # later runs go on with the model of the one before
            load_weights(run.strategy, unwrap_model(run.model), weights, training=isinstance(run, TrainRun))
            self._has_weights = True
        self._is_loaded = True

    def _or_default(self, name: str, default: Mapping[str, Any]) -> Any:
        given = getattr(self.args, name)
        if given is None:
            self.logger.info("`%s` is not given; by default it is %s", name, dict(default))
            return default
        return given


def _not_built(name: str) -> AttributeError:
    return AttributeError(f"`{name}` is built by train(), val() or test(), and none of them has built it yet")


FlexibleRunner = Runner
"""MMEngine's name of a Runner that takes a strategy, as every `Runner` does."""
