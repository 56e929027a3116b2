"""Where Python source writes a dotted key: ``model.head.width`` in ``model = dict(head=dict(width=3))``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from lockstep.config.config_file import Place

_MAKERS = ("dict", "ConfigDict")
_CHANGERS = ("update", "merge")
_MOST_NAMES_FOLLOWED = 5


def assignments(statement: ast.stmt) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield the dotted keys that a statement sets, each with the expression that gives its value.

    ``a.b["c"] = x`` sets ``a.b.c``; ``a.update(b=x)`` and ``a.merge(dict(b=x))`` set ``a.b``.
    """
    match statement:
        case ast.Assign(targets=targets, value=value):
            yield from ((path, value) for target in targets if (path := _path(target)))
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
            if path := _path(target):
                yield path, value
        case ast.Expr(ast.Call(func=ast.Attribute(value=target, attr=method), args=args) as call):
            if method in _CHANGERS and (path := _path(target)):
                yield from ((path, arg) for arg in args)
                yield from (([*path, keyword.arg], keyword.value) for keyword in call.keywords if keyword.arg)


def place_in(tree: ast.Module, parts: Sequence[str]) -> Place | None:
    """Return where the top-level code of `tree` writes a key, or the nearest key above it.

    Of several places the one that spells out most of the key counts, and of these the last one. Names of other
    variables are followed.
    """
    return _place(tree, list(parts), followed=0)


def _place(tree: ast.Module, parts: list[str], followed: int) -> Place | None:
    found: Place | None = None
    for statement in tree.body:
        for path, value in assignments(statement):
            if path == parts[: len(path)]:
                inner = _descend(tree, value, parts[len(path) :], followed)
                place = (
                    Place(len(path), statement.lineno)
                    if inner is None
                    else inner._replace(depth=len(path) + inner.depth)
                )
                if found is None or place.depth >= found.depth:
                    found = place
    return found


def _descend(tree: ast.Module, value: ast.expr, parts: list[str], followed: int) -> Place | None:
    """Return the place of `parts` below an expression, its depth counted from there."""
    if not parts:
        return None
    for key, line, below in _items(value):
        if key == parts[0]:
            inner = _descend(tree, below, parts[1:], followed)
            return Place(1, line) if inner is None else inner._replace(depth=inner.depth + 1)
    if isinstance(value, ast.Name) and followed < _MOST_NAMES_FOLLOWED:
        place = _place(tree, [value.id, *parts], followed + 1)
        return None if place is None or place.depth == 1 else place._replace(depth=place.depth - 1)
    return None


def _items(value: ast.expr) -> Iterator[tuple[str, int, ast.expr]]:
    """Yield the keys that a literal dict or list, or a call of `dict`, spells out."""
    match value:
        case ast.Call(func=ast.Name(name), args=args, keywords=keywords) if name in _MAKERS:
            yield from ((keyword.arg, keyword.lineno, keyword.value) for keyword in keywords if keyword.arg)
            for arg in args:
                yield from _items(arg)
        case ast.Dict(keys=keys, values=values):
            for key, below in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), key.lineno, below
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            yield from ((str(index), element.lineno, element) for index, element in enumerate(elements))


def _path(target: ast.expr) -> list[str]:
    """Return the parts of a target such as ``a.b["c"]``; none where it is not that plain."""
    match target:
        case ast.Name(name):
            return [name]
        case ast.Attribute(value=owner, attr=attr):
            key = attr
        case ast.Subscript(value=owner, slice=ast.Constant(value=constant)):
            key = str(constant)
        case _:
            return []
    above = _path(owner)
    return [*above, key] if above else []
