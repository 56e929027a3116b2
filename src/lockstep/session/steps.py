"""What the user's code does around a session: parts in other places, steps of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lockstep.errors import ConfigError
from lockstep.model.shards import own_shard
from lockstep.optim import OptimWrapper

if TYPE_CHECKING:
    from lockstep.session.loop import OwnLoop

_WINDOWS_LOOKED_AT = 3  # for gradients that are there before
_PLACES: dict[str, tuple[type, str]] = {
    "the model": (nn.Module, "a model"),
    "the optimizer": (Optimizer, "an optimizer"),
    "the data loader": (DataLoader, "a data loader"),
    "schedules": (LRScheduler, "a schedule"),
}


def refuse_other_places(*given: Any) -> None:
    """Raise an error if something that prepare() gets by position is of the kind of another place, or is one too many.

    Other libraries take models, optimizers and loaders in any number and order.
    """
    for place, value in zip_longest(_PLACES, given, fillvalue="a further argument"):
        own, _ = _PLACES.get(place, (type(None), ""))
        several = isinstance(value, list | tuple) and bool(value) and all(isinstance(one, own) for one in value)
        kinds = [says for kind, says in _PLACES.values() if isinstance(value, kind) and not isinstance(value, own)]
        what = f"a {type(value).__name__} of several" if several else next(iter(kinds), "")
        if place not in _PLACES:
            what = what or repr(value)
        elif place == "schedules":  # may be several, and a loader there has an error of its own
            continue
        elif place == "the optimizer" and several and not isinstance(given[0], Mapping | nn.ModuleDict):
            continue  # one loss updates them all; of several models, each is to have one of its own
        if what:
            raise TypeError(
                "prepare() must be given one model, one optimizer, one data loader and schedules, in this order or by "
                f"name, but has {what} as {place}. Several models go in as a dict, and so do their optimizers: "
                "prepare({'a': net_a, 'b': net_b}, {'a': optimizer_a, 'b': optimizer_b}, loader, schedulers=[...]); "
                "optimizers that one loss updates together, in a list with one model; "
                "data to evaluate on go to prepare_evaluation(loader)"
            )


def guard_steps(loop: OwnLoop, wrapper: OptimWrapper, name: str | None = None) -> None:
    """Let an optimizer raise an error where code of the user's own steps it by gradients around the session.

    Such gradients are neither weighted by samples, nor divided by the batches of a window, nor unscaled. Gradients
    that are there when one of the first windows begins are an error, too. With several optimizers, by name, the loss of
    another may have left them, which is warned of.
    """
    update_params, add_gradients, windows_left = wrapper.update_params, wrapper.backward, _WINDOWS_LOOKED_AT
    is_due = False  # whether the wrapper has made a backward pass since the last step
    call = "session.step(loss)" if name is None else f"optimizers[{name!r}].update_params(loss)"

    def refuse(what: str, why: str) -> None:
        raise RuntimeError(
            f"the {what} of {type(wrapper.optimizer).__name__} {why} (rank {loop.runner.rank} of "
            f"{loop.runner.world_size}). Call {call}, in place of loss.backward(), optimizer.step() and "
            "optimizer.zero_grad() or model.zero_grad()"
        )

    def update(*args: Any, **kwargs: Any) -> None:
        nonlocal windows_left
        if windows_left and not wrapper.has_open_window:
            windows_left -= 1
            grads = [parameter.grad for group in wrapper.param_groups for parameter in group["params"]]
            # Zeros are what zero_grad(set_to_none=False) leaves: only here is the device asked.
            if any(bool(own_shard(grad).any()) for grad in grads if grad is not None):
                windows_left = 0
                if name is None:
                    refuse("gradients", "must be those of session.step(loss) alone, but there were some before it")
                first = (
                    f"Call optimizers[{name!r}].zero_grad() first, or" if wrapper.accumulative_counts == 1 else "Call"
                )
                loop.runner.logger.warning(
                    "the parameters of optimizers[%r] have gradients before its update_params(loss), which adds to "
                    "them: those of another optimizer's loss? %s requires_grad_(False) for the parameters while the "
                    "other's loss is computed", name, first,
                )  # fmt: skip
        update_params(*args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal is_due
        add_gradients(*args, **kwargs)
        is_due = True

    def has_gradients() -> bool:
        return any(parameter.grad is not None for group in wrapper.param_groups for parameter in group["params"])

    def before_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        has_closure = len(arguments) > 1 or bool(options)  # the first one is the optimizer
        if not loop.is_stepping or has_closure:
            return
        # A step left over from an older loop, after that of the session, finds no gradients and does nothing.
        if not loop.has_backward or (not is_due and has_gradients()):
            refuse("step", "must follow a backward pass of the session, but there has been none since the last step")
        if not wrapper.should_update():
            refuse("step", "must end a window of accumulation, but comes within one")

    def after_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        nonlocal is_due
        is_due = False

    def note_rate(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        rate = wrapper.param_groups[0].get("lr")
        if isinstance(rate, int | float):  # reading a tensor might wait for the device
            loop.rates_of_step["lr" if name is None else f"{name}.lr"] = float(rate)

    wrapper.update_params = update  # type: ignore[method-assign]
    wrapper.backward = backward  # type: ignore[method-assign]
    try:
        wrapper.optimizer.register_step_pre_hook(before_step)
    except AttributeError as error:
        kind = type(wrapper.optimizer)
        raise ConfigError(
            "`optimizer` must be a torch.optim.Optimizer that its own `__init__` has set up, since a Session watches "
            f"its steps, but {kind.__name__} of {kind.__module__} does not call that. Hand in the optimizer that it "
            "is made around, or train with a Runner"
        ) from error
    wrapper.optimizer.register_step_post_hook(after_step)
    wrapper.optimizer.register_step_pre_hook(note_rate)
