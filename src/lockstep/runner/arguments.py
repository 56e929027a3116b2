"""The arguments of a Runner: the type, default and content of each, stated once.

`Runner`, `Runner.from_cfg` and the check of configs in `lockstep.lint` read them from here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)  # fmt: skip

from torch import nn
from torch.utils.data import DataLoader

from lockstep.errors import ConfigError, did_you_mean, lacks_key, nearest, require_known
from lockstep.location import on_disk
from lockstep.strategy import Strategy

# What an argument may hold in a config. `lockstep.lint` has a check for each.
Content: TypeAlias = Literal[
    "compile options", "custom hooks", "dataloader", "default hooks", "evaluator", "keys", "model", "model wrapper",
    "optim wrapper", "preprocessor", "schedulers", "strategy", "test loop", "train loop", "val loop", "visualizer",
]  # fmt: skip

ConfigDict: TypeAlias = Mapping[str, Any]
P = ParamSpec("P")

RESUME_OPTIONS = ("config", "checkpoint")
MATMUL_PRECISIONS = ("highest", "high", "medium")
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
DEFAULT_TRAIN_CFG: Mapping[str, Any] = {"by_epoch": True, "max_epochs": 3, "val_interval": 1}
DEFAULT_OPTIM_WRAPPER: Mapping[str, Any] = {"optimizer": {"type": "AdamW", "lr": 1e-3}}
DEFAULT_HOOKS: Mapping[str, Mapping[str, Any]] = {
    "timer": {"type": "IterTimerHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "sync_buffers": {"type": "SyncBuffersHook"},
    "logger": {"type": "LoggerHook"},
    "progress": {"type": "ProgressHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "nan_check": {"type": "NaNCheckHook"},
    "checkpoint": {"type": "CheckpointHook", "interval": None, "by_epoch": None},
}


class Argument(NamedTuple):
    """One argument of a Runner, or one key of a config.

    Attributes:
        must_be: its type in words, if the type is checked.
        holds: what it may hold in a config; None if nothing more is known.
        keys: the keys that it may have, if it holds `"keys"`.
        types: the types that it may be an instance of; empty if any type is accepted.
        is_required: whether it has no default.
    """

    must_be: str | None = None
    holds: Content | None = None
    keys: tuple[str, ...] = ()
    types: tuple[type, ...] = ()
    is_required: bool = False


def _dict_of(*keys: str) -> Argument:
    return Argument("a dict or None", holds="keys", keys=keys)


@dataclass(frozen=True, slots=True)
class RunnerArguments:
    """The arguments of a Runner, as the user gives them; see `Runner`.

    Raises:
        TypeError: an argument has the wrong type, or is no level of logging.
        ConfigError: an argument needs another one, which is missing.
    """

    model: Annotated[
        nn.Module | ConfigDict | Callable[[], nn.Module],
        Argument("a torch.nn.Module, its config or a function that returns it", holds="model"),
    ]
    work_dir: Annotated[str | Path, Argument("a path")]
    train_dataloader: Annotated[Any, Argument(holds="dataloader")] = None
    val_dataloader: Annotated[Any, Argument(holds="dataloader")] = None
    test_dataloader: Annotated[Any, Argument(holds="dataloader")] = None
    train_cfg: Annotated[Any, Argument(holds="train loop")] = None
    val_cfg: Annotated[Any, Argument(holds="val loop")] = None
    test_cfg: Annotated[Any, Argument(holds="test loop")] = None
    optim_wrapper: Annotated[Any, Argument(holds="optim wrapper")] = None
    param_scheduler: Annotated[Any, Argument(holds="schedulers")] = None
    val_evaluator: Annotated[Any, Argument(holds="evaluator")] = None
    test_evaluator: Annotated[Any, Argument(holds="evaluator")] = None
    default_hooks: Annotated[ConfigDict | None, Argument("a dict or None", holds="default hooks")] = None
    custom_hooks: Annotated[Sequence[Any] | None, Argument("a list of hooks or None", holds="custom hooks")] = None
    strategy: Annotated[Strategy | ConfigDict | str | None, Argument(holds="strategy")] = None
    launcher: str | None = None
    env_cfg: Annotated[
        ConfigDict | None,
        _dict_of("dist_cfg", "cudnn_benchmark", "float32_matmul_precision", "mp_cfg", "resource_limit"),
    ] = None
    load_from: Annotated[str | Path | None, Argument("a path or None")] = None
    resume: Annotated[bool, Argument("True (from the last checkpoint, or from `load_from`) or False")] = False
    randomness: Annotated[ConfigDict | None, _dict_of("seed", "deterministic", "diff_rank_seed")] = None
    compile: Annotated[bool | ConfigDict, Argument("a bool or a dict for torch.compile", holds="compile options")] = (
        False
    )
    auto_scale_lr: Annotated[ConfigDict | None, _dict_of("enable", "base_batch_size")] = None
    log_level: Annotated[int | str, Argument("a level of logging, as in 'INFO'")] = "INFO"
    visualizer: Annotated[Any, Argument(holds="visualizer")] = None
    experiment_name: str | None = None
    data_preprocessor: Annotated[
        nn.Module | ConfigDict | None, Argument("a torch.nn.Module, a config dict or None", holds="preprocessor")
    ] = None
    default_scope: Annotated[str | None, Argument("the scope of a registry or None")] = None
    cfg: Any = None
    loss: Annotated[Any, Argument(holds="model")] = None
    resume_options: Annotated[str, Argument("'config' or 'checkpoint'")] = "config"
    stop_signals: Annotated[Sequence[str], Argument("names of signals, as in ['SIGTERM'], or an empty list")] = (
        STOP_SIGNALS
    )
    prefetch_to_device: Annotated[bool, Argument("True or False")] = False
    channels_last: Annotated[bool, Argument("True or False")] = False

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ARGUMENTS}
        for name, says in invalid_arguments(given):
            raise TypeError(f"`{name}` {says}")
        for name, says in missing_arguments(given):
            raise ConfigError(f"`{name}` {says}")
        object.__setattr__(self, "work_dir", on_disk(self.work_dir))

    @staticmethod
    def keywords_of(cfg: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that a config gives under their names, and the config itself.

        Raises:
            ConfigError: an argument without a default is missing.
        """
        for name, argument in ARGUMENTS.items():
            if argument.is_required and name not in cfg:
                raise ConfigError(f"the config {lacks_key(cfg, name)}")
        return {**{name: cfg[name] for name in ARGUMENTS if name in cfg}, "cfg": cfg}

    @property
    def misspelt(self) -> dict[str, str]:
        """Unknown keys of the config, each with the known one that was probably meant.

        A config may hold variables of its own, so only a key very close to an argument's name is reported, and none
        that the config's own code reads.
        """
        known = [*ARGUMENTS, *CONFIG_KEYS, *getattr(self.cfg, "intermediate_keys", ())]
        strange = [key for key in self.cfg if key not in known] if isinstance(self.cfg, Mapping) else []
        meant = {key: get_close_matches(str(key), [*ARGUMENTS, *CONFIG_KEYS], n=1, cutoff=0.85) for key in strange}
        return {key: close[0] for key, close in meant.items() if close}


def _arguments() -> dict[str, Argument]:
    hints = get_type_hints(RunnerArguments, include_extras=True)
    found = {}
    for each in fields(RunnerArguments):
        hint = hints[each.name]
        argument: Argument = hint.__metadata__[0] if get_origin(hint) is Annotated else Argument()
        types = () if argument.must_be is None else tuple(_types(hint.__origin__))
        found[each.name] = argument._replace(types=types, is_required=each.default is MISSING)
    return found


def _types(hint: Any) -> Iterator[type]:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
    for member in members:
        kind = get_origin(member) or member
        yield from (list, tuple) if kind is Sequence else (kind,)  # a str does not count as a sequence


ARGUMENTS: Mapping[str, Argument] = _arguments()
# Keys of MMEngine's configs that lockstep or other tools read in addition to the arguments.
CONFIG_KEYS: Mapping[str, Argument] = {
    "custom_imports": Argument(),
    "find_unused_parameters": Argument(),
    "log_processor": Argument(),
    "model_wrapper_cfg": Argument(holds="model wrapper"),
    "runner_type": Argument(),
    "sync_bn": Argument(),
    "tta_model": Argument(),
    "tta_pipeline": Argument(),
    "vis_backends": Argument(),
}


# Names of arguments in other frameworks, and where the same is given here.
_FOREIGN_NAMES = {
    **dict.fromkeys(("by_epoch", "max_epochs", "max_iters", "val_interval"), "a key of `train_cfg`"),
    **dict.fromkeys(("deterministic", "seed"), "a key of `randomness`"),
    **dict.fromkeys(("callbacks", "hooks"), "`custom_hooks`"),
    **dict.fromkeys(("optimizer", "optimizers", "optim"), "`optim_wrapper`, which takes an optimizer, too"),
    **dict.fromkeys(("lr_scheduler", "scheduler", "schedulers"), "`param_scheduler`"),
    **dict.fromkeys(("logger", "loggers", "trackers"), "`visualizer`"),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "`loss`"),
    **dict.fromkeys(("evaluator", "evaluators", "metrics"), "`val_evaluator` or `test_evaluator`"),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps"),
        "`accumulative_counts`, which a Runner has in `optim_wrapper`",
    ),
    **dict.fromkeys(
        ("grad_clip", "gradient_clip_val", "max_grad_norm"), "`clip_grad`, which a Runner has in `optim_wrapper`"
    ),
    **dict.fromkeys(("mixed_precision", "precision"), "`amp`; in a Runner, an AmpOptimWrapper as `optim_wrapper`"),
    **dict.fromkeys(("ckpt_path", "resume_from", "resume_from_checkpoint"), "`load_from`, with `resume=True`"),
    **dict.fromkeys(
        ("accelerator", "devices", "num_nodes", "num_processes"),
        "given to the launcher: lockstep launch --nproc N SCRIPT",
    ),
    **dict.fromkeys(
        ("check_val_every_n_epoch", "eval_steps", "val_check_interval"), "`val_interval`, a key of `train_cfg`"
    ),
    **dict.fromkeys(("default_root_dir", "output_dir"), "`work_dir`"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "`max_epochs`, a key of `train_cfg`"),
    **dict.fromkeys(
        ("fast_dev_run", "limit_train_batches", "limit_val_batches", "overfit_batches"),
        "`num_batch_per_epoch` in a data loader's config",
    ),
    **dict.fromkeys(
        ("log_every_n_steps", "logging_steps"), "`interval` of LoggerHook: default_hooks=dict(logger=dict(interval=N))"
    ),
    "benchmark": "`cudnn_benchmark`, a key of `env_cfg`",
    "enable_progress_bar": "default_hooks=dict(progress=None)",
    "log_processor": "lockstep-mmengine's; a LoggerHook's records hold the means of all values",
    "max_steps": "`max_iters`, a key of `train_cfg`",
    "num_sanity_val_steps": "runner.val() before runner.train()",
    "profiler": "a ProfilerHook in `custom_hooks`",
    "sync_batchnorm": "`sync_bn`, a key of a config; or convert the model by torch's SyncBatchNorm",
}

_EVALUATION = {f"{mode}_{name}" for mode in ("val", "test") for name in ("dataloader", "evaluator", "cfg")}
# Arguments of a Runner that a Session has not, and what to do instead.
DONE_OTHERWISE_IN_SESSION = {
    frozenset(
        {"model", "optim_wrapper", "train_dataloader", "train_cfg", "param_scheduler", "loss", "cfg"}
    ): "hand in the model, its optimizer and the data by prepare(model, optimizer, dataloader)",
    frozenset(
        {"by_epoch", "epochs", "max_epochs", "max_iters", "max_steps", "num_epochs"}
    ): "the loop goes through session.epochs(count) or session.iterations(count)",
    frozenset(
        _EVALUATION
    ): "validate by a loop of your own over prepare_evaluation(dataloader), and record by log_metrics()",
    frozenset({"data_preprocessor"}): "prepare batches in the loop",
}
# Attributes of an Accelerator, and what to do instead.
INSTEAD_OF_ACCELERATE = {
    **dict.fromkeys(("accumulate", "gradient_accumulation_steps", "no_sync"), "Session(accumulative_counts=...)"),
    "autocast": "Session(amp='bfloat16')",
    "backward": "session.step(loss), which also steps the optimizer and clears the gradients",
    "clip_grad_norm_": "Session(clip_grad=dict(max_norm=...))",
    "clip_grad_value_": "Session(clip_grad=dict(type='value', clip_value=...))",
    "end_training": "nothing, since the session is closed after the last epoch or iteration",
    "gather_for_metrics": "session.gather(...) over a loader of session.prepare_evaluation(...)",
    **dict.fromkeys(("get_state_dict", "save_model"), "session.save_pretrained(folder), or session.save()"),
    **dict.fromkeys(("get_tracker", "trackers"), "session.run.visualizer"),
    "init_trackers": "Session(visualizer=...)",
    "is_local_main_process": "lockstep.dist.get_local_rank() == 0",
    "is_main_process": "session.is_main",
    "join_uneven_inputs": "nothing, since ranks may have different numbers of batches",
    "load_state": "Session(resume=True)",
    "local_process_index": "lockstep.dist.get_local_rank()",
    **{name: f"lockstep.dist.{name}()" for name in ("local_main_process_first", "main_process_first")},
    "num_processes": "session.world_size",
    "on_main_process": "lockstep.dist.run_on_main(function)",
    "optimizer_step_was_skipped": "not session.is_update",
    "pad_across_processes": "lockstep.dist.all_gather(tensor), of any shapes",
    **dict.fromkeys(
        ("prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler"),
        "session.prepare(model, optimizer, dataloader, schedulers=...)",
    ),
    "print": "if session.is_main: print(...)",
    "process_index": "session.rank",
    "project_dir": "session.run_dir",
    "reduce": "lockstep.dist.all_reduce(tensor, 'mean'), which works in place",
    "register_for_checkpointing": "session.prepare(..., schedulers=[...]), of what has JSON values as its state",
    "save_state": "session.save()",
    "skip_first_batches": "Session(resume=True), which goes on within an epoch",
    "sync_gradients": "session.is_update",
    "unwrap_model": "the model that prepare() returns, which is your own module",
    "wait_for_everyone": "lockstep.dist.barrier()",
}
# Attributes of the Trainers of Lightning and transformers, and what a Runner and the `runner` of a hook have instead.
INSTEAD_OF_TRAINER = {
    **dict.fromkeys(("add_callback", "callbacks"), "`custom_hooks` of the Runner, or register_hook(hook)"),
    **dict.fromkeys(("callback_metrics", "logged_metrics"), "what val() returns, or `metrics` of after_val_epoch"),
    "current_epoch": "epoch",
    **dict.fromkeys(("estimated_stepping_batches", "max_steps"), "max_iters, which counts batches"),
    **dict.fromkeys(("evaluate", "validate"), "val(), over the `val_dataloader` of the Runner"),
    "fit": "train(), without arguments: model and data are those of the Runner",
    "global_rank": "rank",
    "global_step": "iter, which counts batches",
    **dict.fromkeys(("is_global_zero", "is_world_process_zero"), "rank == 0"),
    **dict.fromkeys(
        ("log", "log_dict", "log_metrics"), "what the model's `forward` or `train_step` returns is recorded"
    ),
    **dict.fromkeys(("lr_scheduler", "lr_schedulers"), "param_schedulers"),
    **dict.fromkeys(("optimizer", "optimizers"), "optim_wrapper"),
    "save_model": "save_pretrained(folder)",
    "should_stop": "train_loop.stop_training",
}


def unknown_argument(
    names: Iterable[str], owner: str = "Runner", known: Collection[str] | None = None
) -> TypeError | None:
    """Return the error for arguments that a Runner doesn't have, with what is probably meant; None if it has all."""
    known = ARGUMENTS if known is None else known
    problems = []
    for name in names:
        if name not in known:
            meant = f": it is {_FOREIGN_NAMES[name]}" if name in _FOREIGN_NAMES else did_you_mean(name, known)
            problems.append(f"a {owner} has no argument `{name}`{meant}")
    return TypeError("\n".join(problems)) if problems else None


def taking(
    arguments: Callable[P, RunnerArguments],
) -> Callable[[Callable[[Any, RunnerArguments], None]], Callable[Concatenate[Any, P], None]]:
    """Let a method that takes all arguments as one object be called with separate arguments."""

    def decorate(method: Callable[[Any, RunnerArguments], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(RunnerArguments.__init__)
        def init(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if (unknown := unknown_argument(kwargs)) is not None:
                raise unknown
            try:
                given = arguments(*args, **kwargs)
            except TypeError as error:  # Python names the class of the arguments
                raise TypeError(str(error).replace("RunnerArguments.__init__()", "Runner()")) from None
            method(self, given)

        return init

    return decorate


def invalid_arguments(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a Runner that have the wrong type or form: the name of each, and what it must be.

    Args:
        given: the arguments given, by name.
    """
    for name, argument in ARGUMENTS.items():
        if name in given and argument.types and not isinstance(given[name], argument.types):
            yield name, f"must be {argument.must_be}, but is {given[name]!r} of {type(given[name]).__name__}"
    for name in ("optim_wrapper", "train_dataloader", "val_dataloader", "test_dataloader"):
        if (says := fault_of_prepared(given.get(name))) is not None:
            yield name, says
    if isinstance(given.get("model"), type) and (says := fault_of_model_class(given["model"])) is not None:
        yield "model", says
    if "" not in (several := named_loaders(given.get("train_dataloader"))):
        says = (
            f"must be one data loader, but is a {type(given['train_dataloader']).__name__} of {len(several)}. Join "
            "their datasets: DataLoader(torch.utils.data.ConcatDataset([...]), shuffle=True); for shares or turns, "
            "give it a sampler, as docs/data.md shows"
        )
        yield "train_dataloader", says
    for mode in ("val", "test"):
        evaluator, names = f"{mode}_evaluator", [*named_loaders(given.get(f"{mode}_dataloader"))]
        try:
            evaluators_by_name(evaluator, given.get(evaluator), names)
        except ConfigError as error:
            yield evaluator, str(error).removeprefix(f"`{evaluator}` ")
    word = given.get("resume_options", "config")
    if isinstance(word, str) and word not in RESUME_OPTIONS:
        yield "resume_options", f"must be 'config' or 'checkpoint', but is {word!r}{did_you_mean(word, RESUME_OPTIONS)}"
    levels, level = logging.getLevelNamesMapping(), given.get("log_level")
    if isinstance(level, str) and level not in levels:
        yield "log_level", f"must be a level of logging, but is {level!r}{did_you_mean(level, levels)}"


def fault_of_prepared(given: Any) -> str | None:
    """Return what is wrong with an object that accelerate has prepared: it shares out data, and leaves out steps."""
    kind = type(given)
    if kind.__module__.partition(".")[0] != "accelerate":
        return None
    return f"must be your own, but is accelerate's {kind.__name__}. Hand in what you gave to its prepare()"


def fault_of_model_class(kind: type) -> str | None:
    """Return what is wrong with a class as a model, if it can't be called without arguments.

    Example:
        >>> fault_of_model_class(nn.Linear)
        'must be a module, but is the class Linear. Make one of it: Linear(...) with its arguments'
        >>> fault_of_model_class(nn.Identity)
    """
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError):
        name = kind.__name__
        return f"must be a module, but is the class {name}. Make one of it: {name}(...) with its arguments"
    return None


def named_loaders(given: Any) -> dict[str, Any]:
    """Return the data loaders, or configs of some, of an argument: those of a dict by name, of a list by number.

    One loader has the empty name. A list of batches is one loader, too.

    Example:
        >>> first, second = DataLoader([1]), {"dataset": [2]}
        >>> [*named_loaders({"clean": first, "noisy": second})], [*named_loaders([first, second])]
        (['clean', 'noisy'], ['0', '1'])
        >>> [*named_loaders(second)], [*named_loaders([{"x": 1}])]
        ([''], [''])
    """
    if isinstance(given, Mapping) and "dataset" not in given and any(map(_is_loader, given.values())):
        return {str(name): loader for name, loader in given.items()}
    if isinstance(given, list | tuple) and any(map(_is_loader, given)):
        return {str(index): loader for index, loader in enumerate(given)}
    return {"": given}


def evaluators_by_name(argument: str, given: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the evaluator for each of several data loaders; None if there is one for all.

    Args:
        argument: the name of the argument.
        given: its value: a dict by the names of the loaders, or a list with an `Evaluator` or its config for each.
        names: the names of the loaders.

    Raises:
        ConfigError: it names other loaders, or has not one for each of a list.
    """
    if names == [""]:
        return None
    if isinstance(given, Mapping) and not {"type", "metrics"} & given.keys():
        require_known(argument, map(str, given), names)
        return {str(name): evaluator for name, evaluator in given.items()}
    each = given if isinstance(given, list | tuple) else []
    if not each or not all(hasattr(one, "metrics") or (isinstance(one, Mapping) and "metrics" in one) for one in each):
        return None
    if len(each) != len(names):
        raise ConfigError(f"`{argument}` must have an evaluator for each of {len(names)} loaders, but has {len(each)}")
    return dict(zip(names, each, strict=True))


def _is_loader(given: Any) -> bool:
    return isinstance(given, DataLoader) or (isinstance(given, Mapping) and "dataset" in given)


def missing_arguments(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that others need and that are missing: the name of each, and what it must be."""
    for mode in ("val", "test"):
        given_with = [name for name in (f"{mode}_evaluator", f"{mode}_cfg") if given.get(name) is not None]
        if given_with and given.get(f"{mode}_dataloader") is None:
            yield f"{mode}_dataloader", f"must be given with `{given_with[0]}`, but is None"


def default_hook_fault(name: str, given: Any) -> str | None:
    """Return what is wrong with a change to the default hooks, if something is.

    A config may remove a hook that only some of the configs which it inherits from have, so a name that is not known is
    no fault then, unless it is close to one.

    Example:
        >>> default_hook_fault("checkpoints", None)
        'removes no default hook: did you mean `checkpoint`?'
        >>> default_hook_fault("visualization", None)
    """
    if name in DEFAULT_HOOKS:
        return None
    if isinstance(given, Mapping) and "type" not in given:
        return f"must have a `type`, since no default hook is called so{did_you_mean(name, DEFAULT_HOOKS)}"
    if given is None and nearest(name, DEFAULT_HOOKS) is not None:
        return f"removes no default hook{did_you_mean(name, DEFAULT_HOOKS)}"
    return None


def checked_keys(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the dict given as argument `name`, after checking that all its keys are known.

    Raises:
        ConfigError: a key is unknown.
    """
    options = dict(given or {})
    require_known(name, options, ARGUMENTS[name].keys)
    return options
