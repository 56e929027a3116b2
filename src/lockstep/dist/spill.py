"""Results that go over a shared disk, for parts that fill the memory: written and read a chunk at a time."""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

from lockstep.dist.agreement import together
from lockstep.dist.groups import Group
from lockstep.dist.parcels import spread_object
from lockstep.dist.pickling import Pickled, dump, load
from lockstep.dist.slots import bytes_of

Part: TypeAlias = tuple[list[Any], list[int] | None]

_CHUNK = 256  # results held in pickled form at a time
_HEAD = struct.Struct("<3q")  # bytes of the pickle, number of segments, of which tensors'


def collect_on_disk(part: Part, tmpdir: Path, here: Group) -> list[Part] | None:
    """Return all ranks' parts on rank 0, None elsewhere, through files below rank 0's `tmpdir`.

    **Collective**: every rank. **Raises**: on every rank where one can't write or pickle, or rank 0 can't read;
    PeerError on those that could.
    """
    folder: Path | None = None
    try:
        with together(here):
            if here.rank == 0:
                tmpdir.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(prefix="lockstep-results-", dir=tmpdir.resolve()))
        shared = Path(spread_object(str(folder), 0, here))
        with together(here):
            if here.rank != 0:
                _write(part, shared / str(here.rank), here)
        parts: list[Part] | None = None
        with together(here):
            if here.rank == 0:
                parts = [part, *(_read(shared / str(rank), here) for rank in range(1, here.size))]
        return parts
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _write(part: Part, path: Path, here: Group) -> None:
    _require_shared(path.parent, "the folder made by rank 0", here)
    results, indices = part
    with path.open("wb") as file:
        _write_one(indices, file, here)
        for first in range(0, len(results), _CHUNK):
            _write_one(results[first : first + _CHUNK], file, here)


def _read(path: Path, here: Group) -> Part:
    _require_shared(path, f"the file of rank {path.name}", here)
    with path.open("rb") as file:
        indices, *chunks = _read_each(file)
    return [result for chunk in chunks for result in chunk], indices


def _require_shared(path: Path, what: str, here: Group) -> None:
    if not path.exists():
        raise FileNotFoundError(
            f"`tmpdir` must be a folder that all ranks share, but {what} is not at {path} ({here.here}). "
            "Leave `tmpdir` out to collect in memory"
        )


def _write_one(obj: object, file: BinaryIO, here: Group) -> None:
    pickled = dump(obj, here)
    sizes = [segment.numel() for segment in pickled.segments]
    file.write(_HEAD.pack(len(pickled.body), len(sizes), pickled.num_tensors))
    file.write(struct.pack(f"<{len(sizes)}q", *sizes))
    file.write(pickled.body)
    for segment in pickled.segments:
        file.write(bytes_of(segment.cpu()))


def _read_each(file: BinaryIO) -> Iterator[Any]:
    while head := file.read(_HEAD.size):
        body_bytes, num_segments, num_tensors = _HEAD.unpack(head)
        sizes = struct.unpack(f"<{num_segments}q", file.read(8 * num_segments))
        body = file.read(body_bytes)
        segments = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        for segment in segments:
            file.readinto(bytes_of(segment))  # type: ignore[attr-defined]  # every buffered file has it
        yield load(Pickled(body, segments, num_tensors))
