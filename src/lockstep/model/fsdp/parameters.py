"""What FSDP does to a model's parameters: they get values, and are replaced by shards; those of dimension 0 stay."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.dist import all_reduce, get_rank
from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model.autograd_graph import after_backward, backward_pass, never_compiled, on_backward
from lockstep.model.fsdp.units import sites_by_unit
from lockstep.model.parts import Site, broadcast_from_first, owners_of_parameters, parameter_at
from lockstep.tree import tree_leaves

_logger = logging.getLogger("lockstep.model.fsdp")
InitFunction: TypeAlias = Callable[[nn.Module], None]


class Materializer:
    """Gives the parts of a model their values, on their device, just before each is sharded.

    So values are sent from device to device, and only one part at a time is whole there.

    Args:
        device: the device on which the model is to be.
        init: called with each module that owns tensors on the meta device; must put those on `device`. By default they
            are allocated, and `reset_parameters` is called.
        mesh: the ranks that start with the values of its first rank; with None, each rank keeps its own values.
        ignored: modules of which every rank keeps its own values, with all modules inside them.
    """

    def __init__(
        self,
        device: torch.device,
        init: InitFunction | None,
        mesh: DeviceMesh | None,
        ignored: Collection[nn.Module] = (),
    ) -> None:
        self.device = torch.empty(0, device=device).device  # with its number: a model may be on that of another rank
        self._init = init
        self._mesh = mesh
        self._ignored = ignored
        self._has_warned = False
        # What is not sharded, and has been sent: the unit around belongs to it, too, and comes later.
        self._sent: set[Tensor] = set()
        self._moved: dict[Tensor, Tensor] = {}  # for each buffer, which modules may share, its copy on the device

    def ignored_tensors(self) -> set[Tensor]:
        """Return the tensors of ignored modules, as they are now: to materialize or to move one may replace it."""
        return {tensor for part in self._ignored for _, tensor in _named_tensors(part)}

    def materialize(self, unit: nn.Module) -> None:
        """Give values to a part of the model, except to parameters that are sharded already.

        **Collective**: every rank of the mesh, where there is one.

        Raises:
            ValueError: a module has no `reset_parameters`, or a tensor is still on the meta device.
        """
        self._fill_meta_tensors(unit)
        self._move_to_device(unit)
        if self._mesh is not None:
            left_out = self.ignored_tensors() | self._sent
            tensors = [
                tensor.detach()
                for tensor in chain(unit.parameters(), unit.buffers())
                if not isinstance(tensor, DTensor) and tensor not in left_out
            ]
            self._sent.update(unit.buffers(), (own for own in unit.parameters() if own.dim() == 0))
            # Along the next axis, ranks send what they have got along the first.
            broadcast_from_first(tensors, *self._mesh.get_all_groups())

    @torch.no_grad()
    def _fill_meta_tensors(self, unit: nn.Module) -> None:
        waiting = [module for module in unit.modules() if any(tensor.is_meta for _, tensor in _named_tensors(module))]
        if not waiting:
            return
        owners = owners_of_parameters(unit)
        buffers = [(module, *named) for module in waiting for named in module.named_buffers(recurse=False)]
        if self._init is None:
            self._warn_of_init_weights(unit)
        for module in waiting:
            if self._init is None:
                _reset(module, self.device)
            else:
                self._init(module)
        for (first_owner, first_name), *others in owners.values():
            for owner, name in others:
                setattr(owner, name, getattr(first_owner, first_name))
        for module, name, buffer in buffers:
            if buffer.is_meta:
                setattr(module, name, self._moved.setdefault(buffer, getattr(module, name)))
        for name, tensor in chain(unit.named_parameters(), unit.named_buffers()):
            if tensor.is_meta:
                raise ValueError(
                    f"`param_init_fn` must put every parameter and buffer of a module on {self.device}, but {name!r} "
                    f"of {type(unit).__name__} is still on the meta device. Begin it with "
                    "module.to_empty(device=..., recurse=False), and then give values"
                )

    def _warn_of_init_weights(self, unit: nn.Module) -> None:
        """Warn once of an `init_weights`, which is called for whole models only, that are not on the meta device."""
        own = next((part for part in unit.modules() if callable(getattr(part, "init_weights", None))), None)
        if own is not None and not self._has_warned and get_rank() == 0:
            self._has_warned = True
            _logger.warning(
                "`reset_parameters` of each module has filled the model, which was on the meta device, and not "
                "`init_weights` of %s, because the model is never whole. Unless weights are loaded, give the strategy "
                "`param_init_fn`, a function that is called with each module",
                type(own).__name__,
            )

    @torch.no_grad()
    def _move_to_device(self, unit: nn.Module) -> None:
        for parameter, owners in owners_of_parameters(unit).items():
            if isinstance(parameter, DTensor) or parameter.device == self.device:
                continue
            value = parameter.data.to(self.device)
            try:
                parameter.data = value
            except RuntimeError:  # devices of plug-ins do not allow it (2.13)
                moved = nn.Parameter(value, parameter.requires_grad)
                vars(moved).update(vars(parameter))
                for owner, name in owners:
                    setattr(owner, name, moved)
        for module in unit.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if not isinstance(buffer, DTensor) and buffer.device != self.device:
                    if buffer not in self._moved:
                        self._moved[buffer] = buffer.to(self.device)
                    setattr(module, name, self._moved[buffer])


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise _lacks_values(module, "has no method reset_parameters")
    given = {name: tensor.detach() for name, tensor in _named_tensors(module) if not tensor.is_meta}
    module.to_empty(device=device, recurse=False)
    empty = {name: tensor for name, tensor in _named_tensors(module) if name not in given and tensor.numel()}
    for tensor in empty.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)  # so that it shows if nothing writes it
    versions = {name: tensor._version for name, tensor in empty.items()}
    reset()
    for name, tensor in _named_tensors(module):
        if name in given:
            tensor.copy_(given[name])
        elif tensor is empty.get(name) and tensor._version == versions[name] and not _is_written(tensor):
            raise _lacks_values(module, f"its reset_parameters gives no values to {name!r}")


def _is_written(tensor: Tensor) -> bool:
    """Return whether a tensor that was NaN has been written through `.data`, which leaves its version as it is."""
    return tensor.is_floating_point() and not tensor.isnan().all()


def _lacks_values(module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"`param_init_fn` must be given, because {type(module).__name__} is on the meta device and {why}. It is called "
        "with each module that has tensors there, allocates its own by module.to_empty(device=..., recurse=False), and "
        "must then give them values, as by nn.init.normal_, or by model._init_weights(module) of transformers"
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


# Attributes and methods that give the same for the shard and the original.
_UNCHANGED = frozenset(
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
            # FSDP sets a shard's gradient itself, so that hooks do not run here; but `register_hook` adds to them.
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
        vars(parameter).update(self._attributes | vars(parameter))


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
        """Raise an error, unless the function only reads an attribute that has not changed."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # an attribute, whose descriptor has the name
            changes, name = name == "__set__", getattr(func.__self__, "__name__", name)
        else:
            changes = False
        if name in _UNCHANGED and not changes:
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


class ReplicatedParameters:
    """Averages the gradients of parameters of dimension 0, which are not sharded, at the end of each backward pass.

    A gradient that only some ranks have counts as zero on the others; one that no rank has stays None. After a pass in
    `at_the_end`, every rank averages when its pass is complete. A pass elsewhere is noticed by its gradients, at a
    moment that depends on the graph: there all ranks must use the parameters alike.

    Args:
        module: the model that contains the parameters.
        parameters: those of dimension 0, the same on every rank.
        mesh: the ranks over which gradients are averaged.
        is_due: returns whether the present backward pass averages gradients at its end.

    **Collective**: every rank of the mesh, in each backward pass that is due. **Cost**: one all_reduce, of two
    numbers for each parameter, for each dtype and each axis of the mesh.
    """

    def __init__(
        self, module: nn.Module, parameters: list[nn.Parameter], mesh: DeviceMesh, is_due: Callable[[], bool]
    ) -> None:
        self.parameters = parameters
        self._groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self._ranks = mesh.size()
        self._is_due = is_due
        self._queued_in = -1
        self._is_awaited = False  # inside `at_the_end`
        if not parameters or not self._groups:
            return
        # If the loss depends on none of the parameters, only the model's output shows that a backward pass has begun.
        # If a part is called without the whole model, only the parameters do.
        on_backward(module, self._queue)
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._queue)  # type: ignore[no-untyped-call]

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Run a backward pass inside, and average at its end, whatever it has reached on this rank.

        **Collective**: every rank of the mesh.
        """
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False
        if self._groups:
            self._average()

    def _queue(self, _: Tensor) -> None:
        """Average at the end of the backward pass that runs, once; for a hook, which gets a gradient."""
        number = backward_pass()
        if not self._is_awaited and self._queued_in != number:
            self._queued_in = number
            after_backward(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        if not self._is_due():
            return
        of_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in filter(lambda own: own.requires_grad, self.parameters):
            of_dtype.setdefault(torch.promote_types(parameter.dtype, torch.float32), []).append(parameter)
        for dtype, parameters in of_dtype.items():
            # Made on the device: a copy from the host would wait for it.
            zero, one = (make((), dtype=dtype, device=parameters[0].device) for make in (torch.zeros, torch.ones))
            gradients = [parameter.grad for parameter in parameters]
            rows = [torch.stack([zero, zero] if own is None else [own.to(dtype), one]) for own in gradients]
            total = torch.stack(rows)
            for group in self._groups:
                all_reduce(total, group=group)
            # Reading the counts waits for the device, and is not needed if this rank has all gradients.
            lacks_one = any(own is None for own in gradients)
            has_any = (total[:, 1] != 0).tolist() if lacks_one else [True] * len(parameters)
            for parameter, average, is_there in zip(parameters, total[:, 0] / self._ranks, has_any, strict=True):
                if is_there:
                    parameter.grad = average.to(parameter.dtype)
