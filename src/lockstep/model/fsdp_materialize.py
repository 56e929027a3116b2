"""Materializing the parameters that FSDP shards, on each rank or from the first rank's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.dist import broadcast
from lockstep.model.parts import owners_of_parameters

InitFunction: TypeAlias = Callable[[nn.Module], None]


class Materializer:
    """Gives the parts of a model their values, on their device, just before each is sharded.

    So values are sent from device to device, and only one part at a time is whole there.

    Args:
        device: the device on which the model is to be.
        init: called with each module that owns tensors on the meta device; must put those on `device`. By default they
            are allocated, and `reset_parameters` is called.
        mesh: the ranks that start with the values of its first rank; with None, each rank keeps its own values.
    """

    def __init__(self, device: torch.device, init: InitFunction | None, mesh: DeviceMesh | None) -> None:
        self.device = device
        self._init = init
        self._mesh = mesh
        self._done: set[Tensor] = set()
        self._moved: dict[Tensor, Tensor] = {}

    def materialize(self, unit: nn.Module, ignored: Collection[Tensor]) -> None:
        """Give values to a part of the model, except to parameters that are sharded already.

        Args:
            unit: the part.
            ignored: tensors that every rank keeps as its own.

        **Collective**: every rank of the mesh, where there is one.

        Raises:
            ValueError: a module has no `reset_parameters`, or a tensor is still on the meta device.
        """
        self._make(unit)
        self._move(unit, ignored)
        if self._mesh is not None:
            tensors = [
                tensor.detach()
                for tensor in chain(unit.parameters(), unit.buffers())
                if not isinstance(tensor, DTensor) and tensor not in self._done and tensor not in ignored
            ]
            self._done.update(unit.buffers())
            broadcast_from_first(tensors, self._mesh)

    @torch.no_grad()
    def _make(self, unit: nn.Module) -> None:
        waiting = [module for module in unit.modules() if any(tensor.is_meta for tensor in _own_tensors(module))]
        if not waiting:
            return
        owners = owners_of_parameters(unit)
        for module in waiting:
            if self._init is None:
                _reset(module, self.device)
            else:
                self._init(module)
        for (first_owner, first_name), *others in owners.values():
            for owner, name in others:
                setattr(owner, name, getattr(first_owner, first_name))
        for name, tensor in chain(unit.named_parameters(), unit.named_buffers()):
            if tensor.is_meta:
                raise ValueError(
                    f"`param_init_fn` must put every parameter and buffer of a module on {self.device}, but {name!r} "
                    f"of {type(unit).__name__} is still on the meta device"
                )

    @torch.no_grad()
    def _move(self, unit: nn.Module, ignored: Collection[Tensor]) -> None:
        for parameter, owners in owners_of_parameters(unit).items():
            if isinstance(parameter, DTensor) or parameter in ignored or parameter.device.type == self.device.type:
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
                if isinstance(buffer, DTensor) or buffer in ignored:
                    continue
                if buffer.device.type != self.device.type:  # modules may share it
                    buffer = self._moved.setdefault(buffer, buffer.to(self.device))
                    setattr(module, name, buffer)


def broadcast_from_first(tensors: list[Tensor], mesh: DeviceMesh) -> None:
    """Overwrite tensors with those of the first rank of a mesh.

    **Collective**: every rank of the mesh.
    """
    # First along the first axis, then along the next, which starts from ranks that already have the values.
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        under_way = [broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
        for handle in under_way:
            assert handle is not None  # asked for by async_op
            handle.wait()


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"`param_init_fn` must be given, because {type(module).__name__} is on the meta device and has no "
            "method reset_parameters. For example: lambda module: module.to_empty(device=..., recurse=False)"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))
