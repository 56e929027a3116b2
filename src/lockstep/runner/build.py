"""The parts of a run, built from the arguments of a Runner or from defaults."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import nn

from lockstep.dataset import DataShard, build_dataloader
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError, building, require_key, require_number
from lockstep.evaluator import Evaluator, LossMetric
from lockstep.model import (
    BaseModule,
    OutsideLoss,
    compile_in_place,
    convert_sync_batchnorm,
    is_model_wrapper,
    outside_loss,
    revert_sync_batchnorm,
    steps,
    uncompiled,
    unwrap_model,
)
from lockstep.model.norm import is_synced, sync_on_this_device
from lockstep.model.shards import reshard
from lockstep.optim import OptimWrapperDict, ParamScheduler, build_param_schedulers
from lockstep.registry import EVALUATOR, LOOPS, MODELS
from lockstep.runner.arguments import (
    DEFAULT_HOOKS,
    RunnerArguments,
    checked_keys,
    default_hook_fault,
    evaluators_by_name,
    named_loaders,
    train_cfg_fault,
)
from lockstep.runner.data_workers import end_workers_at_exit, prepare_workers
from lockstep.runner.evaluation_loops import EvalLoop, TestLoop, ValLoop
from lockstep.runner.hook import OF_LIGHTNING, Hook
from lockstep.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop, TrainLoop
from lockstep.runner.resumed_options import record_config, record_first_options, set_option
from lockstep.runner.run import Run, TrainRun, Workspace
from lockstep.strategy import Strategy
from lockstep.visualization import Visualizers, build_visualizers

_logger = logging.getLogger(__name__)


def strategy_of(args: RunnerArguments) -> Any:
    """Return the given strategy, or the one that MMEngine's keys in the config ask for.

    `model_wrapper_cfg` is the config of a wrapper; `find_unused_parameters` is an argument of the default wrapper.
    """
    strategy, keys = args.strategy, args.cfg if isinstance(args.cfg, Mapping) else {}
    wrapper = dict(keys.get("model_wrapper_cfg") or {})
    if not wrapper and keys.get("find_unused_parameters") is not None:
        wrapper["find_unused_parameters"] = keys["find_unused_parameters"]
    if not wrapper:
        return strategy
    if strategy is not None:
        _logger.warning("`model_wrapper_cfg` and `find_unused_parameters` do nothing beside `strategy`, which decides")
        return strategy
    kind = wrapper.get("type")
    if str(getattr(kind, "__name__", kind)).rpartition(".")[2] == "MMFullyShardedDataParallel":  # maybe with a scope
        return {"type": "fsdp", "model_wrapper": wrapper}
    return {"type": "ddp", "model_wrapper": wrapper} if get_world_size() > 1 else None


def build_model(args: RunnerArguments, strategy: Strategy) -> nn.Module:
    """Return the model, converted; if asked to, compile in place the parts of it that `strategy` names.

    The loss, if given, is attached to the model, and so is the preprocessor, unless the model's config names one. On
    several ranks, BatchNorms are converted if the config's `sync_bn` names an implementation. On one rank,
    SyncBatchNorms are converted back to BatchNorms.
    """
    has_own = isinstance(args.model, Mapping) and args.model.get("data_preprocessor") is not None
    sync_bn = args.cfg.get("sync_bn") if isinstance(args.cfg, Mapping) else None
    built = with_norms(uncompiled(_build_module("model", args.model)), sync_bn)
    if args.data_preprocessor is not None and not has_own:
        preprocessor = _build_module("data_preprocessor", args.data_preprocessor, type="BaseDataPreprocessor")
        unwrap_model(built).data_preprocessor = preprocessor
    core = unwrap_model(built)
    # A Session sets a `train_step` of its own: its loop is the user's, who calls what there is.
    if "train_step" not in vars(core) and (left := _uncalled_of_lightning(args, core)):
        _logger.warning("a Runner does not call methods of %s that %s", type(core).__name__, left)
    if args.loss is not None:
        OutsideLoss(MODELS.build(args.loss) if isinstance(args.loss, Mapping) else args.loss).attach(core)
    if args.channels_last:
        if not strategy.keeps_memory_format:
            raise ConfigError(
                f"`channels_last` must be False under {type(strategy).__name__}, whose weights are contiguous. "
                "Let the model convert its images: images.to(memory_format=torch.channels_last); or use strategy 'ddp'"
            )
        tensors = [*built.named_parameters(), *built.named_buffers()]
        if volumes := [name for name, tensor in tensors if tensor.dim() == 5]:  # torch leaves all but 4 and 5 alone
            raise ConfigError(
                f"`channels_last` is for images, whose weights have four dimensions, but {volumes[0]} has five. "
                "Let the model convert itself: .to(memory_format=torch.channels_last_3d)"
            )
        built.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    built = strategy.convert(built)
    if args.compile is not False:
        compile_in_place(built, strategy.compiled_parts(built), {} if args.compile is True else args.compile)
    return built


def _uncalled_of_lightning(args: RunnerArguments, core: nn.Module) -> str:
    """Say in words which methods of a Lightning module a model has that are not called here; empty if none."""
    trains, validates = args.train_dataloader is not None, args.val_dataloader is not None
    lacks = {  # whether nothing else is given that does what the method would
        "training_step": trains and args.loss is None and not steps.defines_step(core, "train_step"),
        "configure_optimizers": trains and args.optim_wrapper is None,
        "validation_step": validates and args.val_evaluator is None and not steps.defines_step(core, "val_step"),
    }
    found = [
        name
        for name in dir(type(core))
        if (lacks.get(name) or (trains and OF_LIGHTNING.fullmatch(name)))
        and not steps.is_stub(getattr(type(core), name))
    ]
    return f"a Lightning module has: {', '.join(found)}; see docs/side-by-side.md" if found else ""


def init_weights(model: nn.Module) -> bool:
    """Let a `BaseModule` initialise its weights, unless some are on the meta device; return whether any module does."""
    core = unwrap_model(model)
    if not isinstance(core, BaseModule) or any(parameter.is_meta for parameter in core.parameters()):
        return False
    reshard(core)  # what an evaluation has gathered are copies
    core.init_weights()
    own = [type(module).init_weights for module in core.modules() if isinstance(module, BaseModule)]
    return any(init is not BaseModule.init_weights for init in own)


def with_norms(model: nn.Module, sync_bn: str | None) -> nn.Module:
    """Return a model with the BatchNorms that it needs on so many ranks; see `build_model`."""
    if is_model_wrapper(model):
        return model
    if get_world_size() > 1:
        return sync_on_this_device(model) if sync_bn is None else convert_sync_batchnorm(model, sync_bn)
    if any(is_synced(module) for module in model.modules()):
        _logger.info("on one rank every SyncBatchNorm becomes a BatchNorm")
        return revert_sync_batchnorm(model)
    return model


def _build_module(
    name: str, given: nn.Module | Mapping[str, Any] | Callable[[], nn.Module], **default: str
) -> nn.Module:
    if isinstance(given, Mapping):
        built = MODELS.build(given, **default)
    else:
        built = given if isinstance(given, nn.Module) else given()
    if not isinstance(built, nn.Module):
        raise TypeError(f"`{name}` must build a torch.nn.Module, but built {built!r}")
    if isinstance(built, torch.jit.ScriptModule):  # its forward has no signature by which a batch is handed to it
        raise TypeError(
            f"`{name}` must be a module of Python, but is a {type(built).__name__} of torch.jit. Train the module that "
            "it was made of; compile=True makes it fast"
        )
    return built


def build_train_loop(cfg: TrainLoop | Mapping[str, Any], run: TrainRun) -> TrainLoop:
    """Return the loop that `train_cfg` describes."""
    with building("train_cfg"):
        loop = _train_loop(cfg, run)
    _refuse_own_steps(loop)
    _require_step(loop)
    _warn_of_sync_norms(run, loop)
    _warn_of_other_means(run, loop)
    return loop


def _train_loop(cfg: TrainLoop | Mapping[str, Any], run: TrainRun) -> TrainLoop:
    if isinstance(cfg, TrainLoop):
        cfg.runner = run
        return cfg
    if not isinstance(cfg, Mapping):
        raise TypeError(f"`train_cfg` must be a dict or a loop, but is {cfg!r}")
    if (says := train_cfg_fault(cfg)) is not None:
        raise ConfigError(f"`train_cfg` {says}")
    arguments = dict(cfg)
    if "type" not in arguments:
        by_epoch = arguments.pop("by_epoch", "max_iters" not in arguments)
        arguments["type"] = "EpochBasedTrainLoop" if by_epoch else "IterBasedTrainLoop"
        needed = "max_epochs" if by_epoch else "max_iters"
        require_key("train_cfg", cfg, needed)
    loop = LOOPS.build(arguments, runner=run, dataloader=run.train_dataloader)
    if not isinstance(loop, TrainLoop):
        raise TypeError(f"`train_cfg` must build a TrainLoop, but built {loop!r}")
    return loop


def _refuse_own_steps(loop: TrainLoop | EvalLoop) -> None:
    """Refuse methods that customise MMEngine's loops, but are never called here."""
    names = [name for name in ("run_epoch", "run_iter") if hasattr(loop, name)]
    if names and type(loop).run in (EpochBasedTrainLoop.run, IterBasedTrainLoop.run, EvalLoop.run):
        raise ConfigError(
            f"{type(loop).__name__} must not rely on {' and '.join(names)}, which `run` does not call. What is done "
            "there belongs to `train_step` or `val_step` of the model, or to a hook; or override `run`"
        )


def _require_step(loop: TrainLoop | EvalLoop) -> None:
    """Refuse a model that has nothing which a loop of lockstep's own could call, or a step with other parameters."""
    if type(loop) not in (EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop, TestLoop):
        return
    core, mode = unwrap_model(loop.runner.model), getattr(loop, "mode", "train")
    name, takes = f"{mode}_step", ["data", "optim_wrapper"] if mode == "train" else ["data"]
    if steps.defines_step(core, name):
        signature = inspect.signature(getattr(core, name))
        try:
            signature.bind(*takes)
        except TypeError as error:
            raise ConfigError(
                f"`{name}` of {type(core).__name__} must be {name}({', '.join(takes)}), but its parameters are "
                f"{signature}: {error}"
            ) from None
    elif (type(core).forward is nn.Module.forward or steps.is_stub(type(core).forward)) and "forward" not in vars(core):
        left = _uncalled_of_lightning(loop.runner.args, core)
        raise ConfigError(
            f"{type(core).__name__} must have a `forward`, or a `{name}` of its own, for `{mode}_dataloader`, but has "
            f"neither{left and f'. It has methods that {left}'}"
        )


def _warn_of_sync_norms(run: Run, loop: TrainLoop) -> None:
    """Warn that SyncBatchNorms also normalise over stand-ins, if there will or may be some."""
    lengths, core = loop.even_batches.lengths, unwrap_model(run.model)
    names = [name for name, module in core.named_modules() if is_synced(module)]
    if names and run.world_size > 1 and (lengths is None or min(lengths) < max(lengths)):
        _logger.warning(
            "%d SyncBatchNorms (%s, ...) normalise over the samples of all ranks, and over the repeated batch of one "
            "that %s: at the end of a pass their statistics are biased. Give the ranks equally many batches, by a "
            "sampler with round_up=True or by drop_last=True, or let BatchNorm normalise on each rank",
            len(names), names[0], "may run out before the others" if lengths is None else "runs out before the others",
        )  # fmt: skip


def _warn_of_other_means(run: TrainRun, loop: TrainLoop) -> None:
    """Warn of a loss of torch's that is no mean over samples, of which the mean over ranks is not that of one rank."""
    outside = outside_loss(unwrap_model(run.model))
    function = None if outside is None else outside.function
    ranks, windows = run.data_shard.size, getattr(run.optim_wrapper, "accumulative_counts", 1)
    if loop.batch_size_of is not None or ranks * windows == 1:
        return
    says, name = "", type(function).__name__
    if getattr(function, "reduction", "") == "sum":
        says = (
            f"a sum over samples: on {ranks} rank{'s' if ranks > 1 else ''} with accumulative_counts={windows}, "
            f"gradients are 1/{ranks * windows} of those of one process with the same global batch. Give it "
            "reduction='mean'"
        )
    elif isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss) and function.weight is not None:
        says = (
            "a mean over the weights of its labels, but ranks and accumulated batches count by their samples, so that "
            "updates differ from those of one process. Give train_cfg a batch_size_of, such as lambda batch: "
            "weight[batch[1]].sum(), of dicts weight[batch['labels']].sum(), with the weights on the CPU and without "
            "labels of ignore_index"
        )
    if says:
        _logger.warning("the loss %s is %s", name, says)


def build_schedulers(cfg: Any, run: TrainRun) -> list[ParamScheduler]:
    """Return the schedulers that `param_scheduler` describes.

    With several optimizers, each gets its own schedulers: those under its name if `cfg` is a dict with optimizer names
    as keys, else all of them.
    """
    wrapper, loop = run.optim_wrapper, run.train_loop
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


def build_loader(mode: Literal["train", "val", "test"], loader: Any, space: Workspace, shard: DataShard) -> Any:
    """Return the loader, given or described, of this rank's shard of the data; of several, a dict or a list.

    **Collective**: every rank.
    """
    several = {}
    for name, one in named_loaders(loader).items():
        with building(f"{mode}_dataloader{name and f'[{name!r}]'}"):
            built = build_dataloader(one, seed=space.seed, evaluation=mode != "train", shard=shard[:2])
        end_workers_at_exit()
        prepare_workers(built, space.args.stop_signals)
        several[name] = built
    if "" in several:
        return several[""]
    return several if isinstance(loader, Mapping) else [*several.values()]


def build_eval_loop(mode: Literal["val", "test"], run: Run, dataloader: Any) -> EvalLoop:
    """Return the loop that `val_cfg` and `val_evaluator`, or `test_cfg` and `test_evaluator`, describe."""
    cfg, given = getattr(run.args, f"{mode}_cfg"), getattr(run.args, f"{mode}_evaluator")
    names = [*named_loaders(dataloader)]
    kind = {"val": "ValLoop", "test": "TestLoop"}[mode]
    own = cfg.get("type", kind) if isinstance(cfg, Mapping) else kind
    own = LOOPS.get(own) if isinstance(own, str) else own
    evaluator: Any
    if given is not None and isinstance(own, type) and not issubclass(own, EvalLoop):
        evaluator = given  # a loop of the user's own builds it, as in MMEngine
    elif (by_name := evaluators_by_name(f"{mode}_evaluator", given, names)) is None:
        evaluator = build_evaluator(given, run, mode)
    else:
        evaluator = {name: build_evaluator(by_name.get(name), run, mode) for name in names}
        evaluator = evaluator if isinstance(dataloader, Mapping) else [*evaluator.values()]
    loop: EvalLoop = LOOPS.build(cfg or {}, type=kind, runner=run, dataloader=dataloader, evaluator=evaluator)
    _refuse_own_steps(loop)
    _require_step(loop)
    return loop


def _batch_size_of(run: Run) -> Any:
    """Return the `batch_size_of` of the training, by which its losses are weighted; None if it has none."""
    if isinstance(run, TrainRun):
        return getattr(run.train_loop, "batch_size_of", None)
    cfg = run.args.train_cfg
    return cfg.get("batch_size_of") if isinstance(cfg, Mapping) else getattr(cfg, "batch_size_of", None)


def build_evaluator(given: Any, run: Run, mode: Literal["val", "test"]) -> Evaluator:
    """Return an evaluator of the given metrics, or of those in an `Evaluator`'s config, and of the loss.

    A loss that was given to the Runner is always among the metrics; the model's own is, if there are no others.
    """
    core = unwrap_model(run.model)
    loss = outside_loss(core)
    if given is None:
        takes_mode = steps.takes_mode(type(core).forward) and not steps.defines_step(core, f"{mode}_step")
        if loss is None and takes_mode:
            raise ConfigError(
                f"`{mode}_evaluator` must be given with `{mode}_dataloader`, because `forward` of "
                f"{type(core).__name__} returns no loss where it predicts, but is None. For example "
                "dict(type='Accuracy')"
            )
        given = LossMetric()
    if not isinstance(given, Evaluator):  # the class of the default scope: that of lockstep-mmengine is another one
        given = given if isinstance(given, Mapping) and "metrics" in given else {"metrics": given}
        with building(f"{mode}_evaluator"):
            given = EVALUATOR.build(given, type="Evaluator")
    built: Evaluator = given
    losses = [metric for metric in built.metrics if isinstance(metric, LossMetric)]
    if loss is None and not losses:
        return built
    # The Evaluator, and its LossMetrics, may be those of another Runner, whose loss is another one.
    built = copy(built)
    built.metrics = [copy(metric) if metric in losses else metric for metric in built.metrics]
    if not losses:
        built.metrics.append(LossMetric())
    for metric in built.metrics:
        if isinstance(metric, LossMetric):
            metric.loss, metric.count, metric.results = loss, _batch_size_of(run), []
    return built


def default_hooks(changes: Mapping[str, Any] | None) -> list[Hook | Mapping[str, Any]]:
    """Return the default hooks with the changes applied, as hooks and configs.

    Args:
        changes: by name: None to remove a hook, a hook, or the config of one; a config without `type` changes arguments
            of the default hook.

    Raises:
        ConfigError: a name is not known, and is close to that of a default hook, or comes without a `type`.
    """
    items: dict[str, Any] = {**DEFAULT_HOOKS}
    changes = changes or {}
    for name, given in changes.items():
        if (says := default_hook_fault(name, given)) is not None:
            raise ConfigError(f"`default_hooks[{name!r}]` {says}")
        if isinstance(given, Mapping) and "type" not in given:
            given = {**items[name], **given}
        items[name] = given
    return [item for item in items.values() if item is not None]


def build_visualizer(visualizer: Any, rank: int) -> Visualizers:
    """Return the visualizers of a run: built on every rank, so that all report an error, but used only on rank 0."""
    with building("visualizer"):
        built = build_visualizers(visualizer)
    built.make_current()
    if rank != 0:
        built.parts.clear()
    return built


def set_schedules(run: TrainRun, schedulers: list[Any] | None) -> None:
    """Scale the learning rates, give the run its schedulers, and note what both were before a schedule acts.

    Args:
        run: a run that has been built otherwise.
        schedulers: the schedulers; by default those of `param_scheduler`.
    """
    if run.args.auto_scale_lr is not None:
        _scale_lr(run.args.auto_scale_lr, run)
    record_first_options(run)
    with building("param_scheduler"):
        run.param_schedulers = build_schedulers(run.args.param_scheduler, run) if schedulers is None else schedulers
    record_config(run)


def _scale_lr(cfg: Mapping[str, Any], run: TrainRun) -> None:
    """Multiply all learning rates by the global batch size divided by `base_batch_size`, if enabled."""
    checked_keys("auto_scale_lr", cfg)
    require_key("auto_scale_lr", cfg, "base_batch_size")
    require_number("auto_scale_lr['base_batch_size']", cfg["base_batch_size"], above=0)
    if not cfg.get("enable", False):
        _logger.info("learning rates stay as they are; `auto_scale_lr` needs enable=True to scale them")
        return
    batch_size = getattr(run.train_dataloader, "batch_size", None)
    if batch_size is None:
        raise ConfigError(
            "`auto_scale_lr` needs a train_dataloader with a `batch_size`, but this one has none, as one with a "
            "`batch_sampler`. Give `batch_size`, or set the learning rate for the batches that there are"
        )
    factor = batch_size * run.data_shard.size / cfg["base_batch_size"]
    groups = run.optim_wrapper.param_groups
    if any(group.get("lr") is None for group in groups):
        raise ConfigError(
            "`auto_scale_lr` multiplies learning rates, which this optimizer sets itself: `lr` is None in its groups. "
            "Give the optimizer a number, or leave out `auto_scale_lr`"
        )
    for group, rate in [(group, group["lr"] * factor) for group in groups]:  # first all: groups may share a tensor
        set_option(group, "lr", rate)
    _logger.info(
        "learning rates are multiplied by %g: the global batch is %d, they are meant for %d",
        factor, batch_size * run.data_shard.size, cfg["base_batch_size"],
    )  # fmt: skip
