"""Reading a part of a checkpoint in one process, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.directory import _check_files, _failures_as, _read_index
from lockstep.errors import ConfigError

_AT_ONCE = 64 * 2**20


def read_infos(directory: Path, part: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the tensors that a checkpoint has under `part`, by name; other values are left out.

    Raises:
        ConfigError: the directory is not a checkpoint.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    prefix = f"{part}."
    return {
        name.removeprefix(prefix): (tuple(entry.size), entry.properties.dtype)
        for name, entry in _read_index(directory).state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(directory: Path, part: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that a checkpoint has under `part`, whole and in CPU memory, in the order of `names`.

    No collective: each process reads what it asks for.

    **Cost**: memory for 64 MiB of them, or for one that is larger.

    Raises:
        ConfigError: the directory is not a checkpoint, is damaged, or has no tensor of that name.
    """
    infos = read_infos(directory, part)
    _check_files(directory, _read_index(directory))
    waiting: dict[str, Tensor] = {}
    size = 0
    for name in names:
        shape, dtype = infos[name]
        waiting[name] = torch.empty(shape, dtype=dtype)
        size += prod(shape) * dtype.itemsize
        if size >= _AT_ONCE:
            yield from _filled(directory, part, waiting)
            size = 0
    yield from _filled(directory, part, waiting)


def _filled(directory: Path, part: str, waiting: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    import torch.distributed.checkpoint as dcp

    if waiting:
        with _failures_as(ConfigError, f"the checkpoint {directory} cannot be read"):
            dcp.load({part: dict(waiting)}, checkpoint_id=directory, no_dist=True)
    while waiting:
        name = next(iter(waiting))
        yield name, waiting.pop(name)
