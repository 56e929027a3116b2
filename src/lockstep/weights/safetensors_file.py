"""The safetensors format: a JSON header with the name, dtype, shape and place of each tensor, then their bytes.

```
8 bytes    length of the header, little-endian
header     {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"format": "pt"}}
bytes      each tensor, row by row, little-endian, without gaps
```

The package safetensors writes only what is whole in memory, and reads only files on a disk. Here a file is written
tensor by tensor, large models as several files with an index, and rows of a tensor are read from anywhere.

**Source**: https://github.com/huggingface/safetensors, "Format" (0.8).
"""

from __future__ import annotations

import glob
import json
import os
import re
import reprlib
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import torch
from torch import Tensor

from lockstep.checkpoint.drafts import DRAFT, is_alive, name_of_draft
from lockstep.checkpoint.files import sync_folder
from lockstep.checkpoint.saving import SAFETENSORS, header_bytes
from lockstep.errors import ConfigError, listed
from lockstep.location import Location, read_into, size_of, write_bytes
from lockstep.masking import printable
from lockstep.transport.moving import bytes_of

_NAMES = {getattr(torch, dtype): name for dtype, name in SAFETENSORS.items()}
_NAMES |= {torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"
_MOST_HEADER = 100 * 2**20  # as in the package
_MOST_ELEMENTS = 1 << 60
_DAMAGED = "It is damaged or no safetensors file: copy it again"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([A-Za-z]*)")
MAX_SHARD_SIZE = "5GB"
"""The most bytes of a file by default."""
ADAPTER_CONFIG = "adapter_config.json"
"""peft's description of an adapter, beside its weights."""


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it: `shape` and `dtype`."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """The tensors of a file, each of which is read when it is asked for.

    Args:
        location: the file.

    Attributes:
        tensors: shape and dtype of each tensor, by name.

    Raises:
        ConfigError: the file is no safetensors file, is cut off, or has a dtype that torch does not have.
        OSError: it cannot be read.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self.tensors: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}
        header, begin = self._header()
        spans = []
        for name, entry in header.items():
            if name == _METADATA:
                continue
            info, (start, end) = self._entry(name, entry)
            if end - start != info.nbytes:
                raise self._fault(f"`{name}` has {end - start} bytes for {info.nbytes}")
            self.tensors[name], self._begins[name] = info, begin + start
            spans.append((start, end, name))
        expected = 0
        for start, end, name in sorted(spans):
            if start != expected and start != end:
                what = "overlaps another tensor" if start < expected else "comes after bytes that belong to no tensor"
                raise self._fault(f"`{name}` {what}")
            expected = max(expected, end)
        if (size := size_of(location) - begin) != expected:
            raise self._fault(f"it must have {expected} bytes after its header, but has {size}")

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some of its rows, in CPU memory. **Shapes**: [rows, *the tensor's other dims]."""
        shape, dtype = self.tensors[name]
        first = 0
        if rows is not None:
            first, stop, _ = rows.indices(shape[0])
            shape = (max(0, stop - first), *shape[1:])
        row = prod(self.tensors[name].shape[1:]) * dtype.itemsize
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if tensor.numel():
            read_into(self._location, self._begins[name] + first * row, bytes_of(tensor))
        return tensor

    def _header(self) -> tuple[Mapping[str, Any], int]:
        """Return the header and where the bytes of tensors begin."""
        size = size_of(self._location)
        length = bytearray(8)
        if size < len(length):
            raise self._fault(f"it has only {size} bytes")
        read_into(self._location, 0, memoryview(length))
        count = int.from_bytes(length, "little")
        if not 2 <= count <= min(_MOST_HEADER, size - 8):
            raise self._fault(f"its header would have {count} bytes")
        content = bytearray(count)
        read_into(self._location, 8, memoryview(content))
        try:
            header = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._fault(f"its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._fault("its header is not a dict")
        return header, 8 + count

    def _entry(self, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not all(type(size) is int and 0 <= size <= _MOST_ELEMENTS for size in (*shape, start, end)):
                raise ValueError
            if prod(size for size in shape if size) > _MOST_ELEMENTS:
                raise ValueError
        except (TypeError, KeyError, ValueError) as error:
            raise self._fault(f"its header says of `{name}`: {reprlib.repr(entry)}") from error
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ConfigError(
                f"`{name}` in {self._location} must have a dtype of torch's, but has {reprlib.repr(dtype)}"
            )
        return TensorInfo(tuple(shape), _DTYPES[dtype]), (start, end)

    def _fault(self, what: str) -> ConfigError:
        what = printable(what, lines=False)
        return ConfigError(f"{self._location} must be a safetensors file, but {what}. {_DAMAGED}")


def check_dtypes(tensors: Mapping[str, TensorInfo]) -> None:
    """Check that the format has the dtypes of these tensors.

    Raises:
        ConfigError: it lacks one.
    """
    for name, info in tensors.items():
        if info.dtype not in _NAMES:
            raise ConfigError(
                f"`{name}` must have a dtype that safetensors files can hold, but has {info.dtype}. Export to torch"
            )


def write_tensor(file: IO[bytes], tensor: Tensor) -> None:
    """Write the bytes of the next tensor."""
    if tensor.numel():
        write_bytes(file, bytes_of(tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()))


def read_size(size: int | str) -> int:
    """Return the size in bytes that `max_shard_size` gives.

    Example:
        >>> read_size("5GB"), read_size("1.5 MiB"), read_size(100)
        (5000000000, 1572864, 100)

    Raises:
        ConfigError: it is not a positive size.
    """
    match = _SIZE.fullmatch(str(size).strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    count = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if count < 1:
        raise ConfigError(f"`max_shard_size` must be a size as 5GB, 500MB or 2GiB, but is {size!r}")
    return count


def plan_shards(infos: Mapping[str, TensorInfo], stem: str, max_bytes: float) -> dict[str, list[str]]:
    """Return the names of the files, and the tensors that each one holds, in the order in which they are written.

    A tensor larger than `max_bytes` gets a file of its own. Within a file the wider dtypes come first, so that each
    tensor is aligned.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in infos.items():
        if groups[-1] and size + info.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += info.nbytes
    of = f"of-{len(groups):05}"
    files = [
        f"{stem}-{n:05}-{of}.safetensors" if len(groups) > 1 else f"{stem}.safetensors"
        for n in range(1, len(groups) + 1)
    ]
    return {
        file: sorted(names, key=lambda n: -infos[n].dtype.itemsize) for file, names in zip(files, groups, strict=True)
    }


def check_new(out: Location, *, file: bool, overwrite: bool | None = None) -> None:
    """Raise an error if there is something already where a file or a folder is to be written.

    Args:
        out: the file or folder.
        file: whether it is to be a file.
        overwrite: whether a folder may hold something, whose weights are replaced; None where nobody can say so.

    Raises:
        ConfigError: `out` is there, and is not an empty folder; or it cannot be reached.
    """
    what = "a new file" if file else "a new or empty folder"
    try:
        if not out.exists():
            return
        names = None if out.is_file() else sorted(one.name for one in out.iterdir() if not _is_left(one.name))
    except OSError as error:
        raise ConfigError(f"what is written must go to {what}, but {out} cannot be reached: {error}") from error
    if not file and (names == [] or (overwrite and names is not None)):
        return
    found = "is a file" if names is None else f"is a folder that holds {listed(names, most=3) or 'nothing'}"
    remedy = "or remove it" if overwrite is None or names is None else "or overwrite=True, which replaces weights there"
    raise ConfigError(f"what is written must go to {what}, but {out} {found}. Give another one, {remedy}")


@dataclass(eq=False, repr=False)
class SafetensorsWriter:
    """Writes tensors one by one into one or several files, and then what belongs beside them.

    On a disk all is written into a hidden folder beside OUT, which gets its name at the end. In a folder that is
    there, which may be a link or a volume of its own, it is one inside, from which the files are moved one by one, the
    JSON files last. Behind a URL they appear one by one, too. A failure is kept until `finish`, so that a rank that
    writes can go on taking part in collectives. As a context, it removes what has been written at an exception.

    Args:
        out: the folder; or, with `single`, the file.
        shards: files and the tensors in each, as `plan_shards` returns them.
        infos: shape and dtype of what is written, by name.
        files: JSON values of further files, by name.
        single: write one file instead of a folder.

    Attributes:
        failure: why writing has failed; None if it has not.
    """

    out: Location
    shards: Mapping[str, list[str]]
    infos: Mapping[str, TensorInfo]
    files: Mapping[str, Any]
    single: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        out = self.out.absolute() if isinstance(self.out, Path) else self.out
        self._draft = draft_of(out) if isinstance(out, Path) else None
        self._waiting = [(file, name) for file, names in self.shards.items() for name in names]
        self._open: IO[bytes] | None = None
        self._written: list[Location] = []
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, in the order of the shards."""
        file, name = self._waiting.pop(0)
        if self.failure is not None:
            return
        try:
            info = self.infos[name]
            write_tensor(self._opened(file), tensor.detach().to(info.dtype))
            if not self._waiting or self._waiting[0][0] != file:
                self._close()
        except Exception as error:
            self.failure = error

    def finish(self) -> None:
        """Write what belongs beside the weights, and give all its final name.

        Raises:
            ConfigError: writing has failed, now or before; what was written is removed.
        """
        if self.failure is None:
            try:
                self._write_files()
                self._publish()
                return
            except Exception as error:
                self.failure = error
        self.discard()
        raise ConfigError(f"{self.out} cannot be written: {self.failure}") from self.failure

    def discard(self) -> None:
        """Remove what has been written."""
        with suppress(OSError):  # what could not be written to the end is removed
            self._close()
        if self._draft is not None:
            shutil.rmtree(self._draft, ignore_errors=True)
            return
        for file in self._written:
            with suppress(OSError):  # of several that were written, those that can be removed are
                file.unlink()

    def _opened(self, file: str) -> IO[bytes]:
        """Return the open file, which is a new one for the first tensor in it."""
        if self._open is None:
            self._open = self._create(file)
            held = [(name, self.infos[name]) for name in self.shards[file]]
            self._open.write(header_bytes((name, _NAMES[one.dtype], one.shape, one.nbytes) for name, one in held))
        return self._open

    def _create(self, file: str) -> IO[bytes]:
        place: Location = self.out if self.single else self.out / _plain(file)
        if self._draft is not None:
            place = self._draft / _plain(file)
            if not self._written:
                self._draft.mkdir(parents=True)
        elif not (self._written or self.single):
            self._remove_index()
        self._written.append(place)
        return place.open("wb")

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            if self._draft is not None:  # a file must not get its name before the disk has it
                opened.flush()
                os.fsync(opened.fileno())
            opened.close()

    def _write_files(self) -> None:
        if self.single:
            return
        files = dict(self.files)
        if len(self.shards) > 1:
            places = {name: file for file, names in self.shards.items() for name in names}
            size = sum(info.nbytes for info in self.infos.values())
            index = {"metadata": {"total_size": size}, "weight_map": places}
            files = {self._index_file(): index, **files}
        for name, content in files.items():
            self._open = self._create(name)
            self._open.write(_as_bytes(content))
            self._close()

    def _index_file(self) -> str:
        return f"{self._stem()}.safetensors.index.json"

    def _stem(self) -> str:
        return next(iter(self.shards)).removesuffix(".safetensors").partition("-")[0]

    def _publish(self) -> None:
        if self._draft is not None and isinstance(self.out, Path):
            if not self.single and not self.out.exists():
                self._draft.rename(self.out)
                sync_folder(self.out.parent)
                return
            if not self.single:
                self._remove_index()
            for written in self._written:
                (self._draft / written.name).replace(self.out if self.single else self.out / written.name)
            self._draft.rmdir()
            sync_folder(self.out.parent if self.single else self.out)
        if not self.single:
            self._remove_former()

    def _remove_index(self) -> None:
        """Remove what leads to former parts: a process that is killed from here on leaves none of former and new ones.

        transformers also puts an adapter that it finds beside a model into it.
        """
        for name in (self._index_file(), ADAPTER_CONFIG):
            with suppress(FileNotFoundError):
                (self.out / name).unlink()

    def _remove_former(self) -> None:
        """Remove the other weights of a folder that is overwritten, which might be read in place of these."""
        parts = rf"{re.escape(self._stem())}(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
        weights = re.compile(rf"{parts}|adapter_model\.(safetensors|bin)")
        names = {written.name for written in self._written}
        for former in [*self.out.iterdir()]:
            if former.name not in names and weights.fullmatch(former.name):
                former.unlink()


def _is_left(name: str) -> bool:
    """Return whether a process that was killed has left a draft of this name."""
    owner = DRAFT.fullmatch(name)
    return owner is not None and is_alive(owner) is False


def draft_of(out: Path) -> Path:
    """Return where this process writes what will be `out`, and remove what processes that were killed have left.

    It is beside `out`, or inside of a folder that is there: what lies beside that may be another disk.
    """
    folder = out if out.is_dir() else out.parent
    draft = folder / name_of_draft(out.name)
    for left in folder.glob(f".{glob.escape(out.name)}.draft.*"):
        if left == draft or _is_left(left.name):
            shutil.rmtree(left, ignore_errors=True)
            with suppress(OSError):  # of a file; what can't be removed is in nobody's way
                left.unlink()
    return draft


def _plain(name: str) -> str:
    """Return the name of a file that will lie directly in the folder, whoever has said it."""
    if name in ("", "..") or Path(name).name != name or "\\" in name:
        raise ConfigError(f"a file that is written must have a plain name, but {name!r} may lead out of the folder")
    return name


def _as_bytes(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
