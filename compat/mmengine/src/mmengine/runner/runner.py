"""`Runner`: lockstep's, with the parts and methods that code for MMEngine expects of one that has been made."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep.runner
from lockstep.dataset import DataShard, build_dataloader
from lockstep.dist import get_rank, infer_launcher
from lockstep.errors import ConfigError
from lockstep.launch.worker import RESUME_SINCE
from lockstep.location import Location, locate
from lockstep.model import unwrap_model
from lockstep.registry import in_default_scope
from lockstep.runner import build, start
from lockstep.runner.arguments import DEFAULT_HOOKS, RunnerArguments
from lockstep.runner.hook import HookList
from lockstep.runner.resume_from import find_resumption
from lockstep.runner.run import Run, TrainRun, Workspace
from lockstep.runner.seeds import set_randomness
from lockstep.strategy import Strategy, build_strategy
from lockstep.weights import Weights, find_checkpoint, load_weights
from mmengine.config import Config
from mmengine.dist.utils import prefer_launcher
from mmengine.registry import RUNNERS, init_default_scope
from mmengine.runner.building import BuildsParts
from mmengine.runner.checkpoint import REVISE_KEYS, _load_checkpoint, _load_checkpoint_to_model
from mmengine.runner.data import as_mmengine
from mmengine.runner.exporting import read_as_file
from mmengine.runner.loops import CountsOwnBatches, build_train_loop
from mmengine.runner.resuming import MMEngineFile, file_to_resume, shown_to_hooks
from mmengine.runner.saved import KEY, restore_hub, saved_hub, with_mmengines_keys

__all__ = ["FlexibleRunner", "Runner"]

Mode = Literal["train", "val", "test"]
_BY_ITSELF = ("model", "hooks", "visualizer", *(f"{mode}_dataloader" for mode in ("train", "val", "test")),
              "val_evaluator", "test_evaluator")  # fmt: skip
_OF_A_RUN = (
    "train_loop", "val_loop", "test_loop", "optim_wrapper", "param_schedulers", "strategy", "data_shard",
    "val_begin", "val_interval", "run",
)  # fmt: skip


class _SeenByHooks(Run):
    """What MMEngine's hooks and loops ask of a run, beside what only the Runner has, such as `build_dataloader`."""

    val_dataloader = property(attrgetter("val_loop.dataloader"))
    val_evaluator = property(attrgetter("val_loop.evaluator"))
    test_dataloader = property(attrgetter("test_loop.dataloader"))
    test_evaluator = property(attrgetter("test_loop.evaluator"))

    def __getattr__(self, name: str) -> Any:
        owner = vars(self).get("owner")
        if owner is None or not hasattr(type(owner), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(owner, name)

    def load_checkpoint(
        self,
        filename: str | Path,
        map_location: Any = "cpu",
        strict: bool | None = None,
        revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
    ) -> None:
        """Load weights; they go to the model's device, whatever `map_location` is. **Collective**: every rank."""
        super().load_checkpoint(filename, strict=strict, revise_keys=revise_keys)


@dataclass(kw_only=True, eq=False)
class _Run(_SeenByHooks):
    owner: Any = None


@dataclass(kw_only=True, eq=False)
class _TrainRun(_SeenByHooks, TrainRun):
    owner: Any = None

    val_begin = property(attrgetter("train_loop.val_begin"))
    val_interval = property(attrgetter("train_loop.val_interval"))

    def save_checkpoint(
        self, *args: Any, by_epoch: bool | None = None, save_param_scheduler: bool = True, **options: Any
    ) -> Location:
        """Save a checkpoint at the end of an epoch, or else of an iteration; schedules are always saved."""
        if by_epoch is not None:
            epoch, iteration = self._complete(by_epoch=by_epoch)
            options = {"epoch": epoch, "iteration": iteration, **options}
        return super().save_checkpoint(*args, **options)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at a point; see `lockstep.hooks.Hook`. Checkpoints also have MMEngine's keys and hub."""
        checkpoint = kwargs.get("checkpoint", {})
        if fn_name == "before_save_checkpoint" and "epoch" in checkpoint["meta"]:
            with with_mmengines_keys(self, checkpoint):
                super().call_hook(fn_name, **kwargs)
            return
        if fn_name == "before_load_checkpoint":
            for name in checkpoint["meta"].get(KEY, {}).get("parts", ()):
                checkpoint.setdefault(name, None)  # asks for what hooks have added, whatever it is
        if fn_name == "after_load_checkpoint" and "model" in checkpoint:
            meta = checkpoint["meta"]
            if own := meta.get(KEY):
                restore_hub(self, saved_hub(own))
            checkpoint["state_dict"] = checkpoint["model"]
            checkpoint.setdefault("param_schedulers", meta.get("param_schedulers"))
            checkpoint.setdefault("message_hub", saved_hub(meta.get(KEY, {})))
            meta |= {key: checkpoint.pop(key) for key in ("dataset_meta",) if key in checkpoint}
        if fn_name == "after_train_iter" and isinstance(self.train_loop, CountsOwnBatches):
            self.train_loop.note_own_batch(kwargs.get("data_batch"))
        super().call_hook(fn_name, **kwargs)


@RUNNERS.register_module()
class Runner(BuildsParts, lockstep.runner.Runner):
    """lockstep's Runner, with MMEngine's order of arguments, and with parts before the training.

    As in MMEngine, the constructor joins the ranks, seeds them, and creates the run's folder. The model, the hooks, the
    visualizer, the data loaders and the evaluators are built when they are first touched; the model is then not wrapped
    yet. Loops, the optim wrapper and the schedules are built together, as the training needs them.

    Args:
        model: as for `lockstep.Runner`, like all others.
        work_dir: the folder of this experiment.
        train_dataloader: data to train with.
        val_dataloader: data to validate with.
        test_dataloader: data to test with.
        train_cfg: the training loop.
        val_cfg: the validation loop.
        test_cfg: the test loop.
        auto_scale_lr: how learning rates are scaled.
        optim_wrapper: the optimizer.
        param_scheduler: schedules of learning rates.
        val_evaluator: metrics of the validation.
        test_evaluator: metrics of the test.
        default_hooks: changes to the default hooks.
        custom_hooks: further hooks.
        data_preprocessor: the preprocessor, if the model's config has none.
        load_from: weights; with `resume`, a checkpoint of lockstep or of MMEngine.
        resume: resume from `load_from`, or from the last checkpoint in the work_dir, of lockstep or of MMEngine.
        launcher: what started the ranks; `"none"` for one process.
        env_cfg: the processes' environment.
        log_processor: writes lines to the log, beside lockstep's own; see `LoggerHook`.
        log_level: the lowest level of messages.
        visualizer: where records and images go; by default a `Visualizer` that writes to the run's folder.
        default_scope: the registry in which names are looked up first, from now on.
        randomness: the seed; `diff_rank_seed=True` lets ranks draw different random numbers.
        experiment_name: begins the name of the run's folder.
        cfg: the whole config.
        **others: the arguments that only lockstep has: `strategy`, `compile`, `loss`, `stop_signals`, `resume_options`,
            which is `"checkpoint"` by default: as in MMEngine, a run that resumes has the optimizer's options and the
            schedules that were saved.

    **Collective**: every rank of the job.
    """

    _run_type = _Run
    _train_run_type = _TrainRun

    work_dir = property(lambda self: str(self._workspace.work_dir))  # both are texts in MMEngine
    log_dir = property(lambda self: str(self.run_dir))
    experiment_name = property(attrgetter("run_dir.name"))

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
        auto_scale_lr: Mapping[str, Any] | None = None,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        val_evaluator: Any = None,
        test_evaluator: Any = None,
        default_hooks: Mapping[str, Any] | None = None,
        custom_hooks: list[Any] | None = None,
        data_preprocessor: nn.Module | Mapping[str, Any] | None = None,
        load_from: str | Path | None = None,
        resume: bool = False,
        launcher: str | None = "none",
        env_cfg: Mapping[str, Any] | None = None,
        log_processor: Any = None,
        log_level: int | str = "INFO",
        visualizer: Any = None,
        default_scope: str | None = "mmengine",
        randomness: Mapping[str, Any] | None = None,
        experiment_name: str | None = None,
        cfg: Any = None,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        self._log_processor = given.pop("log_processor")
        if isinstance(model, Mapping) and data_preprocessor is not None:
            given["model"] = {"data_preprocessor": data_preprocessor, **model}
            given["data_preprocessor"] = None
        given["cfg"] = Config({}) if cfg is None else cfg
        if visualizer is None:
            given["visualizer"] = {"type": "mmengine.Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]}
        given["default_hooks"] = {"runtime_info": {"type": "mmengine.RuntimeInfoHook"}, **(default_hooks or {})}
        given["env_cfg"] = env_cfg = _with_backend(env_cfg)
        # As in MMEngine, all ranks draw the same random numbers unless told otherwise.
        given["randomness"] = {"diff_rank_seed": False, **(randomness or {})}
        prefer_launcher(launcher)
        start.join_ranks(launcher, env_cfg)
        self._file: MMEngineFile | None = None
        if resume and (path := file_to_resume(load_from, work_dir)) is not None:
            self._file = MMEngineFile(path)
            given.update(resume=False, load_from=None)
            if (randomness or {}).get("seed") is None and self._file.seed is not None:
                given["randomness"] |= {"seed": self._file.seed}
        super().__init__(**given, **{"resume_options": "checkpoint", **others})
        self.message_hub.make_current()
        if self._load_from is not None:
            self._load_from = self._load_from._replace(strict=False)
        self._unprepared: tuple[Strategy, nn.Module] | None = None
        self._early_hooks: HookList | None = None
        if default_scope is not None:
            RUNNERS._fill(default_scope)
            init_default_scope(default_scope)
        self._workspace = start.open_workspace(
            self.args, self._load_from, self.message_hub, trains=train_dataloader is not None
        )
        self.args = replace(self.args, visualizer=self._in_run_folder(self.args.visualizer))

    @classmethod
    def from_cfg(cls, cfg: Mapping[str, Any]) -> Runner:
        """Return the runner that a config describes: its keys are the arguments of `Runner`; the config is copied."""
        cfg = deepcopy(cfg)
        return cls(**RunnerArguments.keywords_of(cfg), log_processor=cfg.get("log_processor"))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "model" and self._run is None:  # which is trained in the place of the given one
            vars(self)["model"] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or vars(self).get("_workspace") is None or self._run is not None:
            return self._of_the_run(name)
        if name in _BY_ITSELF:
            return self._early(name)
        if name in _OF_A_RUN:
            self.built()
            return getattr(self, name)
        if name in ("max_epochs", "max_iters") and isinstance(cfg := self.args.train_cfg, Mapping):
            return cfg[name] if name in cfg else getattr(self.built(), name)
        return super().__getattr__(name)  # type: ignore[misc]

    def _of_the_run(self, name: str) -> Any:
        if name in ("val_loop", "test_loop") and vars(self).get("_run") is not None:
            mode: Any = name.removesuffix("_loop")
            if getattr(self.run, name) is None and getattr(self.args, f"{mode}_dataloader") is not None:
                return self._make_eval_loop(mode, self.run)
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def _hooks(self) -> list[Any]:
        return list(self.hooks)

    @property
    def timestamp(self) -> str:
        """When the run began, as in `20260131_235959`; it is part of its folder's name."""
        times: list[str] = re.findall(r"\d{8}_\d{6}", self.run_dir.name)
        return times[-1]

    @property
    def model_name(self) -> str:
        """Name of the class of the user's own model."""
        return type(unwrap_model(self.model)).__name__

    @property
    def launcher(self) -> str:
        """Who started the ranks."""
        return self.args.launcher or infer_launcher()

    @property
    def deterministic(self) -> bool:
        """Whether only deterministic algorithms may be used."""
        return bool((self.args.randomness or {}).get("deterministic"))

    @property
    def _resume(self) -> bool:
        return self.args.resume or self._file is not None

    def built(self) -> Run:
        """Return the run that `train()` will use, or, without data to train with, `val()` and `test()`.

        **Collective**: every rank.
        """
        if self._run is None and self.args.train_dataloader is not None:
            with self._running("built", trains=True) as space:
                self._hook_and_load(self._train_run(space))
        elif self._run is None:
            with self._running("built") as space:
                _, parts = self._prepare(space, *self._strategy_and_model(training=False))
                run = self._run_type(**parts)
                self._hook_and_load(run)
        return self.run

    def register_hook(self, hook: Any, priority: str | int | None = None) -> None:
        """Add a hook; a `priority` overrides its own."""
        if self._early_hooks is None or self._run is not None:
            super().register_hook(hook, priority)
            return
        known = set(self._early_hooks)
        self._early_hooks.register(hook, priority)
        self._custom_hooks += [(one, None) for one in self._early_hooks if one not in known]

    def register_default_hooks(self, hooks: Mapping[str, Any] | None = None) -> None:
        """Add the default hooks with these changes."""
        for hook in build.default_hooks(hooks):
            self.register_hook(hook)

    def register_custom_hooks(self, hooks: list[Any]) -> None:
        """Add several hooks."""
        for hook in hooks:
            self.register_hook(hook)

    def register_hooks(
        self, default_hooks: Mapping[str, Any] | None = None, custom_hooks: list[Any] | None = None
    ) -> None:
        """Add the default hooks with changes, and further hooks."""
        self.register_default_hooks(default_hooks)
        self.register_custom_hooks(custom_hooks or [])

    def get_hooks_info(self) -> str:
        """Return the hooks in the order in which they are called, one a line."""
        return "\n".join(f"({hook.priority!s:<12}) {type(hook).__name__}" for hook in self.hooks)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at a point."""
        self.built().call_hook(fn_name, **kwargs)

    def dump_config(self) -> None:
        """Write the config to the work_dir."""
        if get_rank() == 0:
            name = Path(getattr(self.cfg, "filename", None) or f"{self.timestamp}.py").name
            self.cfg.dump(Path(self.work_dir, name))

    def load_checkpoint(
        self,
        filename: str | Path,
        map_location: Any = "cpu",
        strict: bool | None = False,
        revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
    ) -> Any:
        """Load weights now, and return all that the checkpoint holds; see `lockstep.runner.Runner.load_checkpoint`.

        Of a model that is to be trained, they are loaded once more after its weights have been initialised.
        """
        folder = find_checkpoint(locate(filename))
        checkpoint = _load_checkpoint(filename, map_location) if folder is None else read_as_file(folder)
        super().load_checkpoint(filename, strict=strict, revise_keys=revise_keys)
        if self._run is None:
            _load_checkpoint_to_model(self.model, checkpoint, bool(strict), None, revise_keys)
        return checkpoint

    def load_or_resume(self) -> None:
        """Load the weights or resume, as the arguments say, if that has not been done. **Collective**: every rank."""
        self.built()

    def resume(
        self,
        filename: str | Path,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: Any = "default",
    ) -> None:
        """Build the training, and resume it from a checkpoint of lockstep or of MMEngine. **Collective**: every rank.

        Ranks that a launcher has started again resume from the last checkpoint of their job instead.

        Args:
            filename: the checkpoint.
            resume_optimizer: must be True.
            resume_param_scheduler: whether the optimizer's options and the schedules are those that were saved.
            map_location: for MMEngine's signature; the state goes to the model's device.

        Raises:
            ConfigError: there is no such checkpoint, or `resume_optimizer` is False.
            RuntimeError: the training has begun; or it has been built with another seed than the checkpoint's.
        """
        if not resume_optimizer:
            raise ConfigError(
                "`resume_optimizer` must be True, but is False: a training resumes with its optimizer's state. To "
                "begin another one with these weights, call load_checkpoint()"
            )
        run: Any = self._run or self._workspace
        if RESUME_SINCE in os.environ and run.stored is not None:  # ranks that start again go on from their own
            self.built()
            return
        if isinstance(run, TrainRun) and run.iter:
            raise RuntimeError(f"resume() must be called before the training, but that has made {run.iter} iterations")
        if not resume_param_scheduler:
            run.args = self.args = replace(self.args, resume_options="config")
        if find_checkpoint(locate(filename)) is None:
            self._file = MMEngineFile(str(filename))
            seed = self._file.seed
        else:
            run.stored, run.skipped = find_resumption(Weights(locate(filename), None, REVISE_KEYS), [])
            seed = None if run.stored is None else run.stored.meta["seed"]
        if seed is not None and (self.args.randomness or {}).get("seed") is None and seed != run.seed:
            if self._run is not None:
                raise RuntimeError(
                    f"resume() must be called before the training is built, but that has the seed {run.seed}, and the "
                    f"checkpoint {seed}. Give that in `randomness`, or touch no loop, optim_wrapper or schedule before"
                )
            run.seed = set_randomness({**(self.args.randomness or {}), "seed": seed})
        if isinstance(run, TrainRun):
            self._is_loaded = False
            with start.logging_to_folder(run):
                self._hook_and_load(run)
        else:
            self.built()

    def _strategy_and_model(self, *, training: bool) -> tuple[Strategy, nn.Module]:
        if self._run is not None:
            return self._run.strategy, self._run.model
        strategy, model = self._before_wrapping()
        model = vars(self).pop("model", model)  # the caller's own
        if training:
            if self._counts_iterations():
                # MMEngine opens the data of a loop by iterations before it initialises the weights, and torch's loader
                # draws a number when it is opened.
                torch.empty((), dtype=torch.int64).random_()
            build.init_weights(model)
        return strategy, model

    def _train_run(
        self,
        space: Workspace,
        make_train_loop: Callable[[TrainRun], Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> TrainRun:
        cfg = self.args.train_cfg
        if make_train_loop is None and isinstance(cfg, Mapping) and "type" in cfg:
            make_train_loop = partial(build_train_loop, cfg)
        return super()._train_run(space, make_train_loop, *args, **kwargs)

    @contextmanager
    def training(self, *args: Any, **kwargs: Any) -> Iterator[TrainRun]:
        """Build a run that trains; a loop of the user's own is prepared here. See `lockstep.runner.Runner.training`."""
        with super().training(*args, **kwargs) as run:
            getattr(run.train_loop, "prepare_own", lambda: None)()
            yield run

    def _prepare(self, *args: Any, **kwargs: Any) -> Any:
        optim_wrapper, parts = super()._prepare(*args, **kwargs)
        return optim_wrapper, {**parts, "owner": self}

    def _before_wrapping(self) -> tuple[Strategy, nn.Module]:
        if self._unprepared is None:
            strategy = build_strategy(build.strategy_of(self.args))
            self._unprepared = strategy, build.build_model(self.args, strategy)
        return self._unprepared

    def _build_loader(self, mode: Mode, space: Workspace, shard: DataShard) -> Any:
        given = getattr(self.args, f"{mode}_dataloader")
        if isinstance(given, Mapping):
            options = self.args.randomness or {}
            seed = space.seed + (get_rank() if options.get("diff_rank_seed") else 0)
            given = as_mmengine(given, seed, shard.rank)
            if mode == "train" and self._counts_iterations():
                given["generator"] = given["generator"] or torch.Generator()  # the number has been drawn
        return build.build_loader(mode, given, space, shard)

    def _hook_and_load(self, run: Run) -> None:
        is_new = run is not self._run or not self._is_loaded
        weights, self._load_from = self._load_from, None
        try:
            super()._hook_and_load(run)
        finally:
            self._load_from = weights
        self._is_loaded = False
        if is_new and weights is not None and run.stored is None:
            with shown_to_hooks(run, weights) as shown:
                load_weights(run.strategy, unwrap_model(run.model), shown, training=isinstance(run, TrainRun))
        if is_new and self._file is not None and isinstance(run, TrainRun):
            self._file.restore(run)
            self._file = None
        self._is_loaded = True

    def _early(self, name: str) -> Any:
        """Build one part, which the run will use."""
        with in_default_scope(self.args.default_scope):
            if name == "model":
                return self._before_wrapping()[1]
            if name == "hooks":
                return self._built_hooks()
            if name == "visualizer":
                built: Any = build.build_visualizer(self.args.visualizer, get_rank())
            elif name.endswith("_evaluator"):
                built = self.build_evaluator(self._given(name))
            else:
                built = self._built_loader(name)
        self.args = replace(self.args, **{name: built})
        return built

    def _given(self, name: str) -> Any:
        given = getattr(self.args, name)
        if given is None:
            raise AttributeError(f"this runner has no `{name}`")
        return given

    def _built_loader(self, name: str) -> Any:
        given, mode = self._given(name), name.removesuffix("_dataloader")
        if isinstance(given, DataLoader):
            return given
        return build_dataloader(as_mmengine(given, self.seed), seed=self.seed, evaluation=mode != "train")

    def _built_hooks(self) -> HookList:
        if self._early_hooks is None:
            hooks = HookList(build.default_hooks(self.args.default_hooks))
            for hook, priority in self._custom_hooks:
                hooks.register(hook, priority)
            self._early_hooks = hooks
            self._custom_hooks = [(hook, None) for hook in hooks]
            self.args = replace(self.args, default_hooks=dict.fromkeys(DEFAULT_HOOKS))
        return self._early_hooks

    def _counts_iterations(self) -> bool:
        """Return whether the training counts iterations, not epochs."""
        cfg = self.args.train_cfg if isinstance(self.args.train_cfg, Mapping) else {}
        return not cfg.get("by_epoch", "max_iters" not in cfg)

    @contextmanager
    def _running(self, what: str, *, trains: bool = False) -> Iterator[Workspace]:
        assert self._workspace is not None
        self._workspace.args = self.args
        with super()._running(what, trains=trains) as space:
            yield space


@RUNNERS.register_module()
class FlexibleRunner(Runner):
    """`Runner` under MMEngine's name of one that takes a strategy, as every `Runner` here does.

    As in MMEngine, it joins the ranks that a launcher has started unless `launcher` says otherwise.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("launcher", None)
        super().__init__(*args, **options)


def _with_backend(env_cfg: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `env_cfg` with a `backend` that is beside `dist_cfg`, as MMEngine's tutorial has it, inside of that."""
    given = dict(env_cfg or {})
    if "backend" in given:
        given["dist_cfg"] = {"backend": given.pop("backend"), **(given.get("dist_cfg") or {})}
    return given
