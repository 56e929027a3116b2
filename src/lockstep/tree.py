"""Nested data: trees of dicts, lists, tuples, namedtuples and dataclasses, traversed and rebuilt with their types.

A user's class becomes a node by two methods: ``tree_children() -> dict[str, Any]`` and
``tree_rebuild(children) -> Self``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, Self, runtime_checkable


@runtime_checkable
class TreeNode(Protocol):
    """A class that can be traversed: it names its children, and can be rebuilt from changed ones."""

    def tree_children(self) -> dict[str, Any]:
        """Return the children by name."""

    def tree_rebuild(self, children: dict[str, Any]) -> Self:
        """Return a new object that holds `children` and is otherwise equal."""


def is_tensordict(value: Any) -> bool:
    """Return whether a value is a `TensorDict` or tensorclass: tensors of one batch size, handled as one value.

    As a batch it is given to a model whole, although a `TensorDict` is a mapping.

    **Source**: `tensordict.is_tensor_collection` (tensordict 0.15).
    """
    package = sys.modules.get("tensordict")
    return package is not None and bool(package.is_tensor_collection(value))


def tree_map(func: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same shape and types, with `func` applied to every leaf.

    A leaf is anything but a dict, list, tuple, dataclass instance, tensorclass or `TreeNode`; strings are leaves.

    Example:
        >>> tree_map(lambda x: x + 1, {"a": [1, (2, 3)]})
        {'a': [2, (3, 4)]}
    """
    children = _children(tree)
    if children is None:
        return func(tree)
    return _rebuild(tree, {key: tree_map(func, child) for key, child in children.items()})


def map_children(func: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same type, with `func` applied to each child of its topmost node; a leaf as it is.

    Example:
        >>> map_children(len, {"a": [1, 2], "b": (3,)})
        {'a': 2, 'b': 1}
    """
    children = _children(tree)
    if children is None:
        return tree
    return _rebuild(tree, {key: func(child) for key, child in children.items()})


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves, in the order in which `tree_map` visits them."""
    return [leaf for _, leaf in tree_items(tree)]


def tree_items(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, such as ``"losses[0].cls"``, which no other has; that of a bare leaf is empty.

    Example:
        >>> list(tree_items({"a": [1, 2], "b.c": 3}))
        [('a[0]', 1), ('a[1]', 2), ("['b.c']", 3)]
    """
    children = _children(tree)
    if children is None:
        yield path, tree
        return
    for key, child in children.items():
        is_name = isinstance(key, str) and key and "." not in key and "[" not in key
        step = f"{path}[{key!r}]" if not is_name else f"{path}.{key}" if path else key
        yield from tree_items(child, step)


def _children(tree: Any) -> dict[Any, Any] | None:
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, (list, tuple)):
        names = getattr(tree, "_fields", range(len(tree)))
        return dict(zip(names, tree, strict=True))
    if isinstance(tree, type):
        return None  # a class has the methods of its instances, but is not a node
    if isinstance(tree, TreeNode):
        return tree.tree_children()
    if is_tensordict(tree):
        return dict(tree.items())
    if is_dataclass(tree):
        return {field.name: getattr(tree, field.name) for field in fields(tree)}
    return None


def _rebuild(tree: Any, children: dict[Any, Any]) -> Any:
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, children)
    if isinstance(tree, (tuple, list)):
        return type(tree)(**children) if hasattr(tree, "_fields") else type(tree)(children.values())
    if isinstance(tree, TreeNode):
        return tree.tree_rebuild(children)
    if is_tensordict(tree):
        return type(tree)(**children, batch_size=tree.batch_size)
    twin = copy(tree)
    for name, child in children.items():
        # A frozen dataclass refuses plain assignment, and its constructor may do more than store.
        object.__setattr__(twin, name, child)
    return twin


def _rebuild_mapping(tree: Any, children: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return children
    if not isinstance(tree, MutableMapping):
        return type(tree)(children)  # immutable ones are made from their items
    # A shallow copy keeps what a subclass carries besides its items (a default factory, attributes).
    twin: Any = copy(tree)
    held = dict(tree)
    if is_tensordict(twin):
        twin.clear_device_()  # else it would move the children there
    for key, child in children.items():
        twin[key] = child
        if child is not held[key] and tree[key] is child:  # the copy shares its items with the original
            tree[key] = held[key]
            return type(tree)(children)  # type: ignore[call-arg]
    return twin
