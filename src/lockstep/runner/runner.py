"""`Runner`: from a model and data to a trained model, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from torch import nn

from lockstep.dataset import DataShard, agree_on_shard, build_dataloader
from lockstep.device import get_device
from lockstep.dist import get_dist_info
from lockstep.errors import ConfigError
from lockstep.evaluator import Evaluator
from lockstep.hooks import Hook, HookList
from lockstep.logging import JsonLinesSink, MessageHub, open_console, run_logging
from lockstep.optim import OptimWrapper, ParamScheduler
from lockstep.registry import RUNNERS, in_default_scope
from lockstep.runner import build, recording, saving, start, summary
from lockstep.runner.arguments import Arguments
from lockstep.runner.checkpoints import RunCheckpoints
from lockstep.runner.eval_loops import EvalLoop
from lockstep.runner.loops import TrainLoop
from lockstep.runner.seeds import set_randomness
from lockstep.runner.weights import Weights, load_weights
from lockstep.strategy import Strategy, build_strategy
from lockstep.visualization import Visualizers, build_visualizers


@RUNNERS.register_module()
class Runner(RunCheckpoints):
    """Trains, validates and tests a model.

    Making one only looks at the arguments. `train()`, `val()` and `test()` join the ranks, build what they need in the
    order in which their code reads, and run. Every part is an object or a config dict; what is left out gets a default,
    which is logged.

    Args:
        model: any `torch.nn.Module`: a `BaseModel`, one that returns its loss, or one that is wrapped already.
        work_dir: the folder for this experiment; each run makes a folder of its own in it.
        train_dataloader: a `DataLoader` or the config of one; see `build_dataloader`.
        val_dataloader: the same, for validation; needs `val_evaluator`.
        test_dataloader: the same, for testing; needs `test_evaluator`.
        train_cfg: `by_epoch` and `max_epochs` or `max_iters`, `val_begin`, `val_interval`, `dynamic_intervals`,
            `batch_size_of`; or the `type` of a loop with its arguments.
        val_cfg: arguments of the validation loop: `fp16`, `dtype`.
        test_cfg: arguments of the test loop.
        optim_wrapper: an optim wrapper, an optimizer, or a config with the key `optimizer`.
        param_scheduler: schedules of learning rates; see `build_param_schedulers`.
        val_evaluator: one or more metrics, or an `Evaluator`.
        test_evaluator: the same, for testing.
        default_hooks: changes to the default hooks, by name; None removes one.
        custom_hooks: further hooks.
        strategy: name, config or object; by default `ddp` on several ranks, else `single`.
        launcher: who started the ranks: `"pytorch"`, `"slurm"`, `"mpi"`, `"none"`; by default the environment tells. A
            group that exists already is used.
        env_cfg: `dist_cfg` (arguments of `init_dist`), `cudnn_benchmark`, `mp_cfg`, `resource_limit`.
        load_from: a checkpoint, or a file of weights.
        resume: go on from `load_from`, or from the last checkpoint in the work_dir if there is one.
        randomness: `seed`, `deterministic` and `diff_rank_seed`, without which all ranks draw the same dropout masks.
        compile: compile the model, under FSDP each of its repeated blocks; a dict has arguments for `torch.compile`.
        auto_scale_lr: with `enable=True`, multiply learning rates by the global batch over `base_batch_size`, for
            which they are meant.
        log_level: from which level on messages are shown.
        visualizer: an object with `add_scalars(scalars, step)`, its config, or a list of those; by default
            TensorBoard where it is installed.
        experiment_name: put before the time in the name of the run's folder.
        data_preprocessor: what batches go through on their way to the model, where the model's config names none.
        default_scope: the registries in which names are looked for first, before lockstep's own.
        log_processor: MMEngine's; does nothing, because records hold the means of everything.
        cfg: the config that the arguments come from; saved with the run. Its keys `model_wrapper_cfg`,
            `find_unused_parameters` and `sync_bn` say how ranks share the model, where there is no `strategy`.

    Example::

        Runner(model, "work_dir", train_dataloader=loader, launcher="pytorch").train()
    """

    # What train(), val() and test() build.
    rank: int
    world_size: int
    seed: int
    run_dir: Path
    console: Console
    records: JsonLinesSink
    visualizer: Visualizers
    model: nn.Module
    strategy: Strategy
    share: DataShard
    optim_wrapper: OptimWrapper
    train_dataloader: Any
    val_dataloader: Any
    test_dataloader: Any
    val_evaluator: Evaluator
    test_evaluator: Evaluator
    train_loop: TrainLoop
    hooks: HookList

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        work_dir: str | Path,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        test_dataloader: Any = None,
        train_cfg: Any = None,
        val_cfg: Any = None,
        test_cfg: Any = None,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        val_evaluator: Any = None,
        test_evaluator: Any = None,
        default_hooks: Mapping[str, Any] | None = None,
        custom_hooks: Sequence[Any] | None = None,
        strategy: Strategy | Mapping[str, Any] | str | None = None,
        launcher: str | None = None,
        env_cfg: Mapping[str, Any] | None = None,
        load_from: str | Path | None = None,
        resume: bool = False,
        randomness: Mapping[str, Any] | None = None,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002 - MMEngine's name
        auto_scale_lr: Mapping[str, Any] | None = None,
        log_level: int | str = "INFO",
        visualizer: Any = None,
        experiment_name: str | None = None,
        data_preprocessor: nn.Module | Mapping[str, Any] | None = None,
        default_scope: str | None = None,
        log_processor: Any = None,
        cfg: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}  # all of the arguments
        self.given = Arguments(**given)
        self.work_dir = Path(work_dir)
        self.cfg = cfg
        self.message_hub = MessageHub()
        self.logger = logging.getLogger("lockstep.runner")
        self.param_schedulers: list[ParamScheduler] = []
        self.val_loop: EvalLoop | None = None
        self.last_evaluation: EvalLoop | None = None
        self.test_loop: EvalLoop | None = None
        self._custom_hooks = list(custom_hooks or ())
        self._load_from = None if load_from is None else Weights(Path(load_from))
        self._resume_from: Path | None = None

    @classmethod
    def from_cfg(cls, cfg: Mapping[str, Any]) -> Runner:
        """Return the runner that a config describes: its keys are the arguments of `Runner`.

        Raises:
            ConfigError: `model` or `work_dir` is missing.
        """
        for name in ("model", "work_dir"):
            if name not in cfg:
                raise ConfigError(f"the config must have the key '{name}', but has {sorted(cfg)}")
        return cls(**{name: cfg[name] for name in Arguments.names() if name in cfg}, cfg=cfg)

    def train(self) -> nn.Module:
        """Train, validating where that is due, and return the model.

        **Collective**: every rank of the job.
        """
        if self.given.train_dataloader is None:
            raise ConfigError("`train_dataloader` must be given to train, but is None")
        if "train_loop" in vars(self):
            raise RuntimeError("this Runner has trained already; make another one to train again")
        with self._running("trained"):
            self._lay_out_model(training=True)
            self._prepare_training()
            if self.given.val_dataloader is not None:
                self._prepare_validation()
            self._make_hooks()
            self._restore(training=True)
            recording.begin_records(self)
            self.call_hook("before_run")
            self.train_loop.run()
            self.call_hook("after_run")
        return self.model

    def val(self) -> dict[str, Any]:
        """Validate, and return the metrics, the same on every rank.

        **Collective**: every rank of the job.
        """
        if self.given.val_dataloader is None:
            raise ConfigError("`val_dataloader` must be given to validate, but is None")
        with self._running("validated"):
            self._lay_out_model(training=False)
            loop = self._prepare_validation()
            return self._evaluate(loop)

    def test(self) -> dict[str, Any]:
        """Test, and return the metrics, the same on every rank.

        **Collective**: every rank of the job.
        """
        if self.given.test_dataloader is None:
            raise ConfigError("`test_dataloader` must be given to test, but is None")
        with self._running("tested"):
            self._lay_out_model(training=False)
            self.test_dataloader = self._dataloader("test")
            self.test_evaluator = build.build_evaluator(self.given.test_evaluator)
            self.test_loop = build.build_eval_loop(
                "test", self.given.test_cfg, self, self.test_dataloader, self.test_evaluator
            )
            return self._evaluate(self.test_loop)

    def register_hook(self, hook: Hook | Mapping[str, Any], priority: str | int | None = None) -> None:
        """Add a hook, before anything has run, with a `priority` that may be another than its own."""
        if "hooks" in vars(self):
            raise RuntimeError("hooks must be registered before train(), val() or test()")
        self._custom_hooks.append(hook if priority is None else build.with_priority(hook, priority))

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at a point; see `lockstep.hooks.Hook`."""
        self.hooks.call(fn_name, self, **kwargs)

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        began = perf_counter()
        if "run_dir" not in vars(self):
            self._begin()
        own_log = "log.txt" if self.rank == 0 else f"log_rank{self.rank}.txt"
        self.tell_hub(self.message_hub)
        with (
            in_default_scope(self.given.default_scope),
            run_logging(
                self.console,
                self.run_dir / own_log,
                level=self.given.log_level,
                # The other ranks write only what rank 0 may not have seen.
                file_level="DEBUG" if self.rank == 0 else "WARNING",
            ),
        ):
            self.logger.info(
                "%s, seed %d, folder %s",
                summary.describe_ranks(self.world_size, get_device()), self.seed, self.run_dir,
            )  # fmt: skip
            for key, meant in self.given.misspelt.items():
                self.logger.warning("the config's key `%s` means nothing here: did you mean `%s`?", key, meant)
            try:
                yield
            except Exception as error:
                error.add_note(summary.describe_place(self))
                raise
            finally:
                if "hooks" in vars(self):
                    self.hooks.close()
                    self.visualizer.close()
                self.records.close()
            summary.print_summary(self, what, perf_counter() - began)

    def _begin(self) -> None:
        given = self.given
        start.join_ranks(given.launcher, given.env_cfg)
        self.rank, self.world_size = get_dist_info()
        self.run_dir = start.make_run_dir(self.work_dir, given.experiment_name)
        if given.resume:
            named = None if self._load_from is None else self._load_from.path
            self._resume_from = saving.find_resumption(named, self.work_dir)
        self.seed = set_randomness(saving.randomness_of(given.randomness, self._resume_from))
        self.console = open_console(speaks=self.rank == 0)
        self.records = JsonLinesSink(self.run_dir / "metrics.jsonl")
        if self.rank == 0:
            start.save_config(self.cfg, self.run_dir)

    def _lay_out_model(self, *, training: bool) -> None:
        given = self.given
        if "strategy" not in vars(self):
            self.strategy = build_strategy(build.strategy_of(given.strategy, self.cfg))
            sync_bn = self.cfg.get("sync_bn") if isinstance(self.cfg, Mapping) else None
            self.model = build.build_model(given.model, given.data_preprocessor, self.strategy, given.compile, sync_bn)
            if training:
                build.init_weights(self.model)
        elif not training:
            return
        optim = None
        if training:
            optim = self._or_default("optim_wrapper", self.strategy.own_optim_wrapper or build.DEFAULT_OPTIM_WRAPPER)
        self.model, optim_wrapper = self.strategy.prepare(self.model, optim)
        self.share = agree_on_shard(*self.strategy.data_shard)
        if optim_wrapper is not None:
            self.optim_wrapper = optim_wrapper
        self.logger.info("model: %s", summary.describe_model(self.model, self.strategy))

    def _prepare_training(self) -> None:
        given = self.given
        self.train_dataloader = self._dataloader("train")
        cfg = self._or_default("train_cfg", build.DEFAULT_TRAIN_CFG)
        self.train_loop = build.build_train_loop(cfg, self)
        if given.auto_scale_lr is not None:
            build.scale_lr(given.auto_scale_lr, self)
        self.param_schedulers = build.build_schedulers(given.param_scheduler, self)

    def _prepare_validation(self) -> EvalLoop:
        if self.val_loop is None:
            self.val_dataloader = self._dataloader("val")
            self.val_evaluator = build.build_evaluator(self.given.val_evaluator)
            self.val_loop = build.build_eval_loop(
                "val", self.given.val_cfg, self, self.val_dataloader, self.val_evaluator
            )
        return self.val_loop

    def _make_hooks(self) -> None:
        # Built on every rank, so that what is wrong with it is told by all; used on one.
        self.visualizer = build_visualizers(self.given.visualizer)
        self.visualizer.make_current()
        if self.rank != 0:
            self.visualizer.parts.clear()
        self.hooks = HookList(
            build.build_hooks(
                self.given.default_hooks,
                self._custom_hooks,
                main=self.rank == 0,
                loop=vars(self).get("train_loop"),
            )
        )

    def _restore(self, *, training: bool) -> None:
        if training and self._resume_from is not None:
            saving.resume_run(self, self._resume_from)
        elif self._load_from is not None:
            load_weights(self.strategy, self._load_from, training=training)

    def _evaluate(self, loop: EvalLoop) -> dict[str, Any]:
        if "hooks" not in vars(self):
            self._make_hooks()
            self._restore(training=False)
        recording.begin_records(self)
        self.call_hook("before_run")
        metrics = loop.run()
        self.call_hook("after_run")
        return metrics

    def _dataloader(self, mode: str) -> Any:
        loader = getattr(self.given, f"{mode}_dataloader")
        try:
            return build_dataloader(loader, seed=self.seed, evaluation=mode != "train", shard=self.share[:2])
        except Exception as error:
            error.add_note(f"while building `{mode}_dataloader`")
            raise

    def _or_default(self, name: str, default: Mapping[str, Any]) -> Any:
        given = getattr(self.given, name)
        if given is None:
            self.logger.info("`%s` is not given; by default it is %s", name, dict(default))
            return default
        return given

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__annotations__:
            raise AttributeError(f"`{name}` is built by train(), val() and test(), none of which has come that far")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


FlexibleRunner = Runner
