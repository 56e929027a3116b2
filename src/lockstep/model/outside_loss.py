"""A loss outside of the model: which part of a batch the model gets, and which part the loss gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.device import get_device
from lockstep.errors import ConfigError, wrong_type
from lockstep.groups import this_rank
from lockstep.model import steps
from lockstep.tree import is_tensordict

TARGETS = ("labels", "label", "targets", "target", "gt_label", "y")
"""The keys of a batch that may hold the targets; the first key present is used."""
_BATCHES = ("batch", "data_batch", "data")
_KEY = "_lockstep_outside_loss"


class OutsideLoss:
    """A loss function of a module's outputs, for a module that does not return a loss itself.

    For a batch `(x, y)` the module gets `x`, and the loss gets `(outputs, y)`. In a longer batch the last entry is the
    target; in a dict, the entry under the first key of `TARGETS` that is present. A batch that is one tensor is its own
    target. A function whose second parameter is called `batch`, `data_batch` or `data` gets the whole batch instead of
    the target, and the outputs as they are; of a dict, the model then gets the targets, too, if its `forward` takes
    them. If the outputs have `logits`, as in HuggingFace's models, a loss that gets targets gets these logits.

    Args:
        function: takes the outputs and the targets, or the outputs and the batch; returns a scalar, or a dict as for
            `parse_losses`. A module is moved to the device of this process.

    Attributes:
        predicted: the loss of the last predicted batch, detached.
        needs_targets: whether `predictions` computes the loss and pairs outputs with targets; else there may be none.

    Raises:
        TypeError: `function` can't be called with two arguments, or is a class.
        ConfigError: it has parameters, which no optimizer would train.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        if not callable(function):
            raise wrong_type("loss", "a function or a module", function)
        if isinstance(function, type):
            name = function.__name__
            raise TypeError(f"`loss` must be a function or a module, but is the class {name}. Call it: loss={name}()")
        names = _parameters(function)
        self.name = f"{getattr(function, '__name__', type(function).__name__)}({', '.join(names)})"
        if not _takes(function, None, None):
            raise TypeError(f"`loss` must take (outputs, targets) or (outputs, batch), but is {self.name}")
        if isinstance(function, nn.Module):
            if learned := [name for name, _ in function.named_parameters()]:
                raise ConfigError(
                    f"`loss` must have no parameters, but {type(function).__name__} has {', '.join(learned)}. Make it "
                    "a part of the model, whose `forward` then returns the loss"
                )
            function = function.to(get_device())
        self.function = function
        self.gets_batch = len(names) > 1 and names[1] in _BATCHES
        self.predicted: Tensor | None = None
        self.needs_targets = True

    def attach(self, core: nn.Module) -> None:
        """Make the training steps and predictions of `core` use this loss.

        Raises:
            ConfigError: `core` defines its own steps.
        """
        own = [name for name in ("train_step", "val_step", "test_step") if steps.defines_step(core, name)]
        if own:
            raise ConfigError(
                f"`loss` must be None for a model with steps of its own, which compute the loss, but "
                f"{type(core).__name__} has {', '.join(own)}. Leave out `loss`, or the steps"
            )
        vars(core)[_KEY] = self

    def losses(self, model: nn.Module, core: nn.Module, batch: Any) -> Any:
        """Return the losses that `function` computes for a batch."""
        inputs, target = self._split(core, batch)
        return self._computed(self._outputs(model, core, inputs), target)

    def predictions(self, core: nn.Module, batch: Any) -> Any:
        """Return the outputs for a batch, paired with the targets unless the loss gets the whole batch."""
        inputs, target = self._split(core, batch)
        outputs = self._outputs(core, core, inputs)
        if not self.needs_targets:
            return outputs
        self.predicted = steps.parse_losses(self._computed(outputs, target))[0].detach()
        return outputs if self.gets_batch else (outputs, target)

    def _computed(self, outputs: Any, target: Any) -> Any:
        """Call `function`, and let errors name it: the model is not at fault."""
        try:
            losses = self.function(outputs, target)
        except Exception as error:
            second = "the batch" if self.gets_batch else "the targets"
            remedy = "" if self.gets_batch else ". A function gets the whole batch if its second parameter is `batch`"
            error.add_note(
                f"in the `loss` given to the Runner, {self.name}, whose arguments were the outputs, a "
                f"{type(outputs).__name__}, and {second}, a {type(target).__name__}{remedy}"
            )
            raise
        shape = tuple(losses.shape) if isinstance(losses, Tensor) and losses.numel() != 1 else None
        if shape is not None or not (isinstance(losses, Tensor | Mapping) or hasattr(losses, "loss")):
            what = f"a tensor of shape {shape}" if shape is not None else f"a {type(losses).__name__}"
            raise TypeError(
                f"`loss` must return a scalar, or a dict of tensors, but {self.name} returned {what} ({this_rank()})"
            )
        return losses

    def _outputs(self, model: nn.Module, core: nn.Module, inputs: Any) -> Any:
        outputs = steps.call_forward(model, core, inputs, "tensor")
        return outputs if self.gets_batch else getattr(outputs, "logits", outputs)

    def _split(self, core: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return what the module gets, and what the loss gets in addition to the outputs."""
        inputs, target = batch, batch
        if isinstance(batch, Mapping):
            key = self._target_key(batch)
            target = None if key is None else batch[key]
            inputs = batch if is_tensordict(batch) else self._named_inputs(core, batch, key)
        elif isinstance(batch, list | tuple) and batch:
            inputs, target = batch[:-1] or batch, batch[-1]
            if not self.needs_targets and not _takes(core, *inputs):  # the batch is without targets
                inputs = batch
        return inputs, batch if self.gets_batch else target

    def _target_key(self, batch: Mapping[str, Any]) -> str | None:
        key = next((name for name in TARGETS if name in batch), None)
        if key is None and not self.gets_batch and self.needs_targets:
            raise ConfigError(
                f"`loss` must find its targets under one of the keys {', '.join(TARGETS)}, but the batch has "
                f"{', '.join(map(str, batch.keys()))}. Rename one, or give a function loss(outputs, batch)"
            )
        return key

    def _named_inputs(self, core: nn.Module, batch: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        takes = inspect.signature(core.forward).parameters.values()
        takes_others = any(each.kind is each.VAR_KEYWORD for each in takes)
        named = {each.name for each in takes}
        left_out = None if self.gets_batch else key
        kept = {name: value for name, value in batch.items() if name != left_out and (takes_others or name in named)}
        if not kept:
            raise TypeError(
                f"`forward` of {type(core).__name__} must take the batch by its keys, but the batch has the keys "
                f"{', '.join(map(str, batch))}, and its parameters are ({', '.join(named)}) ({this_rank()}). Rename "
                "one or the other, or let the dataset return tuples (inputs, targets), which are passed by position"
            )
        return kept


def outside_loss(core: nn.Module) -> OutsideLoss | None:
    """Return the loss that was attached to a module, if one was."""
    found: OutsideLoss | None = vars(core).get(_KEY)
    return found


def losses_of(model: nn.Module, core: nn.Module, batch: Any) -> Any:
    """Return the losses of a preprocessed batch, from the attached loss or from the module itself."""
    outside = outside_loss(core)
    return steps.call_forward(model, core, batch, "loss") if outside is None else outside.losses(model, core, batch)


def predictions_of(core: nn.Module, batch: Any) -> Any:
    """Return what a module predicts for a preprocessed batch."""
    outside = outside_loss(core)
    return steps.call_forward(core, core, batch, "predict") if outside is None else outside.predictions(core, batch)


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a function, or a module's `forward`, can be called with these arguments, as far as is known."""
    try:
        inspect.signature(getattr(function, "forward", function)).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters; an empty list if they are not known."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
