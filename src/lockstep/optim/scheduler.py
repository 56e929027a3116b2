"""Torch's learning-rate schedules, counted in epochs or in batches, within a window."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import ConfigError
from lockstep.registry import PARAM_SCHEDULERS

_BY_NAME = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
for _name in _BY_NAME:
    PARAM_SCHEDULERS.register_module(module=getattr(lr_scheduler, _name))

# The argument that says how long a schedule takes; the window's length is its default. A ramp
# arrives at its end value in the last count of the window, hence one less.
_LENGTH_ARGUMENTS = {
    "CosineAnnealingLR": ("T_max", 0),
    "ConstantLR": ("total_iters", 1),
    "LinearLR": ("total_iters", 1),
    "PolynomialLR": ("total_iters", 1),
    "OneCycleLR": ("total_steps", 0),
}


class ParamScheduler:
    """A schedule of torch's that counts epochs or batches, from `begin` up to `end`.

    Schedules on one optimizer follow each other: a warm-up of 100 batches, then a cosine.

    Args:
        schedule: a subclass of `torch.optim.lr_scheduler.LRScheduler`. It is created when `begin`
            is reached, from the learning rate that the optimizer has then.
        optimizer: whose learning rates are set.
        by_epoch: count epochs, else batches.
        begin: the count at which the schedule starts.
        end: the count from which on it no longer changes anything; None for never.
        **kwargs: arguments of `schedule`, in the unit that is counted.
    """

    def __init__(
        self,
        schedule: type[LRScheduler],
        optimizer: Optimizer,
        *,
        by_epoch: bool = True,
        begin: int = 0,
        end: int | None = None,
        **kwargs: Any,
    ) -> None:
        if begin < 0 or (end is not None and end <= begin):
            raise ConfigError(
                f"{schedule.__name__}: `begin` must be at least 0 and less than `end`, but they are {begin} and {end}"
            )
        _check_arguments(schedule, optimizer, kwargs)
        self.by_epoch = by_epoch
        self.begin = begin
        self.end = end
        self._schedule = schedule
        self._optimizer = optimizer
        self._kwargs = kwargs
        self._count = 0
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._inner = self._start() if begin == 0 else None

    def step(self) -> None:
        """Count one epoch or batch, and set the learning rates for the next."""
        self._count += 1
        if self._count < self.begin or (self.end is not None and self._count >= self.end):
            return
        if self._inner is None:
            self._inner = self._start()
        elif self._count - self.begin == 1:
            with warnings.catch_warnings():
                # torch misses an optimizer step before this one where gradients are accumulated.
                warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)")
                self._inner.step()
        else:
            self._inner.step()

    def get_last_value(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands, in plain numbers and lists."""
        inner = {} if self._inner is None else self._inner.state_dict()
        plain = {key: value for key, value in inner.items() if _is_plain(value)}
        return {"count": self._count, "schedule": plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another scheduler of the same arguments stood.

        The learning rates themselves belong to the optimizer's state; load that afterwards.
        """
        self._count = state["count"]
        if state["schedule"]:
            self._inner = self._inner or self._start()
            self._inner.load_state_dict(dict(state["schedule"]))

    def __repr__(self) -> str:
        unit = "epochs" if self.by_epoch else "batches"
        arguments = "".join(f", {key}={value!r}" for key, value in self._kwargs.items())
        end = "" if self.end is None else self.end
        return f"{self._schedule.__name__}({unit} {self.begin}..{end}{arguments})"

    def _start(self) -> LRScheduler:
        return self._schedule(self._optimizer, **self._kwargs)


def build_param_schedulers(
    optimizer: Optimizer, cfg: Any, *, max_epochs: int | None, max_iters: int | None
) -> list[ParamScheduler]:
    """Return the schedulers that `cfg` describes.

    Args:
        optimizer: whose learning rates are scheduled.
        cfg: a config dict or a list of them, with `type` (a class of `torch.optim.lr_scheduler` or
            its name), `by_epoch` (default True), `begin`, `end`, and the arguments of that class;
            or `ParamScheduler` objects; or None. Where the class needs a length (`T_max`,
            `total_iters`, `total_steps`) that is not given, it is that of the window.
        max_epochs: length of the training, by which windows without `end` are closed.
        max_iters: the same in batches.

    Raises:
        ConfigError: no scheduler is called that.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> warmup = dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=100)
        >>> cosine = dict(type="CosineAnnealingLR", by_epoch=False, begin=100)
        >>> build_param_schedulers(optimizer, [warmup, cosine], max_epochs=None, max_iters=1000)
        [LinearLR(batches 0..100, ...), CosineAnnealingLR(batches 100..1000, T_max=900)]
    """
    if cfg is None:
        return []
    items = cfg if isinstance(cfg, Sequence) else [cfg]
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
    if isinstance(schedule, str):
        schedule = PARAM_SCHEDULERS[schedule]
    if not (isinstance(schedule, type) and issubclass(schedule, LRScheduler)):
        raise ConfigError(
            "`type` of a parameter scheduler must be a subclass of "
            f"torch.optim.lr_scheduler.LRScheduler or the name of one, but is {schedule!r}"
        )
    by_epoch = arguments.pop("by_epoch", True)
    begin, end = arguments.pop("begin", 0), arguments.pop("end", None)
    end = None if end is None or math.isinf(end) else end
    name, shorter = _LENGTH_ARGUMENTS.get(schedule.__name__, (None, 0))
    if name is not None and arguments.get(name) is None:
        last = end if end is not None else (max_epochs if by_epoch else max_iters)
        if last is not None:
            arguments[name] = max(last - begin - shorter, 1)
            end = max(last, begin + 1)
    return ParamScheduler(schedule, optimizer, by_epoch=by_epoch, begin=begin, end=end, **arguments)


def _check_arguments(schedule: type[LRScheduler], optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
    # A schedule that begins late would otherwise refuse its arguments in the middle of a run.
    signature = inspect.signature(schedule)
    try:
        signature.bind(optimizer, **kwargs)
    except TypeError as error:
        names = [name for name in signature.parameters if name != "optimizer"]
        raise ConfigError(
            f"{schedule.__name__}: {error}. Its arguments are {', '.join(names)}; every schedule "
            "also takes by_epoch, begin and end"
        ) from error


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | str)
