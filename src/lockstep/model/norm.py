"""BatchNorm over the samples of all ranks, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.dist import all_reduce, get_world_size


class BatchNormXd(_BatchNorm):
    """BatchNorm over inputs of any number of dims: what a `SyncBatchNorm` becomes, which does not tell what it was.

    **Shapes**: [samples, features, ...] -> the same.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"`input` must have the shape [samples, features, ...], but has {tuple(input.shape)}")


class SyncBatchNorm(nn.SyncBatchNorm):
    """Torch's `SyncBatchNorm`, which also trains on the CPU, where torch's has no kernel.

    **Shapes**: [samples, features, ...] -> the same; ranks may have different numbers of samples.

    **Collective**: every rank of the group, in training. **Cost**: on the CPU two all_reduces of as many numbers as
    there are features in each forward pass, and two in the backward pass.

    **Source**: `torch.nn.SyncBatchNorm` (2.13), which raises for inputs on the CPU.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise over the samples of all ranks in training, else by the running statistics."""
        if input.device.type != "cpu":
            return super().forward(input)
        if not self.training or get_world_size(self.process_group) == 1:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        return self._normalised(input.float() if input.dtype in (torch.float16, torch.bfloat16) else input).to(
            input.dtype
        )

    def _normalised(self, values: Tensor) -> Tensor:
        dims, shape = [0, *range(2, values.dim())], [1, -1] + [1] * (values.dim() - 2)
        count = values.new_tensor([values.numel() // self.num_features])
        sums = all_reduce(torch.cat([values.sum(dims), count]), group=self.process_group, sync_grads=True)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centered = values - mean.view(shape)
        # In two passes, which rounds less than a mean of squares does.
        variance = all_reduce(centered.square().sum(dims), group=self.process_group, sync_grads=True) / count
        self._follow(mean.detach(), variance.detach(), count)
        normalised = centered * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normalised = normalised * self.weight.view(shape)
        return normalised if self.bias is None else normalised + self.bias.view(shape)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Let the running statistics follow those of a batch."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum or 0.0)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum or 0.0)


def convert_sync_batchnorm(module: nn.Module, implementation: str = "torch") -> nn.Module:
    """Return `module` with every BatchNorm replaced by one that normalises over the samples of all ranks.

    The module is changed in place, unless it is a BatchNorm itself; parameters and buffers stay the same tensors.
    In evaluation they do what BatchNorm does.

    Args:
        module: not wrapped yet.
        implementation: `"torch"`, the only one.

    **Cost**: in training, one small all_gather per layer in each forward pass, and one all_reduce in the backward
    pass; on the CPU see `SyncBatchNorm`.

    **Source**: `torch.nn.SyncBatchNorm.convert_sync_batchnorm` (2.13), whose layers do not train on the CPU; those of
    `SyncBatchNorm` do.
    """
    if implementation != "torch":
        raise ValueError(f"`implementation` must be 'torch', but is {implementation!r}")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    for part in converted.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = SyncBatchNorm  # torch's conversion makes its own class, of the same attributes
    return converted


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Return `module` with every `SyncBatchNorm` replaced by a BatchNorm that looks at this rank's samples alone.

    The module is changed in place, unless it is a `SyncBatchNorm` itself; parameters and buffers stay the same
    tensors, and layers that are shared stay shared.

    Args:
        module: not wrapped yet.
    """
    return _reverted(module, {})


def _reverted(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    done[module] = module
    if isinstance(module, nn.SyncBatchNorm):
        done[module] = _without_sync(module)
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, _reverted(child, done))
    return done[module]


def _without_sync(norm: nn.SyncBatchNorm) -> BatchNormXd:
    plain = BatchNormXd(
        norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=norm.track_running_stats
    )
    plain.affine = norm.affine
    plain.register_parameter("weight", norm.weight)
    plain.register_parameter("bias", norm.bias)
    for name, buffer in norm._buffers.items():
        plain._buffers[name] = buffer
    plain.train(norm.training)
    return plain
