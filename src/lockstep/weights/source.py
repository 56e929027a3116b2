"""What lies at a path: a file of weights, a folder of HuggingFace's, a checkpoint, or folders of runs with some."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Protocol

from torch import Tensor

from lockstep.checkpoint import find_checkpoints, find_last_checkpoint, is_checkpoint, read_meta
from lockstep.errors import ConfigError, listed
from lockstep.location import Location, size_of
from lockstep.weights.safetensors_file import SafetensorsFile, TensorInfo
from lockstep.weights.torch_file import TorchFile

_FILES = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MOST_INDEX = 100 * 2**20  # bytes
_ADAPTER = "adapter_config.json"


class Source(Protocol):
    """Weights that are read one by one."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of each tensor, by name."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some of its rows, in CPU memory."""


class ShardedFiles:
    """Weights in several files, with an index that says which tensor is in which.

    Args:
        index: the index, a JSON file with `weight_map`.

    Attributes:
        tensors: shape and dtype of each tensor, by name.

    Raises:
        ConfigError: a file is missing, outside of the index's folder, or cannot be read.
    """

    def __init__(self, folder: Location, index: str) -> None:
        places = _weight_map(folder, index)
        files = {name: _file(folder / name) for name in sorted(set(places.values()))}
        for tensor, name in places.items():
            if tensor not in files[name].tensors:
                raise ConfigError(f"{folder / name} must hold `{tensor}`, as {index} says, but does not")
        self._files = {tensor: files[name] for tensor, name in places.items()}
        self.tensors = {tensor: file.tensors[tensor] for tensor, file in self._files.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some of its rows, in CPU memory."""
        return self._files[name].read(name, rows)


def find_checkpoint(location: Location) -> Location | None:
    """Return the checkpoint that a path means; None if it means none.

    This is the path itself, the last checkpoint of a work_dir, or the one with the most iterations in a run's folder.
    """
    if not location.is_dir():
        return None
    if is_checkpoint(location):
        return location
    last = find_last_checkpoint(location)
    if last is not None:
        return last
    saved = [one for one in find_checkpoints([location]) if one.directory.parent == location]
    complete = [one for one in saved if is_checkpoint(one.directory)]
    latest = max(complete, key=lambda one: (read_meta(one.directory).get("iter", 0), one.time), default=None)
    return None if latest is None else latest.directory


def checkpoint_at(location: Location) -> Location:
    """Return the checkpoint that a path means, or the path itself if it means none."""
    return find_checkpoint(location) or location


def check_weights(location: Location, argument: str) -> None:
    """Raise an error if there are no weights at a path. Their files are not opened.

    Args:
        location: the path.
        argument: where it was given, for the message.

    Raises:
        ConfigError: there is nothing, or a folder without weights; or the path cannot be reached.
    """
    wanted = f"`{argument}` must be a checkpoint, or a folder or a file of weights, but {location}"
    try:
        if location.is_file() or find_checkpoint(location) is not None:
            return
        if not location.is_dir():
            raise ConfigError(
                f"{wanted} does not exist. Download weights from the web first; those in a bucket may be given as "
                "s3://BUCKET/NAME"
            )
        found = sorted(one.name for one in location.iterdir())
    except OSError as error:
        raise ConfigError(f"{wanted} cannot be read: {error}") from error
    if any(name in found for name in (*_FILES, *_INDICES)):
        return
    if _ADAPTER in found:
        raise ConfigError(
            f"{wanted} has an adapter alone. Load it with peft.PeftModel.from_pretrained(model, FOLDER, "
            "is_trainable=True), and hand over the result"
        )
    there = f"It holds {listed(found, most=6)}" if found else "It is empty"
    raise ConfigError(f"{wanted} is a folder without a complete checkpoint in it, or {_FILES[0]}. {there}")


def open_source(location: Location) -> Source:
    """Open the weights at a path that is no checkpoint.

    Raises:
        ConfigError: there are no weights, or they cannot be read; the message says what there is.
    """
    check_weights(location, "load_from")
    try:
        if location.is_file():
            return _file(location)
        for file, index in zip(_FILES, _INDICES, strict=True):
            if (location / file).is_file():
                return _file(location / file)
            if (location / index).is_file():
                return ShardedFiles(location, index)
    except OSError as error:
        raise ConfigError(f"{location} cannot be read: {error}") from error
    raise ConfigError(f"{location} has changed while it was read")


def _file(location: Location) -> Source:
    if not location.is_file():
        raise ConfigError(f"{location} must be a file of weights, but is not there. Copy all files of the folder")
    if location.suffix == ".safetensors":
        return SafetensorsFile(location)
    return TorchFile(location)


def _weight_map(folder: Location, index: str) -> dict[str, str]:
    """Return the file of each tensor, as an index says.

    Raises:
        ConfigError: it says nothing of the kind, or names a file outside of the folder.
    """
    try:
        if size_of(folder / index) > _MOST_INDEX:
            raise ValueError(f"it has more than {_MOST_INDEX:,} bytes")
        places = json.loads((folder / index).read_bytes())["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise TypeError("`weight_map` is no dict of names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{folder / index} must be JSON with a `weight_map`, but cannot be read: {error!r}"
        ) from error
    for name in places.values():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "://" in name:
            raise ConfigError(f"{folder / index} must name files of its folder, but names {name!r}")
    return places
