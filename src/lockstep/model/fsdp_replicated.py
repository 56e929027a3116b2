"""Parameters of dimension 0, which FSDP can't shard: they are whole on every rank, and their gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist import all_reduce
from lockstep.model.autograd_graph import after_backward, backward_pass, on_backward


class ReplicatedParameters:
    """Averages the gradients of whole parameters at the end of each backward pass.

    A gradient that only some ranks have counts as zero on the others; one that no rank has stays None.

    Args:
        module: the model that contains the parameters.
        parameters: the parameters, the same on every rank.
        mesh: the ranks over which gradients are averaged.
        is_due: returns whether the present backward pass averages gradients at its end.

    **Collective**: every rank of the mesh, in each backward pass that is due. **Cost**: an all_reduce of two numbers
    for each parameter.
    """

    def __init__(
        self, module: nn.Module, parameters: list[nn.Parameter], mesh: DeviceMesh, is_due: Callable[[], bool]
    ) -> None:
        self.parameters = parameters
        self._groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self._ranks = mesh.size()
        self._is_due = is_due
        self._queued_in = -1
        if not parameters or not self._groups:
            return
        # If the loss depends on none of the parameters, only the model's output shows that a backward pass has begun.
        # If a part is called without the whole model, only the parameters do.
        on_backward(module, self._queue)
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._queue)  # type: ignore[no-untyped-call]

    def _queue(self, _: Tensor) -> None:
        number = backward_pass()
        if self._queued_in != number:
            self._queued_in = number
            after_backward(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        if not self._is_due():
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for (dtype, device), alike in by_kind.items():
            zero = torch.zeros((), dtype=dtype, device=device)
            gradients = [zero if parameter.grad is None else parameter.grad for parameter in alike]
            own = [parameter.grad is not None for parameter in alike]
            precise = torch.promote_types(dtype, torch.float32)
            # Made on the device: a copy from the host would wait for it.
            none, one = (make((), dtype=precise, device=device) for make in (torch.zeros, torch.ones))
            counts = torch.stack([one if has_one else none for has_one in own])
            sums = torch.stack([torch.stack(gradients).to(precise), counts])
            for group in self._groups:
                all_reduce(sums, group=group)
            means = (sums[0] / self._ranks).to(dtype)
            anywhere = own if all(own) else (sums[1] != 0).tolist()  # waits for the device, where a gradient is missing
            for parameter, mean, has_one in zip(alike, means, anywhere, strict=True):
                if has_one:
                    parameter.grad = mean.clone()
