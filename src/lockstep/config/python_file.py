"""A config in Python: assignments, with whatever code makes the values."""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from lockstep.config.config_file import BASE, DUMPED, BaseFile, ConfigFile, Location
from lockstep.config.dictionary import ConfigDict
from lockstep.config.placeholders import BaseValues
from lockstep.config.read_base import imported_bases, is_read_base
from lockstep.errors import ConfigError

_MAKERS = ("dict", "ConfigDict")
_CHANGERS = ("update", "merge")
_MOST_NAMES_FOLLOWED = 5


class PythonFile(ConfigFile):
    """A config in Python. Its bases stand in `_base_`, or in ``with read_base():``."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        try:
            self._tree = ast.parse(text, filename=str(path))
        except SyntaxError as error:
            raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
        self._imported = imported_bases(self._tree, path)
        self.imports_bases = bool(self._imported)
        if self.imports_bases and (base := self._assignment_of_base()) is not None:
            raise self.error(BASE, "and read_base() must not both be in one file; keep one", base.lineno)

    @property
    def base(self) -> Any:
        """What the file gives for `_base_`, read without running it."""
        if (statement := self._assignment_of_base()) is None:
            return None
        try:
            return ast.literal_eval(statement.value)  # type: ignore[attr-defined]
        except ValueError as error:
            raise self.error(BASE, "must be a plain string or list of strings") from error

    def bases(self) -> list[BaseFile]:
        """Return the files that this one builds upon."""
        return self._imported or super().bases()

    def values(self, base: ConfigDict, imported: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Run the file; imports, functions and classes are its tools, not its values."""
        # A real module, so that dataclasses and pickle find the classes that the file defines; a
        # dot in its name would be taken for a package.
        module = ModuleType(f"lockstep_config:{self.path}".replace(".", "_"))
        module.__file__ = str(self.path)
        setattr(module, BASE, base)
        sys.modules[module.__name__] = module
        with neighbours_importable(self.path):
            try:
                self._run(module, list(imported))
            except Exception as error:
                line = _line_in(error, self.path)
                raise ConfigError(f"{self.path}:{line}: {type(error).__name__}: {error}") from error
        if vars(module).get(BASE) is not base:
            raise ConfigError(f"{self.path}: `{BASE}` must be assigned at the top level, plainly")
        inherited = {name: value for names in imported for name, value in names.items()}
        return {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("__")
            and name != BASE
            and (value is inherited.get(name) or not self._is_tool(name, value, module))
        }

    def locate(self, key: str) -> Location | None:
        """Return where the file writes a key; what it changes in place counts, code in functions does not."""
        return _location_in(self._tree, key.split("."))

    def helpers(self) -> set[str]:
        """Return the names that the file's own code reads, or all names of a file that was dumped."""
        if self.text.startswith(DUMPED):
            return {name for statement in self._tree.body for name in _names_assigned(statement)}
        return {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(self._tree)
            if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
            or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == BASE)
        }

    def imports(self) -> list[str] | None:
        """Return the imports at the top level; None where something else may have done more than give a value.

        That is a definition with a decorator, which may register what it defines, a class, whose bases may, a call that
        stands by itself, and an import that depends on something.
        """
        outer = [statement for statement in self._tree.body if isinstance(statement, ast.Import | ast.ImportFrom)]
        if not all(_only_gives_values(statement) for statement in self._tree.body if statement not in outer):
            return None
        future = (isinstance(statement, ast.ImportFrom) and statement.module == "__future__" for statement in outer)
        return [ast.unparse(statement) for statement, skip in zip(outer, future, strict=True) if not skip]

    def _run(self, module: ModuleType, imported: list[Mapping[str, Any]]) -> None:
        for statement in self._tree.body:
            if is_read_base(statement):
                for _ in statement.body:  # type: ignore[attr-defined]
                    vars(module).update(imported.pop(0))
            elif BASE not in _names_assigned(statement):
                # The bases are loaded by now: `_base_` stands for what they say.
                code = BaseValues().visit(statement)
                exec(compile(ast.Module([code], type_ignores=[]), str(self.path), "exec"), vars(module))

    def _assignment_of_base(self) -> ast.stmt | None:
        return next((statement for statement in self._tree.body if BASE in _names_assigned(statement)), None)

    def _is_tool(self, name: str, value: object, module: ModuleType) -> bool:
        """Say whether a name is there to make values, rather than a value itself.

        Modules, and what an import, a def, a class statement or a lambda has bound, are tools. A class or function from
        elsewhere that is assigned by name is a value.
        """
        home = getattr(value, "__module__", None)
        if isinstance(value, ModuleType | __future__._Feature) or home == "typing":
            return True
        if not isinstance(value, type | FunctionType | BuiltinFunctionType):
            return False
        return home == module.__name__ or not any(name in _names_assigned(s) for s in self._tree.body)


@contextmanager
def neighbours_importable(path: Path) -> Iterator[None]:
    """Let the file at `path` import the modules beside it, as Python lets a script."""
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _only_gives_values(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Delete() | ast.Pass() | ast.Assert():
            return True
        case ast.Expr(ast.Constant()) | ast.Expr(ast.Call(func=ast.Attribute(attr=("update" | "merge" | "append")))):
            return True
        case ast.FunctionDef(decorator_list=decorators):
            return not decorators
        case ast.If(body=body, orelse=orelse) | ast.For(body=body, orelse=orelse):
            return all(map(_only_gives_values, [*body, *orelse]))
    return is_read_base(statement)


def _names_assigned(statement: ast.stmt) -> list[str]:
    """Return the plain names that a statement gives a value."""
    match statement:
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
        case _:
            return []


def _line_in(error: Exception, path: Path) -> int | str:
    """Return the innermost line of the file at `path` that took part in an error."""
    line: int | str = "?"
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _assignments(statement: ast.stmt) -> Iterator[tuple[list[str], ast.expr]]:
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


def _location_in(tree: ast.Module, parts: Sequence[str]) -> Location | None:
    """Return where the top-level code of `tree` writes a key, or the nearest key above it.

    Of several locations the one that spells out most of the key counts, and of these the last one. Names of other
    variables are followed.
    """
    return _location(tree, list(parts), followed=0)


def _location(tree: ast.Module, parts: list[str], followed: int) -> Location | None:
    found: Location | None = None
    for statement in tree.body:
        for path, value in _assignments(statement):
            if path == parts[: len(path)]:
                inner = _descend(tree, value, parts[len(path) :], followed)
                location = (
                    Location(len(path), statement.lineno)
                    if inner is None
                    else inner._replace(depth=len(path) + inner.depth)
                )
                if found is None or location.depth >= found.depth:
                    found = location
    return found


def _descend(tree: ast.Module, value: ast.expr, parts: list[str], followed: int) -> Location | None:
    """Return the location of `parts` below an expression, its depth counted from there."""
    if not parts:
        return None
    for key, line, below in _items(value):
        if key == parts[0]:
            inner = _descend(tree, below, parts[1:], followed)
            return Location(1, line) if inner is None else inner._replace(depth=inner.depth + 1)
    if isinstance(value, ast.Name) and followed < _MOST_NAMES_FOLLOWED:
        location = _location(tree, [value.id, *parts], followed + 1)
        return None if location is None or location.depth == 1 else location._replace(depth=location.depth - 1)
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
