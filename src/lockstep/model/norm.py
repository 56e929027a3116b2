"""BatchNorm over the samples of all ranks, and back."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormXd(_BatchNorm):
    """BatchNorm over inputs of any number of dims: what a `SyncBatchNorm` becomes, which does not tell what it was.

    **Shapes**: [samples, features, ...] -> the same.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"`input` must have the shape [samples, features, ...], but has {tuple(input.shape)}")


def convert_sync_batchnorm(module: nn.Module, implementation: str = "torch") -> nn.Module:
    """Return `module` with every BatchNorm replaced by one that normalises over the samples of all ranks.

    The module is changed in place, unless it is a BatchNorm itself; parameters and buffers stay the same tensors.
    Training such layers needs an accelerator; in evaluation they do what BatchNorm does, anywhere.

    Args:
        module: not wrapped yet.
        implementation: `"torch"`, the only one.

    **Cost**: in training, one small all_gather per layer in each forward pass, and one all_reduce in the backward pass.

    **Source**: `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.
    """
    if implementation != "torch":
        raise ValueError(f"`implementation` must be 'torch', but is {implementation!r}")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return converted


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Return `module` with every `SyncBatchNorm` replaced by a BatchNorm that looks at this rank's samples alone.

    The module is changed in place, unless it is a `SyncBatchNorm` itself; parameters and buffers stay the same
    tensors, and layers that are shared stay shared. It can then be trained on a CPU.

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
