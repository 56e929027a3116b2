"""Configs as Python source, and as plain data for YAML and JSON."""

from __future__ import annotations

import cmath
import inspect
import keyword
import sys
from collections import Counter
from collections.abc import Container, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum, Flag
from pathlib import PurePath
from typing import Any

from lockstep.masking import mask_text, printable

WIDTH = 100


def python_source(values: Mapping[str, Any]) -> str:
    """Return assignments that give these values when they are run.

    Classes and functions are written as their import paths. If a value has no source form (an open file, a lambda), a
    description is written as a string, and a comment at the top lists these keys.
    """
    writer = _Writer(values)
    body = [
        f"{left} = {writer.write(value, key, used=len(left) + 3)}\n"
        for key, value in values.items()
        for left in [key if _is_name(key) else f"{writer.imported('builtins', 'globals')}()[{key!r}]"]
    ]
    head = [
        f"import {module}\n" if name == module else f"import {module} as {name}\n"
        for module, name in sorted(writer.imports.items())
    ]
    if writer.lost:
        head.insert(
            0, f"# without a source form, so described only: {printable(', '.join(writer.lost), lines=False)}\n"
        )
    return "".join([*head, "\n" if head else "", *body])


def plain_data(value: Any) -> Any:
    """Convert a value to what YAML and JSON can hold: dicts, lists, strings, numbers, booleans and None.

    Keys become strings. One that is then equal to another of its dict, as ``1`` to ``"1"``, gets its type behind it.
    """
    value = _python_number(value)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind) and not isinstance(value, Enum):
            return kind(value)
    if isinstance(value, Mapping):
        names = Counter(map(str, value))
        return {
            str(key) if isinstance(key, str) or names[str(key)] == 1 else f"{key} ({type(key).__name__})": plain_data(
                item
            )
            for key, item in value.items()
        }
    if isinstance(value, set | frozenset):
        return [plain_data(item) for item in _in_order(value)]
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    path = _import_path(value)
    return _description(value) if path is None else ".".join(path)


class _Writer:
    """Writes values as source; collects the modules to import and the keys that could not be written.

    Args:
        taken: the names that the source assigns, so that it must not use them for anything else.
    """

    def __init__(self, taken: Container[str] = ()) -> None:
        self.imports: dict[str, str] = {}
        self.lost: list[str] = []
        self._taken = taken

    def write(self, value: Any, key: str, *, indent: int = 0, used: int | None = None) -> str:
        """Return the source of `value`.

        Args:
            value: the value to write.
            key: its dotted key.
            indent: columns before the closing bracket, if that is on its own line.
            used: columns of the first line that are already used; None to write everything on one line.
        """
        value = _python_number(value)
        form = self._brackets(value, key)
        if form is None:
            return self._atom(value, key)
        opening, closing, items = form
        flat = ", ".join(left + self.write(item, name) for left, item, name in items)
        comma = "," if opening == "(" and len(items) == 1 else ""
        flat = f"{opening}{flat}{comma}{closing}"
        if used is None or used + len(flat) <= WIDTH:
            return flat
        inner = indent + 4
        lines = "".join(
            f"{' ' * inner}{left}" + self.write(item, name, indent=inner, used=inner + len(left) + 1) + ",\n"
            for left, item, name in items
        )
        return f"{opening}\n{lines}{' ' * indent}{closing}"

    def _atom(self, value: Any, key: str) -> str:
        if isinstance(value, float | complex) and not isinstance(value, Enum) and not cmath.isfinite(value):
            kind = "float" if isinstance(value, float) else "complex"
            return f"{self.imported('builtins', kind)}({_literal(value)!r})"
        if (literal := _literal(value)) is not None:
            return literal
        if (path := _import_path(value)) is not None:
            return self.imported(*path)
        if (argument := _argument(value)) is not None and (path := _import_path(type(value))) is not None:
            module = path[0].removesuffix("._local")  # Python 3.13 says that paths are of pathlib._local
            return f"{self.imported(module, path[1])}({argument})"
        if key not in self.lost:
            self.lost.append(key)
        return repr(_description(value))

    def imported(self, module: str, name: str) -> str:
        """Return what the source calls an object in a module."""
        if module == "builtins" and name not in self._taken:
            return name
        alias = module
        while alias.partition(".")[0] in self._taken:
            alias = f"{alias.replace('.', '_')}_"
        self.imports[module] = alias
        return f"{alias}.{name}"

    def _brackets(self, value: Any, key: str) -> tuple[str, str, list[tuple[str, Any, str]]] | None:
        """Return the brackets and the items (text before it, value, dotted key); None if not a container."""
        if isinstance(value, Mapping):
            if all(_is_name(k) for k in value):
                opening = f"{self.imported('builtins', 'dict')}("
                return opening, ")", [(f"{k}=", v, f"{key}.{k}") for k, v in value.items()]
            return "{", "}", [(f"{self.write(k, f'{key}.{k}')}: ", v, f"{key}.{k}") for k, v in value.items()]
        if isinstance(value, set | frozenset):
            kind = "set" if isinstance(value, set) else "frozenset"
            opening, closing = f"{self.imported('builtins', kind)}([", "])"
            value = _in_order(value)
        elif isinstance(value, list | tuple):
            opening, closing = "[]" if isinstance(value, list) else "()"
        else:
            return None
        return opening, closing, [("", v, f"{key}.{n}") for n, v in enumerate(value)]


def _in_order(items: AbstractSet[Any]) -> list[Any]:
    """Return the items of a set in an order that is the same in every process, also of sets in it."""
    return sorted(items, key=lambda item: repr(plain_data(item)))


def _python_number(value: Any) -> Any:
    """Return a number or truth value of NumPy as Python's, and anything else as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy and isinstance(value, numpy.generic) and value.dtype.kind in "biufc" else value


def _literal(value: Any) -> str | None:
    if value is None or value is ...:
        return repr(value)
    if isinstance(value, Enum):
        return None
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)  # also for a subclass
    return None


def _argument(value: Any) -> str | None:
    """Return the source of the argument with which the class of a value makes an equal one, or None."""
    if isinstance(value, range):
        return repr(value).removeprefix("range(").removesuffix(")")
    if isinstance(value, Flag):
        return repr(value.value)
    is_device = (type(value).__module__, type(value).__name__) == ("torch", "device")  # torch may not be imported
    return repr(str(value)) if is_device or isinstance(value, PurePath) else None


def _import_path(value: Any) -> tuple[str, str] | None:
    """Return module and name under which a class, function, enum member or constant can be imported, or None."""
    if isinstance(value, Enum):
        return _path_in_class(type(value), str(value.name), value)  # flags that are combined have no such name
    if inspect.isroutine(value) and inspect.isclass(owner := getattr(value, "__self__", None)):
        return _path_in_class(owner, value.__name__, value)  # a classmethod, which is another object each time
    if inspect.isclass(value) or inspect.isroutine(value):
        module = getattr(value, "__module__", None) or ""
        names = [value.__qualname__, value.__name__]  # torch.relu calls itself _VariableFunctionsClass.relu
    else:
        module, _, *names = repr(value).partition(".")  # a constant may say where it is: torch.bfloat16
    if module == "__main__" or not all(part.isidentifier() for part in module.split(".")):
        return None  # another script in another process, or local to the config file
    # A package may hide its modules: torch.optim has AdamW, but no attribute `adamw`.
    while module:
        top, *path = module.split(".")
        for name in names:
            if _attribute(sys.modules.get(top), [*path, *name.split(".")]) is value:
                return module, name
        module = module.rpartition(".")[0]
    return None  # a lambda, or local to a function


def _path_in_class(owner: type, name: str, value: Any) -> tuple[str, str] | None:
    path = _import_path(owner)
    return None if path is None or getattr(owner, name, None) != value else (path[0], f"{path[1]}.{name}")


def _attribute(owner: Any, path: list[str]) -> Any:
    for part in path:
        owner = getattr(owner, part, None)
    return owner


def _description(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"<{type(value).__name__} {name}>" if name else mask_text(repr(value))


def _is_name(key: Any) -> bool:
    # Only ASCII, because Python normalizes some other letters in identifiers.
    return isinstance(key, str) and key.isascii() and key.isidentifier() and not keyword.iskeyword(key)
