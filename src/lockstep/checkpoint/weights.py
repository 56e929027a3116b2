"""Weights in a single file, as `torch.save` writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import ConfigError

_WRAPPER_PREFIX = "module."


def read_weights_file(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file by canonical name.

    The file holds a state dict, or a dict with one under `state_dict` or `model`. A prefix that a wrapper has left on
    every name is taken off. Only tensors and plain values are unpickled.

    Raises:
        ConfigError: there are no weights in the file.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{path} must hold a state dict, alone or under 'state_dict' or 'model', but does not")
    if content and all(name.startswith(_WRAPPER_PREFIX) for name in content):
        return {name.removeprefix(_WRAPPER_PREFIX): value for name, value in content.items()}
    return content
