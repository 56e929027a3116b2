"""What lies at a path: a file of weights, a folder of HuggingFace's, a checkpoint, or folders of runs with some.

Files that `torch.save` has written are read without running code from them.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.checkpoint import find_checkpoints, find_last_checkpoint, is_checkpoint, read_meta
from lockstep.checkpoint.files import POINTER_FILE
from lockstep.checkpoint.search import nearest_to, readable_manifest
from lockstep.errors import ConfigError, listed
from lockstep.location import Location, locate
from lockstep.weights.safetensors_file import ADAPTER_CONFIG, SafetensorsFile, TensorInfo

_FILES = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HOLDERS = ("state_dict", "model")  # of a state dict in a file of `torch.save`
_logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Weights that are read one by one."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of each tensor, by name."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some of its rows, in CPU memory."""


class ShardedFiles:
    """Weights in several files, with an index that says which tensor is in which.

    Args:
        folder: where they are.
        index: the name of the index, a JSON file with `weight_map`.

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


class TorchFile:
    """The weights in a file: a state dict, or a dict with one under `state_dict` or `model`.

    Only tensors and plain values are unpickled: objects of any other class, such as the `HistoryBuffer`s in
    MMEngine's checkpoints, become empty objects, and none of their code runs.

    Args:
        location: the file.

    Attributes:
        tensors: shape and dtype of each tensor, by name.

    **Cost**: a file on a disk is mapped into memory, and what is read comes and goes with the system's page cache. One
    written by torch before 1.6, or behind a URL, is held in memory.

    Raises:
        ConfigError: the file cannot be read, or holds no weights.
    """

    def __init__(self, location: Location) -> None:
        self._state = _state_in(_unpickled(location), location)
        for name, value in self._state.items():
            if value.is_meta or value.layout is not torch.strided:
                what = "is on the meta device" if value.is_meta else f"has the layout {value.layout}"
                raise ConfigError(f"`{name}` in {location} must be a dense tensor with values, but {what}")
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self._state.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some of its rows, in CPU memory. It must not be changed."""
        value = self._state[name]
        return value if rows is None else value[rows]


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
    complete = [one for one in find_checkpoints([location]) if one.parent == location and is_checkpoint(one)]
    manifests = {one: found for one in complete if (found := readable_manifest(one)) is not None}
    if manifests and (damaged := [one for one in complete if one not in manifests]):
        _logger.warning("checkpoints whose manifest is damaged are left out: %s", listed(damaged))
    done = {one: (found.meta.get("iter", 0), found.written["time"]) for one, found in manifests.items()}
    return max(manifests or complete, key=lambda one: done.get(one, (0, 0)), default=None)


def best_checkpoint_in(roots: Sequence[Location]) -> Location | None:
    """Return the best checkpoint that a CheckpointHook has kept in these folders, or in those of runs within them.

    It is what the newest checkpoint there knows of that knows one, so that of the last run with `save_best`; of several
    metrics, the best by the first.
    """
    for one in find_checkpoints(roots):
        with suppress(ConfigError):  # it is damaged, or another process removes it
            kept = read_meta(one).get("checkpoint_hook", {}).get("best", {})
            for path in [str(best["path"]) for best in kept.values()][:1]:  # by the first metric
                place = locate(moved_with(one, path))
                if is_checkpoint(place):
                    return place
    return None


def moved_with(checkpoint: Location, path: str) -> str:
    """Return where a checkpoint is that another one knows by a path: beside it, if the work_dir was moved or copied."""
    *_, run, name = PurePosixPath(path).parts
    beside = checkpoint.parent.parent / run / name
    return str(beside) if is_checkpoint(beside) else path


def check_weights(location: Location, argument: str) -> None:
    """Raise an error if there are no weights at a path. Their files are not opened.

    Args:
        location: the path.
        argument: where it was given, for the message.

    Raises:
        ConfigError: there is nothing, or a folder without weights; or the path cannot be reached.
    """
    try:
        if not location.is_file() and find_checkpoint(location) is None and _weights_in(location) is None:
            raise _no_weights(location, argument)
    except OSError as error:
        raise ConfigError(
            f"{argument} must be a checkpoint or weights, but {location} cannot be read: {error}"
        ) from error


def open_source(location: Location) -> WeightSource:
    """Open the weights at a path that is no checkpoint.

    Raises:
        ConfigError: there are no weights, or they cannot be read; the message says what there is.
    """
    try:
        name = "" if location.is_file() else _weights_in(location)
        if name is None:
            raise _no_weights(location, "the weights to load")
        return ShardedFiles(location, name) if name in _INDICES else _file(location / name if name else location)
    except OSError as error:
        raise ConfigError(f"{location} cannot be read: {error}") from error


def _weights_in(folder: Location) -> str | None:
    """Return the name of the file of weights in a folder, or of the index of several; None if it has neither."""
    names = (name for pair in zip(_FILES, _INDICES, strict=True) for name in pair)
    return next((name for name in names if (folder / name).is_file()), None)


def _no_weights(location: Location, argument: str) -> ConfigError:
    """Return the error that says what is at a path instead of weights."""
    wanted = f"{argument} must be a checkpoint, or a folder or a file of weights, but {location}"
    near = nearest_to(location)
    if not location.is_dir():
        elsewhere = "Download weights from the web first; those in a bucket may be given as s3://BUCKET/NAME"
        return ConfigError(f"{wanted} does not exist. {elsewhere if near is None else f'There is {near}'}")
    if near is not None:
        return ConfigError(f"{wanted} has no {POINTER_FILE} that leads to one. The newest one in it is {near}")
    found = sorted(one.name for one in location.iterdir())
    if ADAPTER_CONFIG in found:
        return ConfigError(
            f"{wanted} has an adapter alone. Load it with peft.PeftModel.from_pretrained(model, FOLDER, "
            "is_trainable=True), and hand over the result"
        )
    there = f"It holds {listed(found, most=6)}" if found else "It is empty"
    return ConfigError(f"{wanted} is a folder without a complete checkpoint in it, or {_FILES[0]}. {there}")


def _file(location: Location) -> WeightSource:
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


def _unpickled(location: Location) -> Any:
    try:
        with nullcontext(location) if isinstance(location, Path) else location.open("rb") as file:
            return _load(file)
    except Exception as error:  # torch.load raises almost any error for a file that is not a pickle
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        if "weights_only" in why:  # torch goes on to say how to run what is in the file
            why = next((line for line in why.split("\n") if line.startswith("Unsupported")), type(error).__name__)
        raise ConfigError(
            f"{location} must be a file that torch.save has written, but cannot be read: {why}"
        ) from error


def _load(file: Any) -> Any:
    """Load what lies at a path, or in an open file."""
    rewind = getattr(file, "seek", lambda _: None)
    is_zip = zipfile.is_zipfile(file)
    rewind(0)
    # The classes and functions that the file refers to; torch before 1.6 did not list them.
    classes = torch.serialization.get_unsafe_globals_in_checkpoint(file) if is_zip else []
    rewind(0)
    with torch.serialization.safe_globals([(_Empty, name) for name in classes]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip and isinstance(file, Path))


def _state_in(content: Any, location: Location) -> dict[str, Tensor]:
    states = {"it": content}
    if isinstance(content, Mapping):
        states = {f"its {key!r}": content[key] for key in _HOLDERS if isinstance(content.get(key), Mapping)} | states
    for state in states.values():
        if isinstance(state, Mapping):
            # A module may keep anything under its `_extra_state`.
            values = {name: value for name, value in state.items() if not str(name).endswith("_extra_state")}
            if values and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in values.items()):
                return values
    where, state = next(iter(states.items()))
    what = "is a " + type(state).__name__
    if isinstance(state, _Empty):
        what = "is an object of another class, such as a whole model. Save its state_dict()"
    if isinstance(state, Mapping):
        others = [repr(key) for key, value in state.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
        what = f"holds what is no named tensor: {listed(others, most=6)}" if state else "is an empty dict"
    raise ConfigError(
        f"{location} must hold weights, as a dict of tensors, alone or under 'state_dict' or 'model', but "
        f"{where} {what}"
    )


class _Empty:
    """A replacement for an object that is not needed: accepts any arguments, state and items, and keeps none."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass
