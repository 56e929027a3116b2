"""Sharded tensors and models, told without importing DTensor and FSDP: that takes half as long as importing torch."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a `DTensor`."""
    return hasattr(tensor, "device_mesh")


def own_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory, or the tensor itself if it is not sharded."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def reshard(model: nn.Module) -> None:
    """Free the full parameters of all units of FSDP, so that the parameters of `model` are the shards. Nothing is sent.

    The outermost unit keeps its parameters in full after a forward pass. An optimizer that is then built would hold
    tensors that are about to be freed.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # so nothing is sharded
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
