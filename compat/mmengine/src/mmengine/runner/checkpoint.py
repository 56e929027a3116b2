"""Checkpoints of one file, as MMEngine writes and reads them; a checkpoint folder of lockstep can be read, too."""

from __future__ import annotations

import io
import logging
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.hub import load_state_dict_from_url

from lockstep.checkpoint import find_last_checkpoint, read_infos, read_tensors
from lockstep.checkpoint.search import nearest_to
from lockstep.location import locate
from lockstep.model import unwrap_model
from lockstep.weights import find_checkpoint
from mmengine import fileio
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner.saved import file_meta

_Logger: TypeAlias = logging.Logger | str | None
_Loader: TypeAlias = Callable[..., Any]

REVISE_KEYS = ((r"^module\.", ""),)

__all__ = [
    "CheckpointLoader",
    "find_latest_checkpoint",
    "get_state_dict",
    "load_checkpoint",
    "load_state_dict",
    "save_checkpoint",
    "weights_to_cpu",
]


class CheckpointLoader:
    """Reads checkpoints, each through the loader that is registered for the beginning of its name.

    Without a protocol it is a path on the disk: a file of `torch.save`, a safetensors file, or a checkpoint folder of
    lockstep. ``http://``, ``https://``, ``torchvision://NAME`` and every URL that fsspec can open are there, too.
    """

    _schemes: ClassVar[dict[str, _Loader]] = {}

    @classmethod
    def register_scheme(cls, prefixes: str | Sequence[str], loader: _Loader | None = None, force: bool = False) -> Any:
        """Register a loader for names with one of these beginnings, by a call or as a decorator.

        Args:
            prefixes: one beginning or several, such as `"mystore://"`; regular expressions.
            loader: called with the name and `map_location`; without it a decorator is returned.
            force: replace one that is registered.

        Raises:
            KeyError: a beginning is taken.
        """
        names = [prefixes] if isinstance(prefixes, str) else list(prefixes)
        if loader is None:
            return lambda found: cls.register_scheme(names, found, force) or found
        for name in names:
            if name in cls._schemes and not force:
                raise KeyError(f"`{name}` has a loader already; replace it with force=True")
        cls._schemes.update(dict.fromkeys(names, loader))
        # The longest first, so that a path on the disk, whose beginning is "", is tried last.
        cls._schemes = dict(sorted(cls._schemes.items(), reverse=True))
        return None

    @classmethod
    def load_checkpoint(cls, filename: str | Path, map_location: Any = None, logger: _Logger = "current") -> Any:
        """Return what a checkpoint holds.

        Args:
            filename: a path, a URL, or a name with a registered beginning.
            map_location: as for `torch.load`.
            logger: as for `print_log`, which says what is loaded.

        Raises:
            FileNotFoundError: there is no such file.
        """
        filename = str(filename)
        loader = next(one for prefix, one in cls._schemes.items() if re.match(prefix, filename))
        print_log(f"loading {filename}, by {loader.__name__}", logger)
        return loader(filename, map_location)


def _read(file: Any, map_location: Any) -> Any:
    """Return what `torch.save` has written. Tensors, plain values, arrays and HistoryBuffers are read; no code is run.

    Objects of other classes become empty ones, and a warning names the classes.
    """
    is_zip = zipfile.is_zipfile(file)
    if not isinstance(file, str | Path):
        file.seek(0)
    known = _known()
    unknown = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - known.keys() if is_zip else set()
    if not isinstance(file, str | Path):
        file.seek(0)
    if unknown:
        print_log(f"objects of {', '.join(sorted(unknown))} in the checkpoint are left out", "current", logging.WARNING)
    safe: list[Any] = [*((entry, name) for name, entry in known.items()), *((Unread, name) for name in unknown)]
    with torch.serialization.safe_globals([*safe, *_dtypes()]):
        return torch.load(file, map_location=map_location, weights_only=True)


def _known() -> dict[str, Any]:
    rebuild, scalar = np._core.multiarray._reconstruct, np._core.multiarray.scalar  # type: ignore[attr-defined]
    return {
        "mmengine.logging.history_buffer.HistoryBuffer": HistoryBuffer,
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        **{f"numpy.{core}.multiarray._reconstruct": rebuild for core in ("core", "_core")},
        **{f"numpy.{core}.multiarray.scalar": scalar for core in ("core", "_core")},
    }


def _dtypes() -> Iterable[Any]:
    return [getattr(np.dtypes, name) for name in np.dtypes.__all__]


class Unread:
    """In place of an object whose class is not known to be safe: takes any arguments and state, and keeps none."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass


def load_from_local(filename: str, map_location: Any = None) -> Any:
    """Return what a file on the disk holds, or the weights and metadata of a checkpoint folder."""
    path = Path(filename).expanduser()
    if path.is_dir() and (folder := find_checkpoint(path)) is not None:
        names = list(read_infos(folder, "model"))
        state = OrderedDict(read_tensors(folder, "model", names))
        weights = {name: value.to(map_location or "cpu") for name, value in state.items()}
        return {"state_dict": weights, "meta": file_meta(folder)}
    if not path.is_file():
        near = nearest_to(path)
        raise FileNotFoundError(f"there is no checkpoint `{filename}`{'' if near is None else f'. There is {near}'}")
    if path.suffix == ".safetensors":
        return {"state_dict": _of_safetensors(path, map_location)}
    return _read(path, map_location)


def load_from_http(filename: str, map_location: Any = None, model_dir: str | None = None) -> Any:
    """Return what a file behind a web address holds; it is kept in torch's cache."""
    with torch.serialization.safe_globals([*((entry, name) for name, entry in _known().items()), *_dtypes()]):
        return load_state_dict_from_url(filename, model_dir, map_location, weights_only=True)


def load_from_url(filename: str, map_location: Any = None) -> Any:
    """Return what a file behind a URL holds that fsspec can open."""
    return _read(io.BytesIO(fileio.get(filename)), map_location)


def load_from_torchvision(filename: str, map_location: Any = None) -> Any:
    """Return the weights of one of torchvision's models: ``torchvision://resnet50`` or ``torchvision://ResNet50_Weights.DEFAULT``."""
    from torchvision import models

    name = filename.partition("://")[2]
    weights = models.get_weight(name) if "." in name else next(iter(models.get_model_weights(name)))
    return load_from_http(weights.url, map_location)


def load_from_openmmlab(filename: str, map_location: Any = None) -> Any:
    """Raise an error: the table of these names is MMEngine's own."""
    raise ValueError(
        f"`{filename}` is a name in a table that belongs to MMEngine, which lockstep-mmengine does not have. Give the "
        "file's address or path, or register a loader by CheckpointLoader.register_scheme"
    )


def _of_safetensors(path: Path, map_location: Any) -> dict[str, Any]:
    from lockstep.weights import open_source

    source = open_source(locate(path))
    return {name: source.read(name).to(map_location or "cpu", copy=True) for name in source.tensors}


def _load_checkpoint(filename: str | Path, map_location: Any = None, logger: _Logger = None) -> Any:
    """Return what a checkpoint holds; see `CheckpointLoader.load_checkpoint`."""
    return CheckpointLoader.load_checkpoint(filename, map_location, logger)


def _load_checkpoint_with_prefix(prefix: str, filename: str | Path, map_location: Any = None) -> dict[str, Any]:
    """Return the weights of a part of a model, whose names begin with `prefix`, without it."""
    checkpoint = _load_checkpoint(filename, map_location)
    state = checkpoint.get("state_dict", checkpoint)
    prefix = prefix if prefix.endswith(".") else f"{prefix}."
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not found:
        raise AssertionError(f"{filename} has no weights whose names begin with `{prefix}`")
    return found


def _load_checkpoint_to_model(
    model: nn.Module,
    checkpoint: Any,
    strict: bool = False,
    logger: _Logger = None,
    revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
) -> Any:
    """Load the weights in a checkpoint that has been read into a model, and return the checkpoint."""
    state = checkpoint.get("state_dict", checkpoint)
    metadata = getattr(state, "_metadata", None)
    for pattern, replacement in revise_keys:
        state = OrderedDict((re.sub(pattern, replacement, name), value) for name, value in state.items())
    if metadata is not None:
        state._metadata = metadata
    load_state_dict(model, state, strict, logger)
    return checkpoint


def load_checkpoint(
    model: nn.Module,
    filename: str | Path,
    map_location: Any = None,
    strict: bool = False,
    logger: _Logger = None,
    revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
) -> Any:
    """Load the weights of a checkpoint into a model, and return all that the checkpoint holds.

    Args:
        model: wrapped or not.
        filename: as for `CheckpointLoader.load_checkpoint`.
        map_location: as for `torch.load`.
        strict: raise an error if weights are missing, unknown or of another shape; else log which.
        logger: as for `print_log`.
        revise_keys: patterns in the names of the weights, and their replacements.

    Raises:
        RuntimeError: the file holds no dict, or, if `strict`, the weights do not fit.
    """
    checkpoint = _load_checkpoint(filename, map_location, logger)
    if not isinstance(checkpoint, Mapping):
        raise RuntimeError(f"{filename} must hold a dict with weights, but holds a {type(checkpoint).__name__}")
    return _load_checkpoint_to_model(model, checkpoint, strict, logger, revise_keys)


def load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = False, logger: _Logger = None
) -> None:
    """Load weights into a module; what does not fit is logged, or raised if `strict`.

    As torch's, with hooks and versions of modules, except that without `strict` a weight of another shape is left out
    and logged as well.

    Raises:
        RuntimeError: weights are missing, unknown or of another shape, and `strict` is set.
    """
    core = unwrap_model(module)
    state: Any = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", {})
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []

    def load(part: nn.Module, prefix: str) -> None:
        local = metadata.get(prefix[:-1], {})
        part._load_from_state_dict(state, prefix, local, True, missing, unexpected, errors)
        for name, child in part._modules.items():
            if child is not None:
                load(child, f"{prefix}{name}.")

    load(core, "")
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    told = list(errors)
    if unexpected:
        told.append(f"unknown to the model: {', '.join(unexpected)}")
    if missing:
        told.append(f"missing: {', '.join(missing)}")
    if not told:
        return
    message = "\n".join(["some weights do not fit the model", *told])
    if strict:
        raise RuntimeError(message)
    print_log(message, logger, logging.WARNING)


def get_state_dict(
    module: nn.Module, destination: Any = None, prefix: str = "", keep_vars: bool = False
) -> OrderedDict[str, torch.Tensor]:
    """Return the weights of a module, of the inner one if it is wrapped."""
    state: OrderedDict[str, torch.Tensor] = unwrap_model(module).state_dict(
        **({} if destination is None else {"destination": destination}), prefix=prefix, keep_vars=keep_vars
    )
    return state


def weights_to_cpu(state_dict: Mapping[str, torch.Tensor]) -> OrderedDict[str, torch.Tensor]:
    """Return weights, with the versions of their modules, in CPU memory."""
    copied = OrderedDict((name, value.cpu()) for name, value in state_dict.items())
    copied._metadata = getattr(state_dict, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return copied


def save_checkpoint(
    checkpoint: Any,
    filename: str | Path,
    file_client_args: Mapping[str, Any] | None = None,
    backend_args: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint as one file by `torch.save`; on a disk, it appears as a whole or not at all.

    Args:
        checkpoint: what `torch.save` can write.
        filename: a path or URL.
        file_client_args: MMEngine's older name of `backend_args`.
        backend_args: as for `get_file_backend`.
    """
    backend = fileio.get_file_backend(filename, backend_args=backend_args or file_client_args)
    if not isinstance(backend, fileio.LocalBackend):
        with io.BytesIO() as content:
            torch.save(checkpoint, content)
            backend.put(content.getvalue(), str(filename))
        return
    path = Path(filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            torch.save(checkpoint, file)
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def find_latest_checkpoint(path: str | Path) -> str | None:
    """Return the last checkpoint in a folder: the one that `last_checkpoint` names, or lockstep's; None without one."""
    named = Path(path, "last_checkpoint")
    text = named.read_text(encoding="utf-8") if named.is_file() else ""
    if text and "\n" not in text:  # MMEngine's, which holds the path alone
        return text
    found = find_last_checkpoint(Path(path)) if Path(path).is_dir() else None
    if found is None:
        print_log(f"there is no last checkpoint in {path}", "current")
    return None if found is None else str(found)


CheckpointLoader.register_scheme("", load_from_local)
CheckpointLoader.register_scheme(("http://", "https://"), load_from_http)
CheckpointLoader.register_scheme(("s3://", r"\w+:s3://", "gs://", "memory://"), load_from_url)
CheckpointLoader.register_scheme(("torchvision://", "modelzoo://"), load_from_torchvision)
CheckpointLoader.register_scheme(("open-mmlab://", "openmmlab://", "mmcls://"), load_from_openmmlab)
