"""Building schedulers from a config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import ConfigError
from lockstep.optim.plateau import ReduceOnPlateauLR
from lockstep.optim.scheduler import ParamScheduler, length_argument
from lockstep.optim.torch_schedules import TorchScheduler
from lockstep.registry import PARAM_SCHEDULERS, in_default_scope
from lockstep.registry.registry import SCOPE
from lockstep.registry.signatures import construct


def build_param_schedulers(
    optimizer: Optimizer, cfg: Any, *, max_epochs: int | None, max_iters: int | None
) -> list[ParamScheduler]:
    """Return the schedulers that `cfg` describes.

    Args:
        optimizer: the optimizer whose learning rates, or other values, are scheduled.
        cfg: a config dict or a list of them, with `type` (the name or class of one of lockstep's schedules, or a
            subclass of torch's `LRScheduler`), `by_epoch` (default True; for `ReduceOnPlateauLR`, the training's unit),
            `begin`, `end`, and the arguments of that class; or `ParamScheduler` objects; or None. A length (`T_max`,
            `total_iters`, `total_steps`) that is not given defaults to the length of the window. With
            `convert_to_iter_based=True` all numbers are in epochs, but the value changes with every batch.
        max_epochs: length of the training; the `end` of schedules that need a length but have neither a length nor an
            `end`. None if the training counts iterations.
        max_iters: the same in batches.

    Raises:
        ConfigError: no scheduler has that name, its arguments are not valid, or it counts epochs but the training
            counts iterations.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> warmup = dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=100)
        >>> cosine = dict(type="CosineAnnealingLR", by_epoch=False, begin=100)
        >>> build_param_schedulers(optimizer, [warmup, cosine], max_epochs=None, max_iters=1000)
        [LinearLR(batches 0..100, ...), CosineAnnealingLR(batches 100..1000, T_max=900)]
    """
    if cfg is None:
        return []
    items = cfg if isinstance(cfg, Sequence) and not isinstance(cfg, str) else [cfg]
    return [
        item if isinstance(item, ParamScheduler) else _build_one(optimizer, item, max_epochs, max_iters)
        for item in items
    ]


def _build_one(optimizer: Optimizer, cfg: Any, max_epochs: int | None, max_iters: int | None) -> ParamScheduler:
    if not isinstance(cfg, Mapping):
        raise TypeError(
            "`param_scheduler` must be a config dict, a ParamScheduler or a list of them, but has "
            f"{cfg!r} of type {type(cfg).__name__}. A torch scheduler holds on to an optimizer of "
            "its own; give its class and arguments, as in dict(type=StepLR, step_size=2)"
        )
    arguments = dict(cfg)
    schedule = arguments.pop("type", None)
    with in_default_scope(arguments.pop(SCOPE, None)):
        if isinstance(schedule, str):
            schedule = PARAM_SCHEDULERS[schedule]
    if not (isinstance(schedule, type) and issubclass(schedule, ParamScheduler | LRScheduler)):
        raise ConfigError(
            "`type` of a parameter scheduler must be a ParamScheduler, a subclass of "
            f"torch.optim.lr_scheduler.LRScheduler or the name of one, but is {schedule!r}"
        )
    name = schedule.__name__
    if arguments.pop("convert_to_iter_based", False):
        arguments = _in_batches(schedule, arguments, max_epochs, max_iters)
    # A plateau counts validations; only its window has a unit, which is that of the training.
    by_epoch = arguments.setdefault("by_epoch", max_epochs is not None or not issubclass(schedule, ReduceOnPlateauLR))
    last = max_epochs if by_epoch else max_iters
    if last is None and by_epoch and max_iters is not None:
        raise ConfigError(
            f"{name}: `by_epoch` must be False where the training counts iterations, but is True: an epoch would never "
            "end"
        )
    length = length_argument(schedule)
    open_ended = arguments.get("end") is None or math.isinf(arguments["end"])
    lacks_length = length is not None and arguments.get(length) is None
    if (lacks_length or getattr(schedule, "needs_end", False)) and open_ended and last is not None:
        arguments["end"] = max(last, arguments.get("begin", 0) + 1)
    if issubclass(schedule, ParamScheduler):
        built: ParamScheduler = construct(schedule, {"optimizer": optimizer, **arguments}, PARAM_SCHEDULERS.name)
        return built
    return TorchScheduler(schedule, optimizer, **arguments)


def _in_batches(
    schedule: type, arguments: Mapping[str, Any], max_epochs: int | None, max_iters: int | None
) -> dict[str, Any]:
    """Return the arguments, with all numbers of epochs converted to numbers of batches."""
    if not arguments.get("by_epoch", True) or not issubclass(schedule, ParamScheduler) or not max_epochs:
        raise ConfigError(
            f"{schedule.__name__}: `convert_to_iter_based` must be False unless it is one of lockstep's schedules, it "
            "counts epochs, and so does the training"
        )
    assert max_iters is not None
    return {**schedule.stretched(arguments, max_iters // max_epochs), "by_epoch": False}
