"""The parts of a run, from what a Runner was given, and the defaults for what it was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.errors import ConfigError
from lockstep.evaluator import Evaluator
from lockstep.hooks import Hook
from lockstep.model import compile_in_place, uncompiled, unwrap_model
from lockstep.optim import OptimWrapperDict, ParamScheduler, build_param_schedulers
from lockstep.registry import HOOKS, LOOPS, MODELS
from lockstep.runner.eval_loops import EvalLoop
from lockstep.runner.loops import TrainLoop
from lockstep.strategy import Strategy

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner

DEFAULT_TRAIN_CFG: Mapping[str, Any] = {"by_epoch": True, "max_epochs": 3, "val_interval": 1}
DEFAULT_OPTIM_WRAPPER: Mapping[str, Any] = {"optimizer": {"type": "AdamW", "lr": 1e-3}}


def build_model(
    model: nn.Module | Mapping[str, Any],
    data_preprocessor: nn.Module | Mapping[str, Any] | None,
    strategy: Strategy,
    compile_: bool | Mapping[str, Any],
) -> nn.Module:
    """Return the model, those parts of it compiled in place that `strategy` names, where that is asked for.

    It gets the preprocessor, unless its own config names one.
    """
    has_own = isinstance(model, Mapping) and model.get("data_preprocessor") is not None
    built = MODELS.build(model) if isinstance(model, Mapping) else model
    if not isinstance(built, nn.Module):
        raise TypeError(f"`model` must build a torch.nn.Module, but built {built!r}")
    built = uncompiled(built)
    if data_preprocessor is not None and not has_own:
        unwrap_model(built).data_preprocessor = _build_preprocessor(data_preprocessor)
    if compile_ is not False:
        compile_in_place(built, strategy.compiled_parts(built), compile_ if isinstance(compile_, Mapping) else {})
    return built


def _build_preprocessor(cfg: nn.Module | Mapping[str, Any]) -> nn.Module:
    built = MODELS.build(cfg, type="BaseDataPreprocessor") if isinstance(cfg, Mapping) else cfg
    if not isinstance(built, nn.Module):
        raise TypeError(f"`data_preprocessor` must build a torch.nn.Module, but built {built!r}")
    return built


def build_train_loop(cfg: TrainLoop | Mapping[str, Any], runner: Runner) -> TrainLoop:
    """Return the loop that `train_cfg` describes."""
    if isinstance(cfg, TrainLoop):
        return cfg
    if not isinstance(cfg, Mapping):
        raise TypeError(f"`train_cfg` must be a dict or a loop, but is {cfg!r}")
    arguments = dict(cfg)
    if "type" not in arguments:
        by_epoch = arguments.pop("by_epoch", "max_iters" not in arguments)
        arguments["type"] = "EpochBasedTrainLoop" if by_epoch else "IterBasedTrainLoop"
        needed = "max_epochs" if by_epoch else "max_iters"
        if needed not in arguments:
            raise ConfigError(f"`train_cfg` must have the key '{needed}', but has {sorted(cfg)}")
    loop = LOOPS.build(arguments, runner=runner, dataloader=runner.train_dataloader)
    if not isinstance(loop, TrainLoop):
        raise TypeError(f"`train_cfg` must build a TrainLoop, but built {loop!r}")
    return loop


def build_schedulers(cfg: Any, runner: Runner) -> list[ParamScheduler]:
    """Return the schedulers that `param_scheduler` describes.

    Of several optimizers each gets its own: those under its name, where `cfg` is a dict of their names, else all.
    """
    wrapper, loop = runner.optim_wrapper, runner.train_loop
    if cfg and (own := runner.strategy.own_schedule) is not None:
        raise ConfigError(f"`param_scheduler` contradicts {own}: both would set the learning rates. Leave out one")
    length = {"max_epochs": loop.max_epochs, "max_iters": loop.max_iters}
    if not isinstance(wrapper, OptimWrapperDict):
        return build_param_schedulers(wrapper.optimizer, cfg, **length)
    by_name = isinstance(cfg, Mapping) and "type" not in cfg
    if by_name and (unknown := sorted(cfg.keys() - set(wrapper))):
        raise ConfigError(f"`param_scheduler` must have keys out of {', '.join(wrapper)}, but has {', '.join(unknown)}")
    items = cfg if isinstance(cfg, Sequence) else [cfg]
    if not by_name and any(isinstance(item, ParamScheduler) for item in items):
        raise ConfigError(
            "`param_scheduler` must say whose each scheduler is, because there are several optimizers, as in "
            f"{{{next(iter(wrapper))!r}: [...]}}"
        )
    return [
        scheduler
        for name in wrapper
        for scheduler in build_param_schedulers(wrapper[name].optimizer, cfg.get(name) if by_name else cfg, **length)
    ]


def build_eval_loop(
    mode: str, cfg: Mapping[str, Any] | None, runner: Runner, dataloader: Any, evaluator: Evaluator
) -> EvalLoop:
    """Return the loop that `val_cfg` or `test_cfg` describes."""
    kind = {"val": "ValLoop", "test": "TestLoop"}[mode]
    parts = {"runner": runner, "dataloader": dataloader, "evaluator": evaluator}
    loop: EvalLoop = LOOPS.build(cfg or {}, type=kind, **parts)
    return loop


def build_evaluator(evaluator: Any) -> Evaluator:
    """Return an evaluator of the metrics that are given."""
    return evaluator if isinstance(evaluator, Evaluator) else Evaluator(evaluator)


def build_hooks(
    default_hooks: Mapping[str, Any] | None, custom_hooks: Iterable[Any], *, main: bool, loop: Any
) -> list[Hook]:
    """Return the default hooks, changed as they are asked to be, and the custom ones.

    Args:
        default_hooks: by name: None to do without one, a hook, or its config; a config without `type` changes arguments
            of the default.
        custom_hooks: hooks and configs.
        main: whether this is rank 0, where hooks for it alone belong.
        loop: the training loop, or None.
    """
    items = default_hook_cfgs(loop)
    for name, given in (default_hooks or {}).items():
        if isinstance(given, Mapping) and "type" not in given:
            if name not in items:
                raise ConfigError(
                    f"`default_hooks[{name!r}]` must have a `type`; without one only the defaults "
                    f"{', '.join(items)} can be changed"
                )
            given = {**items[name], **given}
        items[name] = given
    present = [item for item in (*items.values(), *custom_hooks) if item is not None]
    hooks = [_build_hook(item) for item in present]
    return [hook for hook in hooks if main or not hook.main_only]


def default_hook_cfgs(loop: Any) -> dict[str, Any]:
    """Return the configs of the hooks that every run has."""
    checkpoint: dict[str, Any] = {"type": "CheckpointHook"}
    if isinstance(loop, TrainLoop) and loop.max_epochs is None:
        checkpoint |= {"by_epoch": False, "interval": loop.val_interval}
    return {
        "timer": {"type": "IterTimerHook"},
        "sampler_seed": {"type": "DistSamplerSeedHook"},
        "sync_buffers": {"type": "SyncBuffersHook"},
        "logger": {"type": "LoggerHook"},
        "progress": {"type": "ProgressHook"},
        "param_scheduler": {"type": "ParamSchedulerHook"},
        "nan_check": {"type": "NaNCheckHook"},
        "checkpoint": checkpoint,
    }


def scale_lr(cfg: Mapping[str, Any], runner: Runner) -> None:
    """Multiply all learning rates by the global batch size over `base_batch_size`."""
    if not cfg.get("enable", True):
        return
    if "base_batch_size" not in cfg:
        raise ConfigError(f"`auto_scale_lr` must have the key 'base_batch_size', but has {sorted(cfg)}")
    batch_size = getattr(runner.train_dataloader, "batch_size", None)
    if batch_size is None:
        raise ConfigError("`auto_scale_lr` needs a train_dataloader with a batch_size, but it has none")
    factor = batch_size * runner.share.size / cfg["base_batch_size"]
    for group in runner.optim_wrapper.param_groups:
        group["lr"] *= factor
    runner.logger.info(
        "learning rates are multiplied by %g: a global batch of %d where %d was meant",
        factor, batch_size * runner.share.size, cfg["base_batch_size"],
    )  # fmt: skip


def _build_hook(item: Any) -> Hook:
    if isinstance(item, Mapping):
        arguments = dict(item)
        priority = arguments.pop("priority", None)
        hook = HOOKS.build(arguments)
        if priority is not None:
            hook.priority = priority
    else:
        hook = item
    if not isinstance(hook, Hook):
        raise TypeError(f"a hook must be a Hook or a config dict, but is {hook!r}")
    return hook
