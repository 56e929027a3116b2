"""The manifest of a checkpoint: what was saved, where each byte of it lies, and the digests of all of them.

```
{
  "format": 2,
  "written": {"time": 1795400380.2, "block": 16777216, "lockstep": "0.1.0", "torch": "2.13.0", "ranks": 2},
  "meta": {"epoch": 3, "iter": 120, ...},
  "state": {"model": {"weight": {"$tensor": "model.weight"}}, "optimizer": {...}, "ranks": {...}},
  "files": {"rank_0.safetensors": {"size": 4160, "header": 64, "crc32": "..."}},
  "tensors": {
    "model.weight": {"dtype": "float32", "shape": [32, 32], "chunks": [
      {"file": "rank_0.safetensors", "start": 64, "offsets": [0, 0], "shape": [32, 32], "crc32": ["..."]}]}
  },
  "sha256": "..."
}
```

A chunk is the part of a tensor that one rank has written. Its bytes are cut into blocks, and each block has a checksum,
so that a rank can verify what it reads of a chunk. A file is a header, with a checksum, and chunks without gaps. The
last member is the digest of all that stands before it. So every bit of a checkpoint is under a checksum or the digest.

What `state` and `meta` may hold is in `values.py`. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.files import DAMAGED, MANIFEST_FILE, read_plain_file
from lockstep.checkpoint.values import DESCRIPTION, check_encoded, check_form, require_plain_name, tagged
from lockstep.errors import CheckpointError
from lockstep.location import Location
from lockstep.masking import printable

OWN_FILES = re.compile(r"rank_\d+(\.\d+)?\.safetensors|manifest\.json")
"""Names of the files of checkpoints."""
FORMAT = 2
BLOCK = 16 << 20  # bytes; a rank needs as much memory to read or to write
ITEM_SIZES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by the name of its dtype."""

_MOST_BLOCK = 1 << 30  # bytes
_MOST_HEADER = 100 << 20  # bytes, as in the package safetensors
_MOST_ELEMENTS = 1 << 60
_LATEST = 1e11  # seconds since 1970: the year 5138
_TAIL = re.compile(rb',\n  "sha256": "([0-9a-f]{64})"\n}\n')
_TAIL_BYTES = len(b',\n  "sha256": ""\n}\n') + 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, as bytes in a file.

    Attributes:
        file: name of the file.
        start: where the chunk begins in the file.
        offsets: where it begins in the tensor, for each dim.
        shape: its shape.
        crc32: the checksums of its blocks.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: the name of its dtype, its shape, and its chunks, which cover it without overlapping."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file: its number of bytes, that of its header, and the header's checksum."""

    size: int
    header: int
    crc32: str


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a file with a checksum of their own."""

    file: str
    start: int
    size: int
    crc32: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in a checkpoint; see the module.

    Attributes:
        written: when, by which versions and by how many ranks; the size of a block.
        meta: metadata, encoded.
        state: the state, encoded.
        files: the files, by name.
        tensors: the tensors, by name.
    """

    written: Mapping[str, Any]
    meta: Mapping[str, Any]
    state: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]

    @property
    def block(self) -> int:
        """Number of bytes in a block."""
        return int(self.written["block"])

    def blocks(self) -> Iterator[Block]:
        """Yield all that has a checksum: each file's header, and the blocks of each chunk."""
        for name, file in self.files.items():
            yield Block(name, 0, file.header, file.crc32)
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                size = math.prod(chunk.shape) * ITEM_SIZES[tensor.dtype]
                for i, checksum in enumerate(chunk.crc32):
                    start = i * self.block
                    yield Block(chunk.file, chunk.start + start, min(self.block, size - start), checksum)


def checksum_of(data: bytes | memoryview) -> str:
    """Return the CRC-32 of bytes as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, the last of which are its digest."""
    parts = {"format": FORMAT, "written": manifest.written, "meta": manifest.meta, "state": manifest.state}
    lines = [f'  "{key}": {json.dumps(value, allow_nan=False)}' for key, value in parts.items()]
    for key, entries in (("files", manifest.files), ("tensors", manifest.tensors)):
        rows = (f"    {json.dumps(name)}: {json.dumps(entry, default=_plain)}" for name, entry in entries.items())
        lines.append(f'  "{key}": {{\n' + ",\n".join(rows) + "\n  }")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n  "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(directory: Location) -> Manifest:
    """Return the manifest of a checkpoint, of which every entry has been checked.

    Raises:
        CheckpointError: it is damaged, of an unknown format, or contradicts itself.
    """
    path = directory / MANIFEST_FILE
    data = read_plain_file(path)
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    is_whole = tail is not None and hashlib.sha256(data[:-_TAIL_BYTES]).hexdigest().encode() == tail[1]
    try:
        content = json.loads(data, parse_constant=_refuse_constant)
        number = content["format"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} must be a manifest of a checkpoint, but cannot be read. {DAMAGED}") from error
    if not is_whole and number == FORMAT:
        raise CheckpointError(f"{path} does not have the digest that it says it has. {DAMAGED}")
    if number != FORMAT:
        raise CheckpointError(
            f"{path} must have the format {FORMAT}, but has {number!r}. A later version of lockstep may have written "
            "it: update lockstep"
        )
    try:
        return _checked(content)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{path} contradicts itself: {printable(what, lines=False)}. Do not use this checkpoint"
        ) from error


def unused_ending(names: Iterable[str]) -> str:
    """Return an ending for the names of data files that none of the files which are there has."""
    taken, number, ending = list(names), 1, ".safetensors"
    while any(re.fullmatch(rf"rank_\d+{re.escape(ending)}", name) for name in taken):
        number += 1
        ending = f".{number}.safetensors"
    return ending


def _plain(entry: StoredFile | StoredTensor | Chunk) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}


def check_meta(meta: Any) -> None:
    """Check encoded metadata, and what they say of the files that an export writes.

    Raises:
        ValueError: they are not as `encode` returns them, or name a file outside of a folder.
    """
    for _ in check_encoded(meta, {}, ("meta",)):
        pass
    check_form(meta, {"weights": DESCRIPTION}, "meta")


def require_tiled(name: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> None:
    """Check that chunks cover a tensor, and that no two of them overlap.

    Raises:
        ValueError: they do not.
    """
    boxes = []
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.shape) == len(shape):
            raise ValueError(f"a chunk of {name} has another number of dims than its shape {list(shape)}")
        box = [(begin, begin + length) for begin, length in zip(chunk.offsets, chunk.shape, strict=True)]
        if any(end > length for (_, end), length in zip(box, shape, strict=True)):
            raise ValueError(f"a chunk of {name} does not fit into its shape {list(shape)}")
        if math.prod(chunk.shape):
            boxes.append(box)
    if sum(math.prod(end - begin for begin, end in box) for box in boxes) != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not cover it once")
    if not _is_cut(boxes, len(shape)):
        raise ValueError(f"the chunks of {name} do not cover it once: two of them overlap")


def _is_cut(boxes: list[list[tuple[int, int]]], dims: int) -> bool:
    """Return whether boxes are what cuts across all of them leave, one dim after the other, as ranks cut a tensor.

    Then no two of them overlap.
    """
    if len(boxes) <= 1:
        return True
    for dim in range(dims):
        groups: list[list[list[tuple[int, int]]]] = []
        end = -1
        for box in sorted(boxes, key=lambda box: box[dim]):
            if box[dim][0] >= end:
                groups.append([])
            groups[-1].append(box)
            end = max(end, box[dim][1])
        if len(groups) > 1:
            return all(_is_cut(group, dims) for group in groups)
    return False


def _checked(content: Mapping[str, Any]) -> Manifest:
    written, meta, state = (_dict(content[key], key) for key in ("written", "meta", "state"))
    _count(written["block"], "block", least=1, most=_MOST_BLOCK)
    if type(written["time"]) not in (int, float) or not 0 <= written["time"] < _LATEST:
        raise ValueError(f"`time` is {written['time']!r}, not a number of seconds since 1970")
    files = {
        require_plain_name(name): StoredFile(
            _count(file["size"], name), _count(file["header"], name, most=_MOST_HEADER), _checksum(file["crc32"], name)
        )
        for name, file in _dict(content["files"], "files").items()
    }
    tensors = {
        name: _checked_tensor(name, tensor, files, written["block"])
        for name, tensor in _dict(content["tensors"], "tensors").items()
    }
    _require_gapless(files, tensors.values())
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    check_meta(meta)
    seen: set[str] = set()
    for name in check_encoded(state, dtypes):
        if name in seen:
            raise ValueError(f"the tensor {name} stands for two values")
        seen.add(name)
    return Manifest(written, meta, state, files, tensors)


def _checked_tensor(name: str, entry: Any, files: Mapping[str, StoredFile], block: int) -> StoredTensor:
    if entry["dtype"] not in ITEM_SIZES:
        raise ValueError(f"{name} is of the unknown dtype {entry['dtype']!r}")
    shape = _sizes(entry["shape"], name)
    if math.prod(size for size in shape if size) > _MOST_ELEMENTS:
        raise ValueError(f"{name} cannot have the shape {list(shape)}")
    chunks = []
    for one in entry["chunks"]:
        chunk = Chunk(
            one["file"], _count(one["start"], name), _sizes(one["offsets"], name), _sizes(one["shape"], name),
            tuple(_checksum(checksum, name) for checksum in one["crc32"]),
        )  # fmt: skip
        size = math.prod(chunk.shape) * ITEM_SIZES[entry["dtype"]]
        file = files.get(chunk.file)
        if file is None:
            raise ValueError(f"{name} is in {chunk.file!r}, which is not one of its files")
        if chunk.start < file.header or chunk.start + size > file.size or len(chunk.crc32) != -(-size // block):
            raise ValueError(f"{name} does not fit into {chunk.file}")
        chunks.append(chunk)
    require_tiled(name, shape, chunks)
    return StoredTensor(entry["dtype"], shape, tuple(chunks))


def _require_gapless(files: Mapping[str, StoredFile], tensors: Iterable[StoredTensor]) -> None:
    """Check that every byte of every file is in its header or in one chunk."""
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for tensor in tensors:
        for chunk in tensor.chunks:
            size = math.prod(chunk.shape) * ITEM_SIZES[tensor.dtype]
            spans[chunk.file].append((chunk.start, chunk.start + size))
    for name, file in files.items():
        end = file.header
        for begin, stop in sorted(span for span in spans[name] if span[0] < span[1]):
            if begin != end:
                raise ValueError(f"{name} has bytes without a checksum, or with two")
            end = stop
        if end != file.size:
            raise ValueError(f"there is no checksum for some bytes of {name}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or tagged(value)[0] is not None:
        raise ValueError(f"`{what}` is not a dict")
    return value


def _count(value: Any, what: str, least: int = 0, most: int = 1 << 62) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} of {what} is not a number of bytes or elements")
    return value


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_count(size, what) for size in value)


def _checksum(value: Any, what: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8}", value):
        raise ValueError(f"{value!r} of {what} is not a checksum")
    return value
