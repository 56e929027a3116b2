"""Nested values as JSON, and back: what a manifest holds of a state besides its tensors.

A value of JSON stands for itself. An object with one key that begins with `$` stands for what JSON does not have:

| JSON | value |
|---|---|
| `{"$tensor": "model.weight"}` | the tensor of that name |
| `{"$array": "ranks.0.random.numpy.1"}` | the same as an array of numpy |
| `{"$tuple": [1, 2]}` | a tuple |
| `{"$dict": [[0, "a"]]}` | a dict whose keys are not all strings, or look like one of these |
| `{"$float": "inf"}` | `inf`, `-inf` or `nan` |
| `{"$dtype": "float32"}` | a dtype of torch |
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Path: TypeAlias = tuple[str, ...]


def encode(value: Any, path: Path = (), tensors: dict[str, Tensor] | None = None) -> Any:
    """Return a value as JSON.

    Args:
        value: nested dicts, lists and tuples of tensors, arrays and plain values.
        path: the keys that lead to it, for names and messages.
        tensors: where tensors are put, by the names that stand for them; None refuses them.

    Raises:
        ConfigError: there is something else in it.
    """
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    if tensors is not None and torch is not None:
        if isinstance(value, torch.Tensor):
            return {"$tensor": _put(value.detach(), path, tensors)}
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
            return {"$array": _put(torch.from_numpy(value.copy()), path, tensors)}
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case str():
            return str(value)
        case Mapping():
            return _encode_dict(value, path, tensors)
        case list():
            return [encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        case tuple():
            return {"$tuple": [encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]}
    if torch is not None and isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    raise ConfigError(
        f"`{'.'.join(path)}` must be {'' if tensors is None else 'a tensor, '}a number, a string, None, or a dict, "
        f"list or tuple of them to be saved, but is a {type(value).__module__}.{type(value).__qualname__}. Convert it "
        "where it is added to the checkpoint: objects are not saved, because reading one would run code"
    )


def decode(node: Any, stored: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value that JSON stands for.

    Args:
        node: what `encode` returned.
        stored: returns what is stored by itself, by its `$` key and what that holds; None where there is no such thing.

    Raises:
        ConfigError: it is none of the forms of this module.
    """
    if isinstance(node, list):
        return [decode(item, stored) for item in node]
    if not isinstance(node, dict):
        return node
    tag, held = tagged(node)
    match tag:
        case None:
            return {key: decode(item, stored) for key, item in node.items()}
        case "$tensor" | "$array" | "$item" if stored is not None:
            return stored(tag, held)
        case "$tuple" if isinstance(held, list):
            return tuple(decode(item, stored) for item in held)
        case "$dict" if isinstance(held, list):
            return {decode(key): decode(item, stored) for key, item in held}
        case "$float" if held in ("inf", "-inf", "nan"):
            return float(held)
        case "$dtype":
            import torch

            if isinstance(dtype := getattr(torch, str(held), None), torch.dtype):
                return dtype
    raise ConfigError(f"a value must be JSON or one of the forms of lockstep, but is {node!r}")


def tagged(node: Any) -> tuple[str | None, Any]:
    """Return the `$` key of a node and what it holds; None and None if the node has none."""
    if isinstance(node, dict) and len(node) == 1:
        ((key, held),) = node.items()
        if key.startswith("$"):
            return key, held
    return None, None


def merge(first: Any, second: Any) -> Any:
    """Return the union of what two ranks have encoded; where both have a value, that of the first one."""
    if isinstance(first, dict) and isinstance(second, dict) and tagged(first)[0] is None and tagged(second)[0] is None:
        return {**second, **{key: merge(item, second[key]) if key in second else item for key, item in first.items()}}
    return first


def leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is in an encoded dict, by the keys that lead to it."""
    if isinstance(node, dict) and tagged(node)[0] is None:
        for key, item in node.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, node


def _encode_dict(value: Mapping[Any, Any], path: Path, tensors: dict[str, Tensor] | None) -> Any:
    items = {key: encode(item, (*path, str(key)), tensors) for key, item in value.items()}
    if all(type(key) is str for key in items) and tagged(items)[0] is None:
        return items
    return {"$dict": [[encode(key, (*path, str(key))), item] for key, item in items.items()]}


def _put(tensor: Tensor, path: Path, tensors: dict[str, Tensor]) -> str:
    name = ".".join(path)
    if name in tensors:
        raise ConfigError(f"each tensor to be saved must have a name of its own, but two are called {name}. Rename one")
    tensors[name] = tensor
    return name
