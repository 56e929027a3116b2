"""Checkpoints of the first format: torch's own files, with the metadata in `meta.json`.

```
epoch_3/
├── .metadata          where each tensor is: a pickle
├── __0_0.distcp ...   tensors and values, each as `torch.save` writes it
└── meta.json          the progress of training
```

Unpickling can call anything. So the pickle may name only the classes that torch describes tensors with, and tensors and
values are read by `torch.load(weights_only=True)`. There are no checksums: a flipped bit may go unnoticed.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.files import DAMAGED, read_plain_file, require_plain_file
from lockstep.checkpoint.form import require_plain_name
from lockstep.checkpoint.manifest import ITEM_SIZES, Chunk, StoredTensor, check_meta, require_tiled
from lockstep.errors import CheckpointError
from lockstep.location import Location, size_of
from lockstep.masking import printable

_FORMAT = 1
_INDEX_FILE, _META_FILE = ".metadata", "meta.json"
_METADATA = "torch.distributed.checkpoint.metadata"
_DESCRIPTIONS = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ALLOWED = {
    *((_METADATA, name) for name in _DESCRIPTIONS),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class OldCheckpoint:
    """A checkpoint of the first format, of which the index has been read and checked.

    Raises:
        CheckpointError: it is damaged, or its index names something that is not allowed.
    """

    def __init__(self, directory: Location) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._directory = directory
        index = self._read_index()
        state: dict[str, Any] = {}
        tensors: dict[str, StoredTensor] = {}
        self.state: Mapping[str, Any] = state
        self.tensors: Mapping[str, StoredTensor] = tensors
        self._places: dict[str, dict[tuple[int, ...], Any]] = {}
        try:
            for key, place in index.storage_data.items():
                require_plain_name(place.relative_path)
                self._places.setdefault(key.fqn, {})[tuple(key.offset or ())] = place
            for key, entry in index.state_dict_metadata.items():
                is_tensor = isinstance(entry, TensorStorageMetadata)
                if is_tensor:
                    tensors[key] = self._stored(key, entry)
                _put(state, index.planner_data[key], {"$tensor" if is_tensor else "$item": key})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            path = directory / _INDEX_FILE
            raise CheckpointError(
                f"{path} contradicts itself: {printable(str(error))}. Do not use this checkpoint"
            ) from error
        self._check_sizes()
        _ = self.meta

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The metadata."""
        path = self._directory / _META_FILE
        try:
            meta = json.loads(read_plain_file(path))
            number = meta.get("format", _FORMAT)
            check_meta(meta)
        except (ValueError, RecursionError, AttributeError) as error:
            raise CheckpointError(
                f"{path} must hold metadata as JSON, but cannot be read: {printable(str(error))}. {DAMAGED}"
            ) from error
        if number != _FORMAT:
            raise CheckpointError(
                f"{path} must have the format {_FORMAT}, but has {number!r}. A later version of lockstep may have "
                "written it: update lockstep"
            )
        return dict(meta)

    @property
    def encoded_meta(self) -> Mapping[str, Any]:
        """The metadata, which are values of JSON."""
        return self.meta

    def item(self, key: str) -> Any:
        """Return a value that is stored by itself."""
        (place,) = self._places[key].values()
        value = self._load(place)
        # What a rank had saved of its own stood in a tuple.
        return value[0] if key.startswith("ranks.") else value

    def read(self, chunk: Chunk, dtype: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Fill a tensor with the part of a chunk that begins at `offsets`."""
        place = next(
            place
            for places in self._places.values()
            for place in places.values()
            if (place.relative_path, place.offset) == (chunk.file, chunk.start)
        )
        tensor = self._load(place)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape:
            raise CheckpointError(
                f"{self._directory / chunk.file} does not hold the tensor at {chunk.start}. {DAMAGED}"
            )
        for dim, (offset, length) in enumerate(zip(offsets, target.shape, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        target.copy_(tensor)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _read_index(self) -> Any:
        path = self._directory / _INDEX_FILE
        try:
            return _Unpickler(io.BytesIO(read_plain_file(path))).load()
        except _RefusedError as error:
            raise CheckpointError(
                f"{path} must only describe tensors, but names {error}, which may run any code: refused. Nothing was "
                "run. Do not use this checkpoint"
            ) from error
        except CheckpointError:
            raise
        except Exception as error:  # unpickling can raise anything
            raise CheckpointError(f"{path} cannot be read: {error!r}. {DAMAGED}") from error

    def _stored(self, key: str, entry: Any) -> StoredTensor:
        shape = tuple(entry.size)
        chunks = []
        for chunk in entry.chunks:
            place = self._places[key][tuple(chunk.offsets) if shape else ()]
            chunks.append(Chunk(place.relative_path, place.offset, tuple(chunk.offsets), tuple(chunk.sizes), ()))
        require_tiled(key, shape, chunks)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if dtype not in ITEM_SIZES:
            raise ValueError(f"{key} is of the unknown dtype {dtype}")
        return StoredTensor(dtype, shape, tuple(chunks))

    def _check_sizes(self) -> None:
        """Raise an error for files that are missing, cut off, or links, and name them."""
        sizes: dict[str, int] = {}
        for places in self._places.values():
            for place in places.values():
                sizes[place.relative_path] = max(place.offset + place.length, sizes.get(place.relative_path, 0))
        for name, size in sorted(sizes.items()):
            path = self._directory / name
            require_plain_file(path)
            if (present := size_of(path)) < size:
                raise CheckpointError(f"{path} must have {size} bytes, but has {present}. {DAMAGED}")

    def _load(self, place: Any) -> Any:
        path = self._directory / place.relative_path
        require_plain_file(path)
        with path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        try:
            with torch.serialization.safe_globals(_numpy_classes()):
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises almost anything
            raise CheckpointError(
                f"{path} must hold a tensor or plain values at {place.offset}, but cannot be read: "
                f"{str(error).splitlines()[0] if str(error) else error!r}. No code in it was run. {DAMAGED}"
            ) from error


class _RefusedError(Exception):
    """A pickle names something that it must not."""


class _Unpickler(pickle.Unpickler):
    """Reads a pickle that names only classes that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise _RefusedError(f"{module}.{name}")


def _numpy_classes() -> list[Any]:
    """Return what a pickled array of numpy names, for the state of its random generator."""
    import numpy
    from numpy.dtypes import Float64DType, Int64DType, UInt32DType

    reconstruct = numpy.ndarray(0).__reduce__()[0]
    return [
        reconstruct, (reconstruct, "numpy.core.multiarray._reconstruct"), numpy.ndarray, numpy.dtype,
        Float64DType, Int64DType, UInt32DType,
    ]  # fmt: skip


def _put(tree: dict[str, Any], path: tuple[Any, ...], node: Any) -> None:
    """Put a node into nested dicts and lists; numbers in the path are places in lists."""
    place: Any = tree
    for key, following in zip(path, (*path[1:], None), strict=True):
        held = node if following is None else [] if isinstance(following, int) else {}
        if isinstance(key, int):
            if not 0 <= key <= len(path) + len(place) + 100_000:
                raise ValueError(f"{key} is no place in a list")
            place.extend([None] * (key + 1 - len(place)))
            if place[key] is None or following is None:
                place[key] = held
        elif following is None:
            place[key] = held
        else:
            place.setdefault(key, held)
        place = place[key]
