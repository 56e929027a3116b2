"""The manifest of a checkpoint: what was saved, which files hold it, and the digests of all of them.

```
{
  "format": 3,
  "written": {"time": 1795400380.2, "block": 16777216, "lockstep": "0.1.0", "torch": "2.13.0", "ranks": 2},
  "meta": {"epoch": 3, "iter": 120, ...},
  "state": {"model": {"weight": {"$tensor": "model.weight"}}, "optimizer": {...}, "ranks": {...}},
  "files": {
    "rank_0.safetensors": {"size": 2244, "header": 192, "crc32": 123, "blocks": 1, "blocks_crc32": 456},
    "rank_1.safetensors": {...}
  },
  "tensors": {"model.weight": {"dtype": "float32", "shape": [32, 32], "part": [16, 32], "place": 0}},
  "places": [[0, 1]],
  "sha256": "..."
}
```

A tensor is cut into parts as into a grid, and each part lies in another file. `part` is the shape of a part, which is
shorter at the end; where parts of a dim differ otherwise, it is the list of the places at which they begin. `place` is
the number of an entry of `places`: which files hold the parts, in the order of rows, by their numbers in `files`.
Most tensors share such an entry, so that a manifest grows with tensors and with files, not with parts.

A file is a header, with a checksum, then its parts without gaps: those with the largest elements first, then by name.
So where each part lies follows from the manifest. The bytes of a part are cut into blocks, and each block has a
checksum, so that a rank can verify what it reads. These checksums are the end of the file, and have one themselves. The
last member is the digest of all that stands before it. So every bit of a checkpoint is under a checksum or the digest.

What `state` and `meta` may hold is in `values.py`. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from lockstep.checkpoint.files import DAMAGED, MANIFEST_FILE, read_plain_file
from lockstep.checkpoint.values import (
    COUNT,
    DESCRIPTION,
    Form,
    StoredKind,
    Whole,
    check_encoded,
    check_form,
    is_count,
    require_plain_name,
)
from lockstep.errors import CheckpointError
from lockstep.location import Location
from lockstep.masking import printable

OWN_FILES = re.compile(r"rank_\d+(\.\d+)?\.safetensors|manifest\.json")
"""Names of the files of checkpoints."""
FORMAT = 3
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

CHECKSUM = 4
"""Bytes of a checksum."""

_MOST_BLOCK = 1 << 30  # bytes
_MOST_HEADER = 100 << 20  # bytes, as in the package safetensors
_MOST_ELEMENTS = 1 << 60
_LATEST = 1e11  # seconds since 1970: the year 5138
_TAIL = re.compile(rb',\n  "sha256": "([0-9a-f]{64})"\n}\n')
_TAIL_BYTES = len(b',\n  "sha256": ""\n}\n') + 64


class Place(tuple[int, ...]):
    """Which files hold the parts of a tensor, in the order of rows, by their numbers."""

    @cached_property
    def part_in(self) -> dict[int, int]:
        """The number of the part that each of the files holds."""
        return {file: part for part, file in enumerate(self)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor.

    Attributes:
        dtype: name of its dtype.
        shape: its shape.
        begins: where the parts begin along each dim: a range where they are of one length.
        place: which files hold the parts.
    """

    dtype: str
    shape: tuple[int, ...]
    begins: tuple[range | tuple[int, ...], ...]
    place: Place

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def box(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where a part begins, and its shape."""
        offsets, lengths = [], []
        for length, begins in zip(reversed(self.shape), reversed(self.begins), strict=True):
            number, at = divmod(number, len(begins))
            offsets.append(begins[at])
            lengths.append((begins[at + 1] if at + 1 < len(begins) else length) - begins[at])
        return tuple(offsets[::-1]), tuple(lengths[::-1])

    def size_in(self, file: int) -> int:
        """Return the number of bytes of the part in a file; 0 if it holds none."""
        number = self.place.part_in.get(file)
        return 0 if number is None else math.prod(self.box(number)[1]) * ITEM_SIZES[self.dtype]

    def parts_within(self, offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[int]:
        """Yield the numbers of the parts that have something of a box, in the order of rows."""
        ranges = [
            range(bisect_right(begins, first) - 1, bisect_left(begins, first + length)) if length else range(0)
            for begins, first, length in zip(self.begins, offsets, lengths, strict=True)
        ]
        for at in itertools.product(*ranges):
            number = 0
            for i, begins in zip(at, self.begins, strict=True):
                number = number * len(begins) + i
            yield number


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file.

    Attributes:
        size: number of bytes.
        header: number of bytes of its header.
        crc32: checksum of its header.
        blocks: number of the blocks of its parts, each of which has a checksum of 4 bytes at the end of the file.
        blocks_crc32: checksum of these.
    """

    size: int
    header: int
    crc32: int
    blocks: int
    blocks_crc32: int


class FileLayout(NamedTuple):
    """Where the parts lie in a file: the bytes, and the blocks, before that of each tensor, and after the last one."""

    starts: array[int]
    blocks: array[int]


@dataclass(frozen=True)
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

    @cached_property
    def file_names(self) -> list[str]:
        """The names of the files, by their numbers."""
        return list(self.files)

    @cached_property
    def order(self) -> dict[str, int]:
        """The place of each tensor in the order in which files hold them."""
        names = sorted(self.tensors, key=lambda name: place_in_file(self.tensors[name].dtype, name))
        return {name: i for i, name in enumerate(names)}

    def layout_of(self, file: int) -> FileLayout:
        """Return where the parts lie in a file.

        Raises:
            ValueError: they do not fit into it.
        """
        stored = self.files[self.file_names[file]]
        sizes = [self.tensors[name].size_in(file) for name in self.order]
        starts = array("q", itertools.accumulate(sizes, initial=stored.header))
        blocks = array("q", itertools.accumulate((-(-size // self.block) for size in sizes), initial=0))
        if (starts[-1] + CHECKSUM * blocks[-1], blocks[-1]) != (stored.size, stored.blocks):
            raise ValueError(f"{self.file_names[file]} does not have the size of the parts of tensors that it holds")
        return FileLayout(starts, blocks)


def place_in_file(dtype: str, name: str) -> tuple[int, str]:
    """Return a key by which the parts of tensors lie in a file: each at a multiple of its element's size."""
    return -ITEM_SIZES[dtype], name


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, the last of which are its digest."""
    places: dict[Place, int] = {}
    tensors = {}
    for name, one in manifest.tensors.items():
        part = [begins.step if isinstance(begins, range) else begins for begins in one.begins]
        place = places.setdefault(one.place, len(places))
        tensors[name] = {"dtype": one.dtype, "shape": one.shape, "part": part, "place": place}
    files = {name: asdict(file) for name, file in manifest.files.items()}
    parts = {"format": FORMAT, "written": manifest.written, "meta": manifest.meta, "state": manifest.state}
    lines = [f'  "{key}": {json.dumps(value, allow_nan=False)}' for key, value in parts.items()]
    for key, rows in (("files", files), ("tensors", tensors)):
        body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        lines.append(f'  "{key}": {{\n{body}\n  }}')
    lines.append(f'  "places": {json.dumps(list(places))}')
    content = ("{\n" + ",\n".join(lines)).encode()
    return content + f',\n  "sha256": "{hashlib.sha256(content).hexdigest()}"\n}}\n'.encode()


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
            f"{path} must have the format {FORMAT}, but has {number!r}: another version of lockstep has written it. If "
            "that is a later one, update lockstep"
        )
    try:
        return _checked(content)
    except (ValueError, RecursionError) as error:
        raise contradiction(path, error) from error


def contradiction(path: Location, error: Exception) -> CheckpointError:
    """Return the error for a manifest whose digest is right, but not its content."""
    return CheckpointError(
        f"{path} contradicts itself: {printable(str(error), lines=False)}. Do not use this checkpoint"
    )


def unused_ending(names: Iterable[str]) -> str:
    """Return an ending for the names of data files that none of the files which are there has."""
    taken, number, ending = list(names), 1, ".safetensors"
    while any(re.fullmatch(rf"rank_\d+{re.escape(ending)}", name) for name in taken):
        number += 1
        ending = f".{number}.safetensors"
    return ending


def check_meta(meta: Any) -> None:
    """Check encoded metadata, and what they say of the files that an export writes.

    Raises:
        ValueError: they are not as `encode` returns them, or name a file outside of a folder.
    """
    for _ in check_encoded(meta, {}, ("meta",)):
        pass
    check_form(meta, {"weights": DESCRIPTION}, "meta")


def _count_from(least: int, most: int) -> StoredKind:
    words = f"a number of bytes from {least:,} to {most:,}"
    return StoredKind(words, lambda node: is_count(node) and least <= node <= most)


def _are_counts(node: Any) -> bool:
    return isinstance(node, list) and all(map(is_count, node))


_FORM: Form = Whole(
    written=Whole(
        time=StoredKind(
            "a number of seconds since 1970", lambda node: type(node) in (int, float) and 0 <= node < _LATEST
        ),
        block=_count_from(1, _MOST_BLOCK),
    ),
    meta={},
    state={},
    files={"*": Whole({**dict.fromkeys(StoredFile.__slots__, COUNT), "header": _count_from(0, _MOST_HEADER)})},
    tensors={
        "*": Whole(
            dtype=StoredKind("the name of a dtype", lambda node: isinstance(node, str) and node in ITEM_SIZES),
            shape=StoredKind("a list of lengths", _are_counts),
            part=StoredKind(
                "the lengths of parts, or lists of where they begin",
                lambda node: (
                    isinstance(node, list) and all((is_count(one) and one) or _are_counts(one) for one in node)
                ),
            ),
            place=COUNT,
        )
    },
    places=StoredKind("lists of numbers of files", lambda node: isinstance(node, list) and all(map(_are_counts, node))),
)


def _checked(content: Mapping[str, Any]) -> Manifest:
    check_form(content, _FORM, "manifest")
    files = {
        require_plain_name(name): StoredFile(**{key: file[key] for key in StoredFile.__slots__})
        for name, file in content["files"].items()
    }
    places = [_checked_place(i, place, len(files)) for i, place in enumerate(content["places"])]
    tensors = {name: _checked_tensor(name, tensor, places) for name, tensor in content["tensors"].items()}
    # Parts cover a tensor once, because they are a grid. Of each file by itself, this is checked when it is read.
    held = sum(file.size - file.header - CHECKSUM * file.blocks for file in files.values())
    if held != (needed := sum(tensor.size for tensor in tensors.values())):
        raise ValueError(f"its files hold {held} bytes of tensors, which have {needed}")
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    check_meta(content["meta"])
    seen: set[str] = set()
    for name in check_encoded(content["state"], dtypes, ("state",)):
        if name in seen:
            raise ValueError(f"the tensor {name} stands for two values")
        seen.add(name)
    return Manifest(content["written"], content["meta"], content["state"], files, tensors)


def _checked_place(at: int, files: Sequence[int], number: int) -> Place:
    place = Place(files)
    if wrong := [file for file in place if file >= number]:
        raise ValueError(f"`places.{at}` must name files by their numbers, below {number}, but has {wrong[0]}")
    if len(place.part_in) != len(place):
        raise ValueError(f"`places.{at}` must have each file once: one file holds two parts of a tensor")
    return place


def _checked_tensor(name: str, entry: Any, places: Sequence[Place]) -> StoredTensor:
    shape = tuple(entry["shape"])
    if math.prod(size for size in shape if size) > _MOST_ELEMENTS:
        raise ValueError(f"{name} cannot have the shape {list(shape)}")
    if len(entry["part"]) != len(shape):
        raise ValueError(f"{name} has {len(shape)} dims, but is cut along {len(entry['part'])}")
    begins = tuple(_begins(*cut, name) for cut in zip(shape, entry["part"], strict=True))
    if entry["place"] >= len(places):
        raise ValueError(f"{name} has the place {entry['place']}, but there are {len(places)}")
    place = places[entry["place"]]
    if (parts := math.prod(map(len, begins))) != len(place):
        raise ValueError(f"{name} has {parts} parts, but {len(place)} files hold it")
    return StoredTensor(entry["dtype"], shape, begins, place)


def _begins(length: int, part: int | list[int], name: str) -> range | tuple[int, ...]:
    """Return where the parts of a dim begin, by their length, or as it is listed."""
    if isinstance(part, int):
        return range(0, length, part)
    begins = tuple(part)
    if begins[:1] != (0,) or not all(map(operator.lt, begins, (*begins[1:], length))):
        raise ValueError(f"{name} of the length {length} cannot be cut into parts that begin at {part}")
    return begins


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
