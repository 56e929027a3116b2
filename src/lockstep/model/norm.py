"""BatchNorm over the samples of all ranks, and the conversion to and from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.device import get_device
from lockstep.dist import all_reduce, get_world_size

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class BatchNormXd(nn.BatchNorm1d):
    """BatchNorm for any number of dims, which replaces a `SyncBatchNorm` whose original class is not known.

    **Shapes**: [samples, features, ...] -> the same.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"`input` must have the shape [samples, features, ...], but has {tuple(input.shape)}")


class CpuSyncBatchNorm(BatchNormXd):
    """BatchNorm over the samples of all ranks on the CPU, where torch's `SyncBatchNorm` has no kernel.

    **Shapes**: [samples, features, ...] -> the same; ranks may have different numbers of samples.

    **Collective**: every rank of the default group, in training. **Cost**: two all_reduces of as many numbers as there
    are features in each forward pass, and two in the backward pass.

    **Source**: `torch.nn.SyncBatchNorm` (2.13), which raises for inputs on the CPU.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise over the samples of all ranks in training, else by the running statistics."""
        if not self.training or get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        is_half = input.dtype in (torch.float16, torch.bfloat16)
        return self._normalised(input.float() if is_half else input).to(input.dtype)

    def _normalised(self, values: Tensor) -> Tensor:
        """Return the values, normalised over the samples of all ranks. **Collective**: every rank."""
        dims, shape = [0, *range(2, values.dim())], [1, -1] + [1] * (values.dim() - 2)
        count = values.new_tensor([values.numel() // self.num_features])
        sums = all_reduce(torch.cat([values.sum(dims), count]), sync_grads=True)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centered = values - mean.view(shape)
        # In two passes, which has a smaller rounding error than a mean of squares.
        variance = all_reduce(centered.square().sum(dims), sync_grads=True) / count
        self._update_running_stats(mean.detach(), variance.detach(), count)
        normalised = centered * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normalised = normalised * self.weight.view(shape)
        return normalised if self.bias is None else normalised + self.bias.view(shape)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics with those of a batch."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # torch's cumulative average
                momentum = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum or 0.0)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum or 0.0)


def convert_sync_batchnorm(module: nn.Module, implementation: str = "torch") -> nn.Module:
    """Return `module` with every BatchNorm replaced by one that normalises over the samples of all ranks.

    The module is changed in place, unless it is a BatchNorm itself; parameters and buffers stay the same tensors.
    In evaluation the new layers behave like BatchNorm.

    Args:
        module: the model, not wrapped yet.
        implementation: `"torch"`, the only one.

    **Cost**: in training, one small all_gather per layer in each forward pass, and one all_reduce in the backward
    pass; on the CPU see `CpuSyncBatchNorm`.

    **Source**: `torch.nn.SyncBatchNorm.convert_sync_batchnorm` (2.13), whose layers can't be trained on the CPU; there
    `CpuSyncBatchNorm` is used.
    """
    if implementation != "torch":
        raise ValueError(f"`implementation` must be 'torch', but is {implementation!r}")
    return _replace_layers(module, BATCH_NORMS, CpuSyncBatchNorm if get_device() == "cpu" else nn.SyncBatchNorm)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Return `module` with every synchronised BatchNorm replaced by one that uses only this rank's samples.

    The module is changed in place, unless it is such a BatchNorm itself; parameters and buffers stay the same tensors,
    and shared layers stay shared.

    Args:
        module: the model, not wrapped yet.
    """
    return _replace_layers(module, (nn.SyncBatchNorm, CpuSyncBatchNorm), BatchNormXd)


def sync_on_this_device(module: nn.Module) -> nn.Module:
    """Return `module`; without an accelerator, torch's `SyncBatchNorm`s are replaced by `CpuSyncBatchNorm`s."""
    return _replace_layers(module, nn.SyncBatchNorm, CpuSyncBatchNorm) if get_device() == "cpu" else module


def is_synced(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm over the samples of all ranks."""
    return isinstance(module, nn.SyncBatchNorm | CpuSyncBatchNorm)


def _replace_layers(
    module: nn.Module, kinds: type[nn.Module] | tuple[type[nn.Module], ...], new_kind: type[Any]
) -> nn.Module:
    """Return `module` with its layers of some kinds replaced; a shared layer gets one replacement."""
    done: dict[nn.Module, nn.Module] = {}

    def replaced(part: nn.Module) -> nn.Module:
        if part not in done:
            done[part] = _with_state_of(new_kind, part) if isinstance(part, kinds) else part
            for name, child in part._modules.items():  # `named_children` gives a shared layer once
                if child is not None:
                    setattr(part, name, replaced(child))
        return done[part]

    return replaced(module)


def _with_state_of(kind: type[Any], norm: Any) -> nn.Module:
    """Return a layer of another class with the options, parameters and buffers of a BatchNorm."""
    layer: nn.Module = kind(
        norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=norm.track_running_stats
    )
    layer.affine = norm.affine
    layer.register_parameter("weight", norm.weight)
    layer.register_parameter("bias", norm.bias)
    for name, buffer in norm.named_buffers(recurse=False):
        layer.register_buffer(name, buffer)
    return layer.train(norm.training)
