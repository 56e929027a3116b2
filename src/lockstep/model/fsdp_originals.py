"""The parameters that FSDP replaces: what is attached to them moves on, and references that are left raise an error."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model.autograd_graph import never_compiled
from lockstep.model.fsdp_sites import Site, parameter_at, sites_by_unit
from lockstep.tree import tree_leaves

# What is the same for the shard and the original.
_HARMLESS = frozenset(
    {"device", "dim", "dtype", "is_floating_point", "ndim", "numel", "requires_grad", "shape", "size"}
)


class Originals:
    """The parameters of a module before it is sharded.

    FSDP computes with the shard, which the optimizer updates, and with the gathered parameter in forward passes. It no
    longer uses the original parameter, so that what the user has attached to it would be lost without an error:

    - Hooks of `register_hook` move to the gathered parameter. As under DDP, they get this rank's own gradient in full,
      before it is averaged. Hooks of `register_post_accumulate_grad_hook` move to the shard, and are called when its
      gradient is averaged. Handles still remove them, and hooks that are registered on the shard work.
    - Attributes move to both.
    - References to the original, as in a list, another optimizer or the closure of a hook, raise a `ConfigError` that
      names the parameter when something is computed with them.

    Args:
        module: the module, before anything in it is replaced. Its parameters are not kept in memory.

    Raises:
        ConfigError: a parameter has a hook of `torch.autograd.graph.register_multi_grad_hook`, which can't be moved.

    **Source**: `torch._utils._rebuild_parameter` (2.13) gives hooks to a new parameter in this way; `foreach_reduce` of
    FSDP calls the post-accumulate hooks of a shard.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [
            (name, ref(parameter), _Attached(name, parameter)) for name, parameter in module.named_parameters()
        ]

    def hand_over(self, module: nn.Module) -> None:
        """Move what is attached to the sharded parameters, and mark the originals that something still refers to."""
        present = dict(module.named_parameters())
        moved: dict[Tensor, _Attached] = {}
        for name, original, attached in self._parameters:
            parameter, former = present[name], original()
            if parameter is former:
                continue
            moved[parameter] = attached
            attached.move_to(parameter)
            parameter._post_accumulate_grad_hooks = attached.hooks_after
            if former is not None:
                _mark_replaced(former, name)
        for unit, sites in sites_by_unit(module).items():
            _move_when_gathered(
                unit, {site: moved[parameter] for site in sites if (parameter := parameter_at(site)) in moved}
            )
        self._parameters.clear()


class _Attached:
    """What is attached to a parameter. The dicts of hooks stay the same, so that handles work.

    No public function gives out the hooks of a tensor.

    Attributes:
        hooks: those that run before a gradient is accumulated.
        hooks_after: those that run after it is.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.hooks: dict[int, Any] = parameter._backward_hooks or OrderedDict()
        self.hooks_after: dict[int, Any] = parameter._post_accumulate_grad_hooks or OrderedDict()
        self._attributes = vars(parameter)
        if any(
            "register_multi_grad_hook.<locals>" in getattr(hook, "__qualname__", "") for hook in self.hooks.values()
        ):
            raise ConfigError(
                f"`{name}` must have no hook of register_multi_grad_hook under FSDP, where gradients of several "
                f"parameters do not arrive in one place, but has one ({this_rank()}). Use register_hook on each "
                "parameter, or strategy 'ddp'"
            )

    def move_to(self, parameter: nn.Parameter) -> None:
        parameter._backward_hooks = self.hooks
        own = vars(parameter)
        own.update({name: value for name, value in self._attributes.items() if name not in own})


def _move_when_gathered(unit: nn.Module, attached: dict[Site, _Attached]) -> None:
    """Move what is attached to the gathered parameters of a unit, which exist from its first forward pass on."""

    def move(_: nn.Module, args: Any) -> None:
        handle.remove()
        for site, own in attached.items():
            own.move_to(parameter_at(site))

    handle = unit.register_forward_pre_hook(never_compiled(move))


class ReplacedParameter(nn.Parameter):
    """An original parameter that FSDP has replaced by a shard. To compute with it raises a `ConfigError`."""

    _replaced_name: str

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it was."""
        return f"<the former parameter `{self._replaced_name}`, which FSDP has replaced by a shard>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise an error, unless the function only asks for what has not changed."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property, which has the name
            changes, name = name == "__set__", getattr(func.__self__, "__name__", name)
        else:
            changes = False
        if name in _HARMLESS and not changes:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        replaced = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReplacedParameter))
        raise ConfigError(
            f"`{replaced._replaced_name}` must be looked up in the model whenever it is used under FSDP, which has "
            f"replaced it by a shard, but `{name}` was called on a reference to the former parameter, as a list or a "
            f"closure may hold ({this_rank()}). Take it from the model where it is used, as in "
            "model.get_parameter(name), or use strategy 'ddp'"
        )


def _mark_replaced(parameter: nn.Parameter, name: str) -> None:
    if type(parameter) is nn.Parameter:
        vars(parameter)["_replaced_name"] = name
        parameter.__class__ = ReplacedParameter
