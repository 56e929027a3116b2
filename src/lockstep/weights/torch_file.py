"""Files that `torch.save` has written, read without running code from them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError, listed
from lockstep.location import Location
from lockstep.weights.safetensors_file import TensorInfo

_HOLDERS = ("state_dict", "model")


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
    strangers = torch.serialization.get_unsafe_globals_in_checkpoint(file) if is_zip else []
    rewind(0)
    with torch.serialization.safe_globals([(_Empty, name) for name in strangers]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip and isinstance(file, Path))


def _state_in(content: Any, location: Location) -> dict[str, Tensor]:
    state = content
    if isinstance(content, Mapping):
        held = (content.get(key) for key in _HOLDERS)
        state = next((one for one in held if isinstance(one, Mapping)), content)
    if isinstance(state, Mapping):
        # A module may keep anything under its `_extra_state`.
        values = {name: value for name, value in state.items() if not str(name).endswith("_extra_state")}
        if values and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in values.items()):
            return values
    what = "is a " + type(content).__name__
    if isinstance(content, _Empty):
        what = "is an object of another class, such as a whole model. Save its state_dict()"
    if isinstance(content, Mapping):
        what = f"has the keys {listed(map(repr, content), most=6)}" if content else "is an empty dict"
    raise ConfigError(
        f"{location} must hold weights, as a dict of tensors, alone or under 'state_dict' or 'model', but it {what}"
    )


class _Empty:
    """A replacement for an object that is not needed: accepts any arguments, state and items, and keeps none."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass
