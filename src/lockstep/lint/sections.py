"""Checks of the arguments of a Runner, one for each kind of content."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep import registry
from lockstep.engines import INSTALL
from lockstep.errors import ConfigError, did_you_mean, lacks_key
from lockstep.lint.parts import Fault, Kind, resolve, value_faults
from lockstep.optim import AmpOptimWrapper, OptimWrapper, ParamScheduler
from lockstep.optim.constructor import CUSTOM, PARAMWISE_KEYS
from lockstep.optim.scheduler import LENGTHS as SCHEDULE_LENGTHS
from lockstep.optim.wrapper import checked_clipping
from lockstep.registry import in_default_scope
from lockstep.registry.registry import SCOPE
from lockstep.registry.signatures import Arguments
from lockstep.runner.arguments import (
    DEFAULT_HOOKS,
    LENGTHS,
    Argument,
    Content,
    default_hook_fault,
    evaluators_by_name,
    named_loaders,
    train_cfg_fault,
)
from lockstep.runner.start import dist_arguments

_OWN_SCHEDULER_KEYS = frozenset({"convert_to_iter_based"}).union(
    name for name, parameter in Arguments.of(ParamScheduler).named.items() if parameter.kind is parameter.KEYWORD_ONLY
)
# What a loader hands to its sampler, as far as that takes it; and the keys of a loader that are not torch's.
_OF_LOADERS = frozenset({"dataset", "data_source", "seed", "shard", "num_replicas", "world_size", "rank"})
_OWN_OF_LOADERS = frozenset({"split", "num_batch_per_epoch", "global_batch_size"})
_LOADER_PARTS: Mapping[str, Kind] = {
    "dataset": Kind(registry.DATASETS),
    "sampler": Kind(registry.DATA_SAMPLERS, default="DefaultSampler", supplied=_OF_LOADERS),
    "batch_sampler": Kind(
        registry.DATA_SAMPLERS, default="BatchSampler", supplied=_OF_LOADERS | {"sampler", "batch_size"}
    ),
}
_OPTIMIZER = Kind(registry.OPTIMIZERS, supplied=frozenset({"params"}))
_OPTIM_WRAPPER = Kind(
    registry.OPTIM_WRAPPERS,
    default="OptimWrapper",
    supplied=frozenset({"optimizer"}),
    own=frozenset({"optimizer", "constructor", "paramwise_cfg"}),
)
_DICTS_OF_A_WRAPPER = {"clip_grad", "paramwise_cfg"}
_CONSTRUCTOR = "DefaultOptimWrapperConstructor"
_SCHEDULER = Kind(  # a length may be missing: it defaults to that of the schedule's window
    registry.PARAM_SCHEDULERS, supplied=frozenset({"optimizer", *SCHEDULE_LENGTHS}), own=_OWN_SCHEDULER_KEYS
)
_METRIC = Kind(registry.METRICS, by_name=True)
_EVALUATOR = Kind(registry.EVALUATOR, default="Evaluator", supplied=frozenset({"metrics"}), own=frozenset({"metrics"}))
_HOOK = Kind(registry.HOOKS, own=frozenset({"priority"}))
_CONVERTER = Kind(registry.CONVERTERS, by_name=True)
_STRATEGY = Kind(registry.STRATEGIES, own=frozenset({"converters"}), by_name=True)
_FSDP_WRAPPER = "MMFullyShardedDataParallel"
_LOOP_PARTS = frozenset({"runner", "dataloader", "evaluator"})


def _dataloader(key: str, cfg: object) -> Iterator[Fault]:
    if isinstance(cfg, str | int | float) or (isinstance(cfg, list | tuple) and not cfg):
        yield Fault(key, f"must be a config dict or a DataLoader, but is {cfg!r}")
    if "" not in (several := named_loaders(cfg)):
        for name, part in several.items():
            yield from _dataloader(f"{key}.{name}", part)
        return
    if not isinstance(cfg, Mapping):
        return
    takes = Arguments.of(DataLoader)
    for name in takes.unknown(name for name in cfg if name not in _OWN_OF_LOADERS):
        hint = did_you_mean(name, {*takes.named, *_OWN_OF_LOADERS})
        yield Fault(f"{key}.{name}", f"is not an argument of a data loader{hint}")
    if not isinstance(split := cfg.get("split"), bool | None) and split != "ranks":
        yield Fault(f"{key}.split", "must be True, False or None, or 'ranks' for an iterable dataset")
    for name in ("batch_size", "batch_sampler"):
        if cfg.get("global_batch_size") is not None and cfg.get(name) is not None:
            yield Fault(f"{key}.global_batch_size", f"contradicts `{name}`; leave out one")
    if cfg.get("dataset") is None:
        yield Fault(key, lacks_key(cfg, "dataset"))
    if cfg.get("sampler") is not None and "shuffle" in cfg:
        yield Fault(f"{key}.shuffle", "contradicts `sampler`, which has a `shuffle` of its own; leave out one")
    for name, kind in _LOADER_PARTS.items():
        if isinstance(cfg.get(name), Mapping):
            yield from kind.faults(f"{key}.{name}", cfg[name])
    plain = {name: value for name, value in cfg.items() if name not in _LOADER_PARTS and name != "collate_fn"}
    yield from value_faults(key, plain, takes)


def _train_cfg(key: str, cfg: object) -> Iterator[Fault]:
    if isinstance(cfg, Mapping) and (says := train_cfg_fault(cfg)) is not None:
        yield Fault(key, says)
        return
    if not isinstance(cfg, Mapping) or "type" in cfg:
        yield from Kind(registry.LOOPS, supplied=_LOOP_PARTS).faults(key, cfg)
        return
    by_epoch = cfg.get("by_epoch", "max_iters" not in cfg)
    counted, other = ("max_epochs", "max_iters") if by_epoch else ("max_iters", "max_epochs")
    if other in cfg:
        yield Fault(f"{key}.by_epoch", f"contradicts `{other}`; leave it out, or give `{counted}`")
        return
    loop = "EpochBasedTrainLoop" if by_epoch else "IterBasedTrainLoop"
    yield from Kind(registry.LOOPS, default=loop, supplied=_LOOP_PARTS, own=LENGTHS - {counted} | {"by_epoch"}).faults(
        key, cfg
    )


def _optim_wrapper(key: str, cfg: object) -> Iterator[Fault]:
    if not isinstance(cfg, Mapping):
        yield from _OPTIM_WRAPPER.faults(key, cfg)
        return
    if isinstance(cfg.get("optimizer"), Mapping):
        yield from _OPTIMIZER.faults(f"{key}.optimizer", cfg["optimizer"])
    if (cfg.get("constructor") or _CONSTRUCTOR) != _CONSTRUCTOR:  # only that class knows its keys
        _, says = resolve(cfg["constructor"], registry.OPTIM_WRAPPER_CONSTRUCTORS)
        if says is not None:
            yield Fault(f"{key}.constructor", says)
        return
    if "paramwise_cfg" in cfg:
        yield from _paramwise(f"{key}.paramwise_cfg", cfg["paramwise_cfg"], cfg.get("optimizer"))
    if resolve(cfg.get("type", "OptimWrapper"), registry.OPTIM_WRAPPERS)[0] in (OptimWrapper, AmpOptimWrapper):
        try:
            checked_clipping(cfg.get("clip_grad"))
        except (ConfigError, TypeError, ValueError) as error:
            _, option, says = re.split(r"^`clip_grad(?:\['(\w+)'\])?` ", str(error))
            yield Fault(f"{key}.clip_grad" + (f".{option}" if option else ""), says)
    if _is_by_name(cfg, "optimizer") and not cfg.keys() & _DICTS_OF_A_WRAPPER:
        for name, part in cfg.items():
            yield from _optim_wrapper(f"{key}.{name}", part)
        return
    if "optimizer" not in cfg:
        yield Fault(key, lacks_key(cfg, "optimizer"))
    yield from _OPTIM_WRAPPER.faults(key, cfg)


def _paramwise(key: str, cfg: object, optimizer: object) -> Iterator[Fault]:
    if not isinstance(cfg, Mapping):
        if cfg is not None:
            yield Fault(key, "must be a dict such as dict(bias_decay_mult=0.0)")
        return
    yield from _keys(PARAMWISE_KEYS, key, cfg)
    for name, value in cfg.items():
        if str(name).endswith("_mult") and value is not None and not isinstance(value, int | float):
            yield Fault(f"{key}.{name}", "must be a number")
    custom = cfg.get("custom_keys")
    if not isinstance(custom, Mapping | None):
        yield Fault(f"{key}.custom_keys", "must be a dict of parts of parameters' names")
        return
    kind = resolve(optimizer.get("type"), registry.OPTIMIZERS)[0] if isinstance(optimizer, Mapping) else None
    takes = None if kind is None else Arguments.of(kind)
    known = None if takes is None or takes.takes_others else takes.named
    for name, options in (custom or {}).items():
        where = f"{key}.custom_keys.{name}"
        if not isinstance(options, Mapping):
            yield Fault(where, "must be a dict such as dict(lr_mult=0.1)")
            continue
        if known is not None:
            yield from _keys((*CUSTOM, *known), where, options)
        for option in CUSTOM:
            if not isinstance(options.get(option, 1), int | float):
                yield Fault(f"{where}.{option}", "must be a number")


def _param_scheduler(key: str, cfg: object) -> Iterator[Fault]:
    if isinstance(cfg, Mapping) and _is_by_name(cfg, "type"):
        for name, part in cfg.items():
            yield from _SCHEDULER.each(f"{key}.{name}", part)
    else:
        yield from _SCHEDULER.each(key, cfg)


def _is_by_name(cfg: Mapping[str, object], usual: str) -> bool:
    """Return whether a config describes several things by names of parts of the model, not one with the key `usual`."""
    return bool(cfg) and usual not in cfg and all(isinstance(part, Mapping | list | tuple) for part in cfg.values())


def _default_hooks(key: str, cfg: Mapping[str, object]) -> Iterator[Fault]:
    for name, given in cfg.items():
        if (says := default_hook_fault(name, given)) is not None:
            yield Fault(f"{key}.{name}", says)
        elif given is not None:
            default = DEFAULT_HOOKS.get(name, {}).get("type")
            yield from Kind(registry.HOOKS, default=default, own=_HOOK.own).faults(f"{key}.{name}", given)


def _strategy(key: str, strategy: object) -> Iterator[Fault]:
    cfg = strategy if isinstance(strategy, Mapping) else {"type": strategy}
    kind = resolve(cfg.get("type"), registry.STRATEGIES)[0]
    package = getattr(kind, "package", None)
    if package is not None and find_spec(package) is None:
        how = f": {INSTALL[package]}" if package in INSTALL else ""
        yield Fault(key, f"needs the package {package}, which is not installed{how}")
    yield from _CONVERTER.each(f"{key}.converters", cfg.get("converters") or ())
    yield from _STRATEGY.faults(key, strategy)
    fsdp = registry.STRATEGIES.module_dict.get("FSDPStrategy")  # registered only once something has asked for it
    if kind is not None and kind is fsdp:
        yield from _fsdp(key, cfg, kind)


def _fsdp(key: str, cfg: Mapping[str, object], strategy: Callable[..., Any]) -> Iterator[Fault]:
    """Yield what is wrong with the arguments that FSDPStrategy passes on to its wrapper."""
    from lockstep.model.fsdp import MMFullyShardedDataParallel  # imports DTensor, as does the next one
    from lockstep.model.tensor_parallel_plan import read_request

    wrapper = cfg.get("model_wrapper") or {}
    if not isinstance(wrapper, Mapping):
        return
    with in_default_scope(wrapper.get(SCOPE)):  # another package may have a wrapper of that name
        built = resolve(wrapper.get("type", _FSDP_WRAPPER), registry.MODEL_WRAPPERS)[0]
    if built is not MMFullyShardedDataParallel:
        return
    handed_on = {"type", SCOPE, *Arguments.of(built).named} - {"module"}
    yield from _keys({*Arguments.of(strategy).named, *_STRATEGY.own, *handed_on}, key, cfg)
    yield from _keys(handed_on, f"{key}.model_wrapper", wrapper)
    for where, part in ((key, cfg), (f"{key}.model_wrapper", wrapper)):
        try:
            read_request(part.get("tensor_parallel"))
        except ConfigError as error:
            yield Fault(f"{where}.tensor_parallel", str(error).removeprefix("`tensor_parallel` "))


def _keys(known: Collection[str], key: str, cfg: object) -> Iterator[Fault]:
    for name in cfg if isinstance(cfg, Mapping) else ():
        if name not in known:
            yield Fault(f"{key}.{name}", f"is no key of `{key}`{did_you_mean(name, known)}")


def _evaluators(key: str, cfg: object, loaders: object) -> Iterator[Fault]:
    """Yield what is wrong with the evaluator of one loader or of all, or with those of several loaders."""
    try:
        each = evaluators_by_name(key, cfg, [*named_loaders(loaders)])
    except ConfigError:  # which `invalid_arguments` tells
        return
    if each is None:
        yield from _evaluator(key, cfg)
    else:
        for index, (name, part) in enumerate(each.items()):
            yield from _evaluator(f"{key}.{name if isinstance(cfg, Mapping) else index}", part)


def _evaluator(key: str, cfg: object) -> Iterator[Fault]:
    metrics = cfg
    if isinstance(cfg, Mapping) and "metrics" in cfg:
        yield from _EVALUATOR.faults(key, cfg)
        key, metrics = f"{key}.metrics", cfg["metrics"]
    if isinstance(metrics, list | tuple) and not metrics:
        yield Fault(key, "must have at least one metric, but has none")
    yield from _METRIC.each(key, metrics)


_SECTIONS: Mapping[Content, Callable[[str, Any], Iterator[Fault]]] = {
    "model": Kind(registry.MODELS).faults,
    "preprocessor": Kind(registry.MODELS, default="BaseDataPreprocessor").faults,
    "dataloader": _dataloader,
    "train loop": _train_cfg,
    "val loop": Kind(registry.LOOPS, default="ValLoop", supplied=_LOOP_PARTS).faults,
    "test loop": Kind(registry.LOOPS, default="TestLoop", supplied=_LOOP_PARTS).faults,
    "optim wrapper": _optim_wrapper,
    "schedulers": _param_scheduler,
    "default hooks": _default_hooks,
    "custom hooks": _HOOK.each,
    "strategy": _strategy,
    "model wrapper": Kind(
        registry.MODEL_WRAPPERS, default="MMDistributedDataParallel", supplied=frozenset({"module"})
    ).faults,
    "compile options": partial(_keys, Arguments.of(torch.compile).named.keys() - {"model"}),
    "visualizer": Kind(registry.VISUALIZERS).each,
}


def faults_of(key: str, value: object, argument: Argument, cfg: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with the value of a key of `cfg`; `argument` says what the value may hold."""
    if value is None:
        return
    if argument.holds == "keys":
        yield from _keys(argument.keys, key, value)
        if key == "env_cfg" and isinstance(value, Mapping):
            if not isinstance(options := value.get("dist_cfg"), Mapping | None):
                yield Fault(f"{key}.dist_cfg", "must be a dict such as dict(backend='nccl')")
            yield from _keys(dist_arguments(), f"{key}.dist_cfg", options)
    elif argument.holds == "evaluator":
        yield from _evaluators(key, value, cfg.get(key.replace("evaluator", "dataloader")))
    elif argument.holds is not None:
        yield from _SECTIONS[argument.holds](key, value)
