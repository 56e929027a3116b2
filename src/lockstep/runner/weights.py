"""Loading weights from a checkpoint or a file, as far as they fit the model."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint import is_checkpoint, load_state, read_shapes
from lockstep.errors import ConfigError
from lockstep.model import unwrap_model
from lockstep.strategy import Strategy

REVISE_KEYS = ((r"^module\.", ""),)
_MOST_NAMED = 8
_logger = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Where weights come from.

    Attributes:
        path: a checkpoint, or a file of weights.
        strict: raise an error if weights are missing, unknown or of another shape; else log a warning. By default this
            is False for a model that is to be trained, else True.
        revise_keys: patterns in the names of a file's weights, and their replacements.
    """

    path: Path
    strict: bool | None = None
    revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS


def load_weights(strategy: Strategy, core: nn.Module, weights: Weights, *, training: bool) -> None:
    """Load a model's weights.

    Args:
        strategy: the strategy that has prepared the model.
        core: the user's own module; shows which weights are tied, that is, one parameter under several names.
        weights: where the weights come from.
        training: whether the model is to be trained, and may keep its own weights where the loaded ones do not fit,
            such as those of a head for other classes.

    **Collective**: every rank.

    Raises:
        ConfigError: there are no weights, none of them fit, or, if strict, some do not fit.
    """
    strict = not training if weights.strict is None else weights.strict
    own = strategy.model_state()
    strategy.load_state({**own, **_read_fitting(core, own, weights, strict=strict)})
    _logger.info("loaded the weights of %s", weights.path)


def load_checkpoint(
    model: nn.Module,
    filename: str | Path,
    map_location: Any = "cpu",
    strict: bool = False,
    revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
) -> None:
    """Load weights into a model that is not used by a Runner.

    Args:
        model: wrapped or not, but not sharded.
        filename: a checkpoint, or a file of weights.
        map_location: from MMEngine; has no effect, because weights go to the model's device.
        strict: raise an error if weights are missing, unknown or of another shape; else log a warning.
        revise_keys: patterns in the names of a file's weights, and their replacements.

    **Collective**: every rank, if `filename` is a checkpoint.

    Raises:
        ConfigError: there are no weights, none of them fit, or, if `strict`, some do not fit.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> net = nn.Linear(2, 1)
        >>> with TemporaryDirectory() as folder:
        ...     shifted = {f"module.{name}": value + 1 for name, value in net.state_dict().items()}
        ...     torch.save({"state_dict": shifted}, f"{folder}/net.pth")
        ...     before = net.bias.item()
        ...     load_checkpoint(net, f"{folder}/net.pth")
        >>> round(net.bias.item() - before, 6)
        1.0
    """
    core = unwrap_model(model)
    own = core.state_dict()
    weights = Weights(Path(filename), strict, revise_keys)
    core.load_state_dict({**own, **_read_fitting(core, own, weights, strict=strict)})


def _read_fitting(core: nn.Module, own: Mapping[str, Any], weights: Weights, *, strict: bool) -> dict[str, Any]:
    """Return the weights that can replace the model's own; tied weights under each of their names."""
    path, ties = weights.path, _ties(core)
    read: dict[str, Any]
    if is_checkpoint(path):
        fitting = _fitting(own, read_shapes(path, "model"), ties, path, strict=strict)
        read = load_state(path, {"model": {name: own[name] for name in fitting}})["model"]
    elif path.is_file():
        state = _renamed(_read_file(path), weights.revise_keys)
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        read = {name: state[name] for name in _fitting(own, shapes, ties, path, strict=strict)}
    else:
        what = "is a folder without a complete checkpoint in it" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"`load_from` must be a checkpoint or a file of weights, but {path} {what}. Download weights from the web "
            "first"
        )
    twins = ((name, next((twin for twin in ties.get(name, ()) if twin in read), None)) for name in own)
    return {**{name: read[twin] for name, twin in twins if twin is not None}, **read}


def _ties(core: nn.Module) -> dict[str, list[str]]:
    """Return, for each name of a parameter with several names, all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in core.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {name: same for same in names.values() if len(same) > 1 for name in same}


def _fitting(
    own: Mapping[str, Any], shapes: Mapping[str, Any], ties: Mapping[str, list[str]], path: Path, *, strict: bool
) -> list[str]:
    """Return the names of the weights that can be loaded, and report the others."""
    differ = [name for name in own if name in shapes and not _is_alike(own[name], shapes[name])]
    fitting = [name for name in own if name in shapes and name not in differ]
    there = {*shapes, *(twin for name in fitting for twin in ties.get(name, ()))}
    faults = {
        "missing": [name for name in own if name not in there],
        "of another shape": differ,
        "unknown to the model": [name for name in shapes if name not in own],
    }
    told = "; ".join(f"{what}: {_listed(names)}" for what, names in faults.items() if names)
    if told and (strict or not fitting):
        raise ConfigError(f"the weights in {path} do not fit the model ({told})")
    if told:
        _logger.warning(
            "some of the weights in %s do not fit the model (%s). The other %d are loaded", path, told, len(fitting)
        )
    return fitting


def _is_alike(own: Any, shape: Any) -> bool:
    return shape is None or not isinstance(own, Tensor) or tuple(own.shape) == tuple(shape)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _read_file(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, by their names in it.

    The file holds a state dict, or a dict with one under `state_dict` or `model`. Only tensors and plain values are
    unpickled: objects of any other class, such as those in MMEngine's checkpoints, become empty objects, and none of
    their code runs.

    Raises:
        ConfigError: the file cannot be read, or holds no weights.
    """
    try:
        # The classes and functions that the file refers to; torch before 1.6 did not list them.
        strangers = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipfile.is_zipfile(path) else []
        with torch.serialization.safe_globals([(_Empty, name) for name in strangers]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises almost any error for a file that is not a pickle
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ConfigError(f"{path} must be a file that torch.save has written, but cannot be read: {why}") from error
    if isinstance(content, dict):
        held = (content.get(key) for key in ("state_dict", "model"))
        content = next((state for state in held if isinstance(state, dict)), content)
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{path} must hold a state dict, alone or under 'state_dict' or 'model', but does not")
    return content


class _Empty:
    """A replacement for an object that is not needed: accepts any arguments and any state, and keeps none."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _renamed(state: Mapping[str, Tensor], revise_keys: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    renamed = {}
    for name, value in state.items():
        for pattern, replacement in revise_keys:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed
