"""Building schedulers from a config: lockstep's own, and torch's or a user's subclass of one, within a window."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.errors import ConfigError
from lockstep.optim.scheduler import ParamScheduler, is_in_range, length_argument, window_length
from lockstep.optim.schedules import ReduceOnPlateauLR
from lockstep.registry import PARAM_SCHEDULERS, in_default_scope
from lockstep.registry.registry import SCOPE
from lockstep.registry.signatures import check_names, construct

# Torch's schedules whose names lockstep does not use.
for _name in ("CosineAnnealingWarmRestarts", "CyclicLR", "PolynomialLR"):
    PARAM_SCHEDULERS.register_module(module=getattr(lr_scheduler, _name))


class TorchScheduler(ParamScheduler):
    """A torch schedule that counts epochs or batches, from `begin` up to `end`.

    Args:
        schedule: a subclass of `torch.optim.lr_scheduler.LRScheduler`, or a function that returns such an object, as
            `transformers` has. It is created when `begin` is reached, from the learning rate that the optimizer has
            then.
        optimizer: the optimizer whose learning rates are set.
        by_epoch: count epochs; otherwise batches.
        begin: the count at which the schedule starts.
        end: the count from which the schedule no longer changes the learning rates; None for never.
        last_step: as for `ParamScheduler`.
        verbose: as for `ParamScheduler`.
        **kwargs: arguments of `schedule`, in epochs or batches like `by_epoch`. A length defaults to the window's.
    """

    def __init__(
        self,
        schedule: Callable[..., LRScheduler],
        optimizer: Optimizer,
        *,
        by_epoch: bool = True,
        begin: int = 0,
        end: int | None = None,
        last_step: int = -1,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        self._schedule = schedule
        if isinstance(schedule, type) and issubclass(schedule, ReduceLROnPlateau):
            raise ConfigError(
                f"{schedule.__name__} must be given as lockstep's own, which sees the metrics of the validation: "
                "dict(type='ReduceOnPlateauLR', monitor=...)"
            )
        name = None if "steps_per_epoch" in kwargs else length_argument(schedule)  # the other way to say OneCycleLR's
        if name is not None and kwargs.get(name) is None and end not in (None, math.inf):
            kwargs[name] = window_length(name, begin, end)
        # Now: a schedule that begins late would otherwise raise in the middle of a run.
        check_names(schedule, ["optimizer", *kwargs], PARAM_SCHEDULERS.name, ("by_epoch", "begin", "end"))
        self._kwargs = kwargs
        self._inner: LRScheduler | None = None
        super().__init__(optimizer, by_epoch=by_epoch, begin=begin, end=end, last_step=last_step, verbose=verbose)

    def advance(self, t: int) -> None:
        """Let torch's schedule set the learning rates."""
        if self._inner is None:
            # By name: it is not the first parameter of transformers' get_scheduler.
            self._inner = self._schedule(optimizer=self.optimizer, **self._kwargs)
            if not isinstance(self._inner, LRScheduler):
                raise ConfigError(f"`type` must return an LRScheduler of torch's, but {self.title} does not")
            return
        # After its last step torch's OneCycleLR rises again, and then raises. It may be that of a resumed, shorter run.
        if not isinstance(self._inner, lr_scheduler.OneCycleLR) or self._inner.last_epoch < self._inner.total_steps - 1:
            step_quietly(self._inner)

    def restart(self) -> None:
        """Begin anew, from the values that the groups have now."""
        self._inner = None
        super().restart()

    @property
    def title(self) -> str:
        """The schedule's name in errors and logs."""
        return getattr(self._schedule, "__name__", type(self._schedule).__name__)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, in plain numbers, strings and lists."""
        inner = {} if self._inner is None else self._inner.state_dict()
        return {**super().state_dict(), "schedule": {key: value for key, value in inner.items() if _is_plain(value)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a scheduler with the same arguments."""
        super().load_state_dict(state)
        if state["schedule"]:
            if self._inner is None:
                self.advance(0)
            assert self._inner is not None
            # What is not plain, such as the functions of a LambdaLR, stays as it is given now.
            self._inner.load_state_dict({**self._inner.state_dict(), **state["schedule"]})

    def _ramp_length(self) -> int | None:
        if self._schedule is lr_scheduler.ConstantLR:
            return None
        length = self._kwargs.get(length_argument(self._schedule) or "")
        return length if isinstance(length, int) else None

    def _shown(self) -> list[str]:
        return [f"{name}={value!r}" for name, value in self._kwargs.items()]


def step_quietly(schedule: LRScheduler) -> None:
    """Step a schedule of torch, which warns if no optimizer step came first: normal when gradients are accumulated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)")
        schedule.step()


def steps_in(state: Mapping[str, Any]) -> int | None:
    """Return how many steps a schedule of torch has made, by its state; None if that does not say it.

    A `ChainedScheduler` has no count of its own: the schedules in it make the same steps.
    """
    parts = state.get("_schedulers")
    count = state.get("last_epoch", steps_in(parts[0]) if parts else None)
    return count if isinstance(count, int) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | str)


def build_param_schedulers(
    optimizer: Optimizer, cfg: Any, *, max_epochs: int | None, max_iters: int | None
) -> list[ParamScheduler]:
    """Return the schedulers that `cfg` describes.

    Args:
        optimizer: the optimizer whose learning rates, or other values, are scheduled.
        cfg: a config dict or a list of them, with `type` (the name or class of one of lockstep's schedules, a subclass
            of torch's `LRScheduler`, or a function that returns one, such as transformers'
            `get_linear_schedule_with_warmup`), `by_epoch` (default True; for a function, False; for
            `ReduceOnPlateauLR`, the training's unit), `begin`, `end`, and the arguments of that class; or
            `ParamScheduler` objects; or None. A length (`T_max`, `total_iters`, `total_steps`) that is not given
            defaults to the length of the window. With `convert_to_iter_based=True` all numbers are in epochs, but the
            value changes with every batch.
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
    built = [
        item if isinstance(item, ParamScheduler) else _build_one(optimizer, item, max_epochs, max_iters)
        for item in items
    ]
    for one in built:
        # A plateau counts validations; only its window has a unit.
        has_unit = not isinstance(one, ReduceOnPlateauLR) or (one.begin, one.end) != (0, None)
        if one.by_epoch and has_unit and max_epochs is None and max_iters is not None:
            raise ConfigError(
                f"{one.title}: `by_epoch` must be False where the training counts iterations, but is True: an epoch "
                "would never end"
            )
    return built


def _build_one(optimizer: Optimizer, cfg: Any, max_epochs: int | None, max_iters: int | None) -> ParamScheduler:
    if not isinstance(cfg, Mapping):
        raise TypeError(
            "`param_scheduler` must be a config dict, a ParamScheduler or a list of them, but has "
            f"{cfg!r} of type {type(cfg).__name__}. A torch scheduler holds on to an optimizer of its own, and does "
            "not say what it counts; give its class, or the function that makes it, and the arguments, as in "
            "dict(type=LambdaLR, lr_lambda=..., by_epoch=False) or dict(type=get_linear_schedule_with_warmup, "
            "num_warmup_steps=100, num_training_steps=1000)"
        )
    arguments = dict(cfg)
    schedule = arguments.pop("type", None)
    with in_default_scope(arguments.pop(SCOPE, None)):
        if isinstance(schedule, str):
            schedule = PARAM_SCHEDULERS[schedule]
    if callable(schedule) and not isinstance(schedule, type):  # transformers' count updates
        return TorchScheduler(schedule, optimizer, **{"by_epoch": False, **arguments})
    if not (isinstance(schedule, type) and issubclass(schedule, ParamScheduler | LRScheduler)):
        raise ConfigError(
            "`type` of a parameter scheduler must be a ParamScheduler, a subclass of "
            "torch.optim.lr_scheduler.LRScheduler, the name of one, or a function that returns one, but is "
            f"{schedule!r}"
        )
    if arguments.pop("convert_to_iter_based", False):
        arguments = _in_batches(schedule, arguments, max_epochs, max_iters)
    # The unit of a plateau's window is that of the training.
    by_epoch = arguments.setdefault("by_epoch", max_epochs is not None or not issubclass(schedule, ReduceOnPlateauLR))
    last = max_epochs if by_epoch and max_epochs is not None else max_iters
    length = length_argument(schedule)
    open_ended = arguments.get("end") in (None, math.inf) and is_in_range(arguments.get("begin", 0))
    lacks_length = length is not None and arguments.get(length) is None
    if (lacks_length or getattr(schedule, "needs_end", False)) and open_ended and last is not None:
        arguments["end"] = max(last, arguments.get("begin", 0) + 1)
    if issubclass(schedule, ParamScheduler):
        made: ParamScheduler = construct(schedule, {"optimizer": optimizer, **arguments}, PARAM_SCHEDULERS.name)
        return made
    return TorchScheduler(schedule, optimizer, **arguments)


def _in_batches(
    schedule: type, arguments: Mapping[str, Any], max_epochs: int | None, max_iters: int | None
) -> dict[str, Any]:
    """Return the arguments, with all numbers of epochs converted to numbers of batches."""
    if not arguments.get("by_epoch", True) or not issubclass(schedule, ParamScheduler) or not max_epochs:
        raise ConfigError(
            f"{schedule.__name__}: `convert_to_iter_based` must be False unless it is one of lockstep's schedules, it "
            "counts epochs, and so does the training. Elsewhere give numbers of iterations, with by_epoch=False"
        )
    assert max_iters is not None
    return {**schedule.stretched(arguments, max_iters // max_epochs), "by_epoch": False}
