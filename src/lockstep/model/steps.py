"""The parts of training steps and predictions, for any module: preprocessing, the call, and the losses.

`BaseModel`, the wrappers and the loops all use these functions, so that a plain `torch.nn.Module` that returns its loss
is trained in exactly the same way as a model that inherits from `BaseModel`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from numbers import Real
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from torch import Tensor, nn

from lockstep.groups import this_rank
from lockstep.model.preprocessor import move_to_device
from lockstep.tree import is_tensordict

Mode: TypeAlias = Literal["tensor", "loss", "predict"]
ParseLosses: TypeAlias = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]
_Method = TypeVar("_Method", bound=Callable[..., Any])


class UpdatesParams(Protocol):
    """The methods of an optim wrapper that a training step needs."""

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass runs (autocast, no_sync)."""

    def update_params(self, loss: Tensor) -> None:
        """Run the backward pass, and update the parameters if an update is due."""


def default_step(method: _Method) -> _Method:
    """Mark a method as lockstep's default step, which is not a step that the model's author wrote."""
    method.is_default_step = True  # type: ignore[attr-defined]
    return method


def defines_step(module: nn.Module, name: str) -> bool:
    """Return whether `module` has a step of that name (`train_step`, `val_step`, `test_step`) that its author wrote."""
    step = getattr(module, name, None)
    return callable(step) and not getattr(step, "is_default_step", False) and not is_stub(step)


def forget_session(module: nn.Module) -> None:
    """Remove the step that a Session has put into a module that it trained, or that was copied from such a one."""
    if getattr(vars(module).get("train_step"), "is_of_session", False):
        del module.train_step


def is_stub(method: object) -> bool:
    """Return whether a method is that of Lightning's base class, which has all of them."""
    return (getattr(method, "__module__", None) or "").partition(".")[0] in ("lightning", "pytorch_lightning")


def calls_parts(module: nn.Module) -> bool:
    """Return whether training steps may call parts of `module` by themselves, as a step that its author wrote may.

    A step says that it calls only the whole module by an attribute `calls_parts` that is False.
    """
    return defines_step(module, "train_step") and getattr(module.train_step, "calls_parts", True)


def preprocess(core: nn.Module, data: Any, *, training: bool) -> Any:
    """Apply the model's `data_preprocessor` to a batch, or only move the batch to the model's device."""
    if (preprocessor := getattr(core, "data_preprocessor", None)) is not None:
        return preprocessor(data, training)
    parameter = next(core.parameters(), None)
    # Weights that are offloaded lie on the CPU, and compute on the device, where a loop has moved the batch.
    return data if parameter is None or parameter.is_cpu else move_to_device(data, parameter.device)


def call_forward(model: nn.Module, core: nn.Module, batch: Any, mode: Mode) -> Any:
    """Call `model` on an unpacked batch, with `mode` if the `forward` of `core` has that parameter.

    Raises:
        TypeError: the batch is None, or does not fit the parameters of `forward`.
    """
    if batch is None:
        raise TypeError(
            f"the batch must not be None, which the loader's collate_fn has returned ({this_rank()}). Leave "
            "out bad samples before batches are made of them, for instance by a Subset of the dataset"
        )
    kwargs = {"mode": mode} if takes_mode(type(core).forward) else {}
    args, named = _unpacked(batch)
    try:
        return model(*args, **named, **kwargs)
    except TypeError as error:
        if (misfit := _misfit(core, args, named, kwargs)) is not None:
            raise TypeError(misfit) from error
        raise


def _unpacked(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional and the named arguments that `forward` gets of a batch."""
    if isinstance(batch, Mapping) and not is_tensordict(batch):
        return (), batch
    return batch if isinstance(batch, list | tuple) else [batch], {}


def parse_losses(losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Add up what a model returned in training.

    Args:
        losses: the loss itself; an object with an attribute `loss`; or a dict of tensors and lists of tensors, in which
            every entry whose name contains `loss` counts as a loss. Each tensor of a dict is averaged, and the tensors
            of a list are then added.

    Returns:
        The scalar to minimise, and the values to log, detached, with the total under `"loss"`, first.

    Raises:
        TypeError: there is no loss in `losses`, or an entry is not a tensor.
        ValueError: a bare loss is not a scalar.
    """
    # A dict with an attribute `loss`, as many libraries return, may hold more than tensors; then only `loss` is read.
    loss = losses if isinstance(losses, Tensor) else getattr(losses, "loss", None)
    if isinstance(loss, Tensor):
        return _scalar(loss), {"loss": loss.detach()}
    if not isinstance(losses, Mapping):
        raise TypeError(
            "`forward` must return a loss in training (a scalar tensor, a dict of tensors or an "
            f"object with a tensor `.loss`), but returned {_describe(losses)}"
        )
    values = {name: _mean(name, value) for name, value in losses.items()}
    parts = [value for name, value in values.items() if "loss" in name]
    if not parts:
        raise TypeError(
            f"`forward` must return at least one entry whose name contains 'loss', but returned only {sorted(values)}"
        )
    total = sum(parts[1:], start=parts[0])
    # Copies, because one of a parameter changes in the update.
    parts_to_log = {name: value.detach().clone() for name, value in values.items() if name != "loss"}
    return total, {"loss": total.detach(), **parts_to_log}


def values_to_log(outputs: Any) -> dict[str, Any]:
    """Return the values to log from a training step, perhaps the model's own.

    Tensors are copied: a parameter, a buffer or an output of a CUDA graph is written again in the next step, and all of
    them are read much later.
    """
    if outputs is None:
        return {}
    if type(outputs) is not dict and not isinstance(outputs, Mapping):
        raise TypeError(
            "`train_step` must return a dict of values to log, as in {'loss': loss.detach()}, or None, but returned a "
            f"{type(outputs).__name__}"
        )
    values: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            values[name] = value.detach().clone()
        elif isinstance(value, int | float | Real):
            values[name] = value if isinstance(value, int | float) else float(value)  # of numpy
        else:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(
                f"`train_step` must return numbers and scalar tensors to log, but returned {what} as {name!r}"
            )
    return values


def lacks_labels(core: nn.Module, batch: Any) -> str:
    """Say in words that a batch lacks the labels by which a model computes its loss; empty if that can't be known."""
    if not isinstance(batch, Mapping) or "labels" in batch or "labels" not in parameters_of(type(core).forward):
        return ""
    return (
        f"`forward` of {type(core).__name__} computes a loss only of `labels`, but the batch has only "
        f"{', '.join(map(str, batch))}. Let the dataset, or the loader's collate_fn, make `labels`"
    )


def _scalar(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must be a scalar, but has shape {tuple(loss.shape)}. "
            "Reduce it in the model, for example with .mean(); or, if these are outputs, give the Runner a `loss`, or "
            "compute one in your loop"
        )
    return loss.reshape(()) if loss.dim() else loss


def _mean(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.dim() and not value.is_floating_point():
            raise TypeError(
                f"`losses[{name!r}]` must be of numbers to average, but is {value.dtype}. Leave it out: "
                "in training, return only what is to be logged (self.training tells)"
            )
        return value.mean() if value.dim() else value
    if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value):
        means: list[Tensor] = [item.mean() for item in value]
        return sum(means[1:], start=means[0])
    raise TypeError(f"`losses[{name!r}]` must be a tensor or a list of tensors, but is {_describe(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {[type(item).__name__ for item in value]}"
    return f"{value!r} of type {type(value).__name__}"


def _misfit(core: nn.Module, args: Sequence[Any], named: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the error message for a batch that the `forward` of `core` does not accept; None if it does."""
    signature = inspect.signature(type(core).forward)
    try:
        signature.bind(core, *args, **named, **kwargs)
    except TypeError as error:
        places = "1 entry" if len(args) == 1 else f"{len(args)} entries"
        given = f"the keys {', '.join(map(str, named))}" if named else places
        return (
            f"`forward` of {type(core).__name__} must take the batch, which has {given}, but its parameters are "
            f"{signature}: {error}. A tuple is passed by position, a dict by its keys. A model trains in one of three "
            "forms: `forward` takes the whole batch and returns the loss; `forward` takes the inputs, and the Runner "
            "is given loss=..., such as nn.CrossEntropyLoss(); or the model has a train_step(data, optim_wrapper) of "
            "its own"
        )
    return None


@cache
def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's `forward`, by name."""
    return inspect.signature(forward).parameters


def takes_mode(forward: Callable[..., Any]) -> bool:
    """Return whether a model's `forward` has a parameter that says whether to compute losses or to predict."""
    return "mode" in parameters_of(forward)
