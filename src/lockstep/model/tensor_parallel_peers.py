"""Under tensor parallelism, the check that ranks which compute together have the same loss and the same gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.dist import all_reduce
from lockstep.errors import ConfigError, listed
from lockstep.model.shards import gather_full
from lockstep.model.tensor_parallel import NEGLIGIBLE

# Gradients: kernels that add in any order, in half precision, stay below a tenth of this; parts of a sequence do not.
_SAME = 0.05
# Losses come from forward passes, which add in one order; at first even those over other classes are nearly alike.
_SAME_LOSS = 1e-4


class PeerCheck:
    """Compares what ranks that compute together must have alike, in the first backward pass that ends a window.

    That is the loss, and the gradient of each parameter that is whole on them. Parts of an output that are used as if
    they were all of it, a norm inside a part of the sequence that the plan does not name, or other samples on each of
    the ranks make them differ, and raise no error; nor does the trial of a plan see these.

    Args:
        model: the model, sharded.
        mesh: one axis, the ranks that compute together.
        axes: number of the axes over which the model is sharded, which come before that of `mesh`.

    **Collective**: every rank of the mesh. **Cost**: once, an all_reduce of the gradient of each such parameter, as
    large as this rank's shard, and two of a few numbers.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, axes: int) -> None:
        self._model, self._mesh, self._axes = model, mesh, axes
        self._is_due = mesh.size() > 1

    @torch.no_grad()
    def after_backward(self, loss: Tensor) -> None:
        """Compare, once.

        Raises:
            ConfigError: on every rank of the mesh, if the losses or the gradients differ.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._compare_losses(loss)
        self._compare_gradients()

    def _compare_losses(self, loss: Tensor) -> None:
        own = gather_full(loss.detach()).double().reshape(1)
        bounds = torch.cat([own, -own]).to(self._mesh.device_type)
        all_reduce(bounds, "max", self._mesh)
        greatest, negative = bounds.tolist()
        least = -negative
        if greatest - least > _SAME_LOSS * max(abs(greatest), abs(least)) + 1e-6:
            raise ConfigError(
                "ranks that compute together under `tensor_parallel` must have the same loss, but in the first step it "
                f"is {least:.6g} on one of {self._mesh.size()} and {greatest:.6g} on another. A layer split 'colwise' "
                "returns a part of its outputs on each rank: where they are used as all of them, as those of a head "
                "are by a loss, write 'colwise_rep'. Or these ranks have other samples, as from a loader that splits "
                "itself over all ranks, or other random numbers"
            )

    def _compare_gradients(self) -> None:
        names, differences, sizes = [], [], []
        for name, parameter in self._model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                if len(gradient.placements) > self._axes and not gradient.placements[-1].is_replicate():
                    continue
                gradient = gradient.to_local()
            device = gradient.device
            gradient = gradient.detach().to(self._mesh.device_type)
            mean = gradient.clone()
            all_reduce(mean, "mean", self._mesh)
            scale = max(1, mean.numel()) ** -0.5
            names.append(name)
            differences.append(scale * torch.linalg.vector_norm(gradient - mean).double().to(device))
            sizes.append(scale * torch.linalg.vector_norm(mean).double().to(device))
        if not names:
            return
        numbers = torch.stack([*differences, *sizes]).to(self._mesh.device_type)
        all_reduce(numbers, "max", self._mesh)
        found, usual = numbers.view(2, -1).tolist()
        floor = NEGLIGIBLE * max(usual)
        wrong = [name for name, each, size in zip(names, found, usual, strict=True) if each > _SAME * max(size, floor)]
        if wrong:
            raise ConfigError(
                "ranks that compute together under `tensor_parallel` must get the same gradients of what each of them "
                f"holds whole, but in the first step those of {listed(wrong, most=4)} differ. Each rank uses it for "
                "its own part of the sequence or of the outputs. Add its module to the plan, as 'sequence_parallel' "
                "for a norm between modules that return a part of the sequence, else as "
                "'replicated_with_grad_allreduce'"
            )
