"""The arguments of a Runner: the type, default and content of each, stated once.

`Runner`, `Runner.from_cfg` and the check of configs in `lockstep.lint` read them from here.
"""

from __future__ import annotations

import logging
import os
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

from lockstep.errors import OTHER_FRAMEWORKS, ConfigError, did_you_mean, lacks_key, name_here, nearest, require_known
from lockstep.location import absolute, locate, on_disk, require_disk
from lockstep.masking import mask_text
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
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
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
        keys: its keys: all, if it holds `"keys"`, else the usual ones.
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
    train_dataloader: Annotated[
        Any, Argument(holds="dataloader", keys=("batch_size", "num_workers", "num_batch_per_epoch"))
    ] = None
    val_dataloader: Annotated[Any, Argument(holds="dataloader")] = None
    test_dataloader: Annotated[Any, Argument(holds="dataloader")] = None
    train_cfg: Annotated[
        Any, Argument(holds="train loop", keys=("by_epoch", "max_epochs", "max_iters", "val_interval"))
    ] = None
    val_cfg: Annotated[ConfigDict | None, Argument("a dict or None", holds="val loop")] = None
    test_cfg: Annotated[ConfigDict | None, Argument("a dict or None", holds="test loop")] = None
    optim_wrapper: Annotated[
        Any, Argument(holds="optim wrapper", keys=("accumulative_counts", "clip_grad", "accumulate_across_epochs"))
    ] = None
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
        require_disk(self.work_dir, "work_dir")
        object.__setattr__(self, "work_dir", os.path.abspath(on_disk(self.work_dir)))  # the script may go elsewhere

    @property
    def beginning(self) -> str | None:
        """The `load_from`, as checkpoints of a training that began there say it; None without one."""
        return None if self.load_from is None else mask_text(str(absolute(locate(self.load_from))))

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
LENGTHS = frozenset({"max_epochs", "max_iters"})  # keys of `train_cfg`
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


_IN_HALF_PRECISION = ": give optim_wrapper=dict(type='AmpOptimWrapper', dtype='bfloat16', optimizer=...)"
_STARTED = ": each rank finds its device, and `lockstep launch --nproc N --nnodes M` starts the ranks"
# Where what other frameworks have as an argument is no argument or key here.
_WAYS = {
    **dict.fromkeys(("precision", "mixed_precision", "amp"), _IN_HALF_PRECISION),
    **dict.fromkeys(("accelerator", "devices", "num_nodes"), _STARTED),
}


def unknown_argument(
    names: Iterable[str], owner: str, known: Collection[str], remedy: str = OTHER_FRAMEWORKS
) -> TypeError | None:
    """Return the error for arguments that are not `known`, with what is probably meant; None if there are none."""
    problems = []
    for name in names:
        if name not in known:
            hint = remedy if name in ARGUMENTS else did_you_mean(name, known, _WAYS.get(name, remedy))
            for holder, argument in ARGUMENTS.items():
                if name_here(name) in argument.keys and holder in known:
                    hint = f": it is {'' if name_here(name) == name else f'`{name_here(name)}`, '}a key of `{holder}`"
            problems.append(f"a {owner} has no argument `{name}`{hint}")
    return TypeError("\n".join(problems)) if problems else None


def taking(
    arguments: Callable[P, RunnerArguments],
) -> Callable[[Callable[[Any, RunnerArguments], None]], Callable[Concatenate[Any, P], None]]:
    """Let a method that takes all arguments as one object be called with separate arguments."""

    def decorate(method: Callable[[Any, RunnerArguments], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(RunnerArguments.__init__)
        def init(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if (unknown := unknown_argument(kwargs, "Runner", ARGUMENTS)) is not None:
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
        faults = map(fault_of_prepared, named_loaders(given.get(name)).values())
        if (says := next(filter(None, faults), None)) is not None:
            yield name, says
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


def train_cfg_fault(cfg: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a `train_cfg` that says twice what is counted."""
    pair = ("type", "by_epoch") if "type" in cfg else sorted(LENGTHS)
    return "must have either `{}` or `{}`, but has both".format(*pair) if cfg.keys() >= set(pair) else None


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
    if isinstance(given, Mapping) and "dataset" not in given and _are_loaders(given.values()):
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


def _are_loaders(values: Collection[Any]) -> bool:
    """Return whether the values of a dict are loaders: one of torch's is among them, or all are iterable objects."""
    is_iterable = [hasattr(one, "__iter__") and not isinstance(one, str | Mapping | list | tuple) for one in values]
    return any(map(_is_loader, values)) or (all(is_iterable) and bool(values))


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
