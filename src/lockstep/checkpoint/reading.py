"""Reading a part of a checkpoint in one process, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lockstep.checkpoint.loading import Stored, open_checkpoint
from lockstep.checkpoint.manifest import StoredTensor
from lockstep.checkpoint.values import leaves, tagged
from lockstep.location import Location


def read_infos(directory: Location, part: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the tensors that a checkpoint has under `part`, by name; other values are left out.

    Raises:
        ConfigError: the directory is not a checkpoint, or is damaged.
    """
    stored = open_checkpoint(directory)
    return {name: (one.shape, getattr(torch, one.dtype)) for name, one in _tensors_of(stored, part).items()}


def read_tensors(directory: Location, part: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that a checkpoint has under `part`, whole and in CPU memory, in the order of `names`.

    No collective: each process reads what it asks for.

    **Cost**: memory for one of them, and for a block of 16 MiB.

    Raises:
        ConfigError: the directory is not a checkpoint, or is damaged.
        KeyError: it has no tensor of that name.
    """
    stored = open_checkpoint(directory)
    try:
        tensors = _tensors_of(stored, part)
        for name in names:
            one = tensors[name]
            whole = torch.empty(one.shape, dtype=getattr(torch, one.dtype))
            for chunk in one.chunks:
                target = whole
                for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                    target = target.narrow(dim, offset, length)
                if target.numel():
                    stored.read(chunk, one.dtype, (0,) * len(chunk.shape), target)
            yield name, whole
    finally:
        stored.close()


def _tensors_of(stored: Stored, part: str) -> dict[str, StoredTensor]:
    """Return the tensors under a part of the state, by their names there."""
    nodes = ((path, tagged(node)) for path, node in leaves(stored.state.get(part, {})))
    return {".".join(path): stored.tensors[name] for path, (tag, name) in nodes if tag == "$tensor"}
