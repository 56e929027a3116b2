"""The safetensors format: a JSON header with the name, dtype, shape and place of each tensor, then their bytes.

```
8 bytes    length of the header, little-endian
header     {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"format": "pt"}}
bytes      each tensor, row by row, little-endian, without gaps
```

The package safetensors writes only what is whole in memory, and reads only files on a disk. Here a file is written
tensor by tensor, and rows of a tensor are read from anywhere.

**Source**: https://github.com/huggingface/safetensors, "Format" (0.8).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from math import prod
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.saving import SAFETENSORS, header_bytes
from lockstep.errors import ConfigError
from lockstep.location import Location, read_into, size_of, write_bytes
from lockstep.masking import printable

_NAMES = {getattr(torch, dtype): name for dtype, name in SAFETENSORS.items()}
_NAMES |= {torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"
_MOST_HEADER = 100 * 2**20  # as in the package
_MOST_ELEMENTS = 1 << 60
_DAMAGED = "It is damaged or no safetensors file: copy it again"


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
        tensor = torch.empty(shape, dtype=dtype)
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


def write_header(file: IO[bytes], tensors: Mapping[str, TensorInfo]) -> None:
    """Write the header of a file that will hold these tensors, in this order.

    Raises:
        ConfigError: the format has no such dtype.
    """
    header: dict[str, Any] = {}
    begin = 0
    for name, info in tensors.items():
        if info.dtype not in _NAMES:
            raise ConfigError(
                f"`{name}` must have a dtype that safetensors files can hold, but has {info.dtype}. Export to torch"
            )
        end = begin + info.nbytes
        header[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
        begin = end
    file.write(header_bytes(header))


def write_tensor(file: IO[bytes], tensor: Tensor) -> None:
    """Write the bytes of the next tensor."""
    if tensor.numel():
        write_bytes(file, bytes_of(tensor.detach().to("cpu").contiguous()))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in CPU memory, which are not copied.

    Example:
        >>> bytes_of(torch.tensor([1.0], dtype=torch.bfloat16)).tolist()
        [128, 63]
    """
    return tensor.reshape(-1).view(torch.uint8).numpy().data
