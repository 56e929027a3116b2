"""Which weights are written, under which names, and what is written beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from lockstep.errors import ConfigError, counted
from lockstep.weights.safetensors_file import TensorInfo

Form: TypeAlias = Literal["safetensors", "hf", "torch", "pretrained"]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Selection(NamedTuple):
    """The weights to write.

    Attributes:
        origins: for each name in the file, the name where the tensor is stored.
        infos: for each name in the file, shape and dtype of what is written.
        files: further files, by name, as JSON values.
        stem: name of the file of weights, without its ending.
        left_out: names of stored weights that are not written, and are not tied to one that is.
    """

    origins: dict[str, str]
    infos: dict[str, TensorInfo]
    files: dict[str, Any]
    stem: str
    left_out: list[str]


def select(
    stored: Mapping[str, TensorInfo],
    description: Mapping[str, Any],
    form: Form,
    *,
    what: str,
    prefix: str | None = None,
    revise_keys: Sequence[tuple[str, str]] = (),
    dtype: str | torch.dtype | None = None,
) -> Selection:
    """Return which weights to write.

    Args:
        stored: shape and dtype of each weight, by name.
        description: what the model says of them; see `describe_model`.
        form: `"safetensors"`, all of them; `"hf"`, what `from_pretrained` loads; `"torch"`, all of them, tied ones
            under each name; `"pretrained"`, as `"hf"` if the model is one of a library's, else as `"safetensors"`.
        what: whose weights they are, for messages.
        prefix: write only the weights under this name, without it.
        revise_keys: patterns in names, and their replacements.
        dtype: convert floating-point weights to it.

    Raises:
        ConfigError: there are no such weights, the model is not one of a library's, or two weights get one name.
    """
    described: list[Mapping[str, Any]] = list(description.get("pretrained", ()))
    prefix = None if prefix is None else prefix.rstrip(".") + "." if prefix else ""
    chosen = _choose(described, form, prefix, what)
    names: Mapping[str, str] | None = None if chosen is None else chosen["names"]
    within = prefix if prefix is not None else "" if chosen is None else chosen["prefix"]
    inside = [name for name in stored if name.startswith(within)]
    if not inside:
        parts = sorted({name.partition(".")[0] for name in stored})
        raise ConfigError(
            f"`prefix` must be the name of a part of {what}, out of {', '.join(parts)}, but is '{within[:-1]}'"
        )
    kept = _kept_names(inside, description.get("tied", ()))
    origins: dict[str, str] = {}
    for name in inside:
        if (form != "torch" and kept[name] != name) or (names is not None and name not in names):
            continue
        written = name.removeprefix(within) if names is None else names[name]
        for pattern, replacement in revise_keys:
            written = _replaced(pattern, replacement, written)
        if written in origins:
            raise ConfigError(f"each weight must keep a name of its own, but two of {what} would be called `{written}`")
        origins[written] = kept[name] if form == "torch" else name
    target = _dtype(dtype)
    infos = {name: _converted(stored[origin], target) for name, origin in origins.items()}
    files = {} if chosen is None else _with_dtype(chosen["files"], infos)
    tensors = _kept_names([*stored], description.get("tied", ()))
    taken = {tensors[origin] for origin in origins.values()}
    left_out = [name for name in stored if tensors[name] not in taken]
    return Selection(origins, infos, files, "model" if chosen is None else chosen["stem"], left_out)


def _choose(described: Sequence[Mapping[str, Any]], form: Form, prefix: str | None, what: str) -> Any:
    """Return the description of the library's model that is written; None if none is."""
    if form == "torch":
        return None
    if form == "safetensors":  # all weights under the names that they have: those of an adapter would be few
        return next((one for one in described if one["prefix"] == (prefix or "") and one["names"] is None), None)
    fitting = [one for one in described if prefix is None or one["prefix"] == prefix]
    if len(fitting) > 1:
        names = ", ".join(one["prefix"].rstrip(".") for one in fitting)
        raise ConfigError(
            f"`prefix` must say which of the models of {what} is written, out of {names}, but is not given"
        )
    if fitting or form == "pretrained":
        return fitting[0] if fitting else None
    inner = ", ".join(one["prefix"].rstrip(".") for one in described)
    raise ConfigError(
        f"{what} must have a config of HuggingFace's to be written for from_pretrained, but has none"
        + (f" under this prefix; it has under {inner}" if inner else "")
        + ". Write the weights alone, as safetensors, or give a folder with the config, by --files-from"
    )


def _kept_names(names: Sequence[str], tied: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return for each name the one under which its tensor is kept."""
    kept = {name: name for name in names}
    for same in tied:
        present = [name for name in same if name in kept]
        kept |= dict.fromkeys(present, *present[:1])
    return kept


def _replaced(pattern: str, replacement: str, name: str) -> str:
    try:
        return re.sub(pattern, replacement, name)
    except (re.error, IndexError) as error:
        raise ConfigError(
            f"`revise_keys` must be regular expressions and their replacements, but {pattern!r} -> {replacement!r} is "
            f"not: {error}"
        ) from error


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in _DTYPES:
        raise ConfigError(f"`dtype` must be one of {', '.join(_DTYPES)}, but is {dtype!r}")
    return _DTYPES.get(name)


def _converted(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return info if dtype is None or not info.dtype.is_floating_point else info._replace(dtype=dtype)


def _with_dtype(files: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the files with the dtype of the weights in `config.json`, which decides how they are loaded."""
    written = deepcopy(dict(files))
    floating = next((info.dtype for info in infos.values() if info.dtype.is_floating_point), None)
    config = written.get("config.json", {})
    for key in ("dtype", "torch_dtype"):
        if key in config and floating is not None:
            config[key] = str(floating).removeprefix("torch.")
    return written


def told_left_out(left_out: Sequence[str]) -> str:
    """Return the names that are left out, by the parts of the model that they belong to.

    Example:
        >>> told_left_out(["head.weight", "head.bias", "scale"])
        '3 weights of head, scale'
    """
    parts = dict.fromkeys(name.partition(".")[0] for name in left_out)
    return f"{counted(len(left_out), 'weight')} of {', '.join(parts)}"
