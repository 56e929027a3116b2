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
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from lockstep.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Path: TypeAlias = tuple[str, ...]

MOST_NESTED = 100
"""How deep dicts, lists and tuples may lie in one another."""
_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any, path: Path = (), tensors: dict[str, Tensor] | None = None) -> Any:
    """Return a value as JSON.

    Args:
        value: nested dicts, lists and tuples of tensors, arrays and plain values.
        path: the keys that lead to it, for names and messages.
        tensors: where tensors are put, by the names that stand for them; None refuses them.

    Raises:
        ConfigError: there is something else in it.
    """
    if len(path) > MOST_NESTED:
        raise ConfigError(
            f"`{'.'.join(path[:3])}...` must lie at most {MOST_NESTED} dicts or lists deep to be saved. Flatten it"
        )
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
        CheckpointError: it is none of the forms of this module.
    """
    if isinstance(node, list):
        return [decode(item, stored) for item in node]
    if not isinstance(node, dict):
        return node
    tag, held = tagged(node)
    match tag:
        case None:
            return {key: decode(item, stored) for key, item in node.items()}
        case "$tensor" | "$array" if stored is not None:
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
    raise CheckpointError(f"a value must be JSON or one of the forms of lockstep, but is {node!r}")


def check_forms(node: Any, dtypes: Mapping[str, str], path: Path = ()) -> Iterator[str]:
    """Check that JSON consists of the forms of this module, and yield the names of the tensors that it refers to.

    Args:
        node: what `encode` returned, or what a stranger says that it has.
        dtypes: the names of the tensors that there are, and of their dtypes.
        path: the keys that lead to it.

    Raises:
        ValueError: it is none of the forms; the message names the keys that lead to it.
    """
    if len(path) > 3 * MOST_NESTED:  # a tag and its list count, too
        raise ValueError(f"`{'.'.join(path[:3])}...` is nested deeper than {MOST_NESTED}")
    tag, held = tagged(node)
    match tag:
        case None:
            items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
            for key, item in items:
                yield from check_forms(item, dtypes, (*path, str(key)))
            if isinstance(node, dict | list) or (isinstance(node, _PLAIN) and _is_finite(node)):
                return
        case "$tensor" | "$array" if isinstance(held, str) and held in dtypes:
            if tag == "$tensor" or not dtypes[held].startswith(("bfloat16", "float8")):  # which numpy lacks
                yield held
                return
        case "$tuple" if isinstance(held, list):
            yield from check_forms(held, dtypes, (*path, tag))
            return
        case "$dict" if isinstance(held, list) and all(_is_pair(pair) for pair in held):
            for key, item in held:
                yield from check_forms(item, dtypes, (*path, str(key)))
            return
        case "$float" if held in ("inf", "-inf", "nan"):
            return
        case "$dtype" if isinstance(held, str):
            return
    raise ValueError(f"`{'.'.join(path)}` is none of the forms of a value, but {reprlib.repr(node)}")


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


def _is_finite(node: Any) -> bool:
    return not isinstance(node, float) or math.isfinite(node)


def _is_pair(node: Any) -> bool:
    return isinstance(node, list) and len(node) == 2 and _is_key(node[0])


def _is_key(node: Any) -> bool:
    """Return whether an encoded key can be hashed when it is decoded."""
    tag, held = tagged(node)
    if tag == "$tuple":
        return isinstance(held, list) and all(map(_is_key, held))
    return tag in ("$float", "$dtype") or isinstance(node, _PLAIN)


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
