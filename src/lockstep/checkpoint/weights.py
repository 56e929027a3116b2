"""Weights in a single file, as `torch.save` writes them."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import ConfigError


class _Empty:
    """Stands for an object that is not wanted; takes whatever it is made of, and forgets it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def read_weights_file(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file by the names that they have there.

    The file holds a state dict, or a dict with one under `state_dict` or `model`. Only tensors and plain values are
    unpickled: objects of any other class, such as those that MMEngine's checkpoints hold beside the weights, become
    empty ones, and none of their code runs.

    Raises:
        ConfigError: there are no weights in the file.
    """
    try:
        with torch.serialization.safe_globals([(_Empty, name) for name in _strangers(path)]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} must be a file that torch.save has written, but cannot be read: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{path} must hold a state dict, alone or under 'state_dict' or 'model', but does not")
    return content


def _strangers(path: Path) -> list[str]:
    """Return the classes and functions that a file names, but that a file of weights has no need of."""
    if not zipfile.is_zipfile(path):  # written by a torch before 1.6, of which it can't be told
        return []
    return torch.serialization.get_unsafe_globals_in_checkpoint(path)
