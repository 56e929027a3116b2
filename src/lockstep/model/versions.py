"""Which tensors have been written: what torch counts of each tensor, compared at two moments."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.model.shards import is_dtensor, own_shard


class TensorVersions:
    """The versions of named tensors, such as parameters, at a moment.

    A write in place raises a tensor's version, and `tensor.data = other` changes its address. A write in place through
    `tensor.data` or `tensor.detach().numpy()` changes neither, and is not seen.

    Args:
        named: the tensors, such as `module.named_parameters()`. Of a DTensor, a write to this rank's shard counts,
            too.

    **Cost**: about half a microsecond per tensor and comparison. Nothing is read from a device.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._named = list(named)
        self._seen: list[tuple[int, ...]] = []
        self.record()

    def record(self) -> None:
        """Take the present versions as those to compare with."""
        self._seen = [_version(tensor) for _, tensor in self._named]

    def written(self) -> list[str]:
        """Return the names of the tensors that have been written since the last `record`."""
        return [name for (name, tensor), seen in zip(self._named, self._seen, strict=True) if _version(tensor) != seen]


def _version(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_inference():  # has no version
        return (tensor.data_ptr(),)
    if not is_dtensor(tensor):
        return tensor._version, tensor.data_ptr()
    with torch.no_grad():
        return tensor._version, *_version(own_shard(tensor))
