"""Config files in Python: assignments, code that computes values, and bases by import."""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from operator import or_
from pathlib import Path
from traceback import extract_tb
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from lockstep.config.config_file import BASE, BaseFile, ConfigFile, Placeholders, Write, package_folder
from lockstep.config.dictionary import ConfigDict
from lockstep.errors import ConfigError, error_in_words

_MAKERS = ("dict", "ConfigDict")
_CHANGERS = ("update", "merge")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)  # whose names are not the file's
_NO_BASE = f"must not be in a file with read_base(), whose bases' keys are variables: write `lr` for `{BASE}.lr`"
_running: list[Path] = []  # files that are being run, the innermost last


@contextmanager
def read_base() -> Iterator[None]:
    """Mark the imports in a Python config that read other configs.

    ```python
    from torch.optim import AdamW
    from lockstep.config import read_base

    with read_base():
        from ._base_.model import *
        from ._base_.datasets import train_dataloader, val_dataloader as test_dataloader

    model.backbone.depth = 101
    optim_wrapper = dict(optimizer=dict(type=AdamW, lr=1e-3))
    ```

    The imported names become keys of the config and can be changed in place, also by ``model.merge(dict(...))``; an
    assignment replaces the old value. Leading dots count folders, as in a package; ``from zoo.configs.base import *``
    reads a config in the installed package `zoo`. Only keys can be imported in this way. All other imports belong
    outside the context and are real imports: what a config names must be installed.

    `Config.fromfile` reads the marked imports itself. For Python the context does nothing, so that editors can follow
    the imports.
    """
    yield


class PythonFile(ConfigFile):
    """A config file in Python. It names its bases in `_base_`, or imports them in ``with read_base():``."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        try:
            self._tree = ast.parse(text, filename=str(path))
        except SyntaxError as error:
            raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
        Placeholders(path).visit(self._tree)
        self._imported = _imported_bases(self._tree, path)
        self.imports_bases = bool(self._imported)
        self._flags = _future_flags(self._tree)
        self._base = next((statement for statement in self._tree.body if BASE in _names_assigned(statement)), None)
        for node in ast.walk(self._tree) if self.imports_bases else ():
            if isinstance(node, ast.Name) and node.id == BASE:
                raise self.error(BASE, _NO_BASE, node.lineno)

    @property
    def base(self) -> Any:
        """The value of `_base_` in the file, read without running it; or None."""
        if self._base is None:
            return None
        try:
            return ast.literal_eval(self._base.value)  # type: ignore[attr-defined]
        except ValueError as error:
            remedy = "Write parts of a long one side by side, without a plus sign"
            raise self.error(BASE, f"must be a plain string or list of strings. {remedy}") from error

    def bases(self) -> list[BaseFile]:
        """Return the bases of this file."""
        return self._imported or super().bases()

    def values(self, base: ConfigDict, imported: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Run the file and return its values: its names except for imports, functions and classes that it defines."""
        # A real module, so that dataclasses and pickle find the classes that the file defines. Its name must have no
        # dot, which would separate a package from a module.
        module = ModuleType(f"lockstep_config:{self.path}".replace("_", "__").replace(".", "_"))
        module.__file__ = str(self.path)
        setattr(module, BASE, base)
        sys.modules[module.__name__] = module
        with importable(self.path.parent):
            _running.append(self.path)
            try:
                self._run(module, list(imported))
            except (Exception, SystemExit) as error:  # `parse_args` exits, at the arguments of lockstep's command
                lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(self.path)]
                line = lines[-1] if lines else "?"
                what = error_in_words(error)
                if isinstance(error, SystemExit):
                    what = f"a config must not exit, but this line has. {_how_to_run(self.path)}"
                raise ConfigError(f"{self.path}:{line}: {what}") from error
            finally:
                _running.pop()
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

    def writes(self) -> Iterator[Write]:
        """Yield where the file sets keys; in-place changes count, code in functions and under an `if` does not."""
        for statement in self._tree.body:
            for path, value in _assignments(statement):
                for write in _writes_of(path, value, statement.lineno):
                    if statement is self._base or write.path[0] != BASE:
                        yield write
                    elif write.path[1:]:  # `_base_.lr = 1` sets `lr`
                        yield write._replace(path=write.path[1:])

    def names_read(self) -> set[str]:
        """Return the names that the file's own code reads."""
        return {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(self._tree)
            if (isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _path(node.value) == [BASE]))
            and isinstance(node.ctx, ast.Load)
        }

    def _run(self, module: ModuleType, imported: list[Mapping[str, Any]]) -> None:
        for statement in self._tree.body:
            if _is_read_base(statement):
                for _ in statement.body:  # type: ignore[attr-defined]
                    vars(module).update(imported.pop(0))
            elif BASE not in _names_assigned(statement):
                # The bases are loaded already: `_base_` holds their values. Not with this module's own future imports.
                code = compile(ast.Module([statement], []), str(self.path), "exec", self._flags, dont_inherit=True)
                exec(code, vars(module))

    def _is_tool(self, name: str, value: object, module: ModuleType) -> bool:
        """Return whether a name is a tool for computing values, not a value itself.

        Tools are modules, and what an import, a `def`, a `class` statement or a lambda has bound. A class or function
        from another module that is assigned to a name is a value.
        """
        home = getattr(value, "__module__", None)
        # A registry, as `from package import *` brings; a module of torch has such a method, too.
        is_registry = callable(getattr(value, "register_module", None)) and not hasattr(value, "named_parameters")
        if isinstance(value, ModuleType | __future__._Feature) or home == "typing" or is_registry:
            return True
        if not isinstance(value, type | FunctionType | BuiltinFunctionType):
            return False
        return home == module.__name__ or not any(name in _names_assigned(s) for s in _own_statements(self._tree))


def refuse_in_config() -> None:
    """Refuse to make a Runner or a Session while a config runs: that file is a script, which would train now.

    Raises:
        ConfigError: a config in Python is being read.
    """
    if _running:
        raise ConfigError(f"a config must not make a Runner or a Session. {_how_to_run(_running[-1])}")


def _how_to_run(path: Path) -> str:
    return (
        f"A file that trains by itself is a script: run it by `python {path.name}`, or on several ranks by `lockstep "
        f"launch {path.name}`"
    )


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make modules in a folder importable inside the context, as a script can import modules in its folder."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # other code has removed it
            sys.path.remove(str(folder))


def _imported_bases(tree: ast.Module, path: Path) -> list[BaseFile]:
    """Return the configs that the file at `path` imports, in order.

    Raises:
        ConfigError: the context holds something other than such imports, or is not at the top level.
    """
    outer = [statement for statement in tree.body if _is_read_base(statement)]
    for node in ast.walk(tree):
        if _is_read_base(node) and node not in outer:
            raise ConfigError(f"{path}:{node.lineno}: read_base() must stand at the top level")  # type: ignore[attr-defined]
    return [_base_file(inner, path) for statement in outer for inner in statement.body]  # type: ignore[attr-defined]


def _base_file(statement: ast.stmt, path: Path) -> BaseFile:
    where = f"{path}:{statement.lineno}"
    if not isinstance(statement, ast.ImportFrom) or statement.module is None:
        raise ConfigError(
            f"{where}: read_base() must hold nothing but imports such as `from .base import *`, but holds "
            f"`{ast.unparse(statement)}`"
        )
    parts = statement.module.split(".")
    package = None if statement.level else parts.pop(0)
    folder = Path(*path.parts[: -statement.level]) if package is None else package_folder(package)
    if folder is None:
        raise ConfigError(
            f"{where}: there is no package `{package}` to import a config from; one beside this file takes a dot, "
            f"as in `from .{package} import *`"
        )
    names = {alias.asname or alias.name: alias.name for alias in statement.names}
    base = folder.joinpath(*parts).with_suffix(".py")
    return BaseFile(base, "read_base()", statement.lineno, None if "*" in names else names)


def _own_statements(outer: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a file in order, also those in an `if`, a loop, a `with` or a `try`; not of functions."""
    for node in ast.iter_child_nodes(outer):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case) and not isinstance(node, _SCOPES):
            yield from _own_statements(node)


def _is_read_base(statement: ast.AST) -> bool:
    """Return whether a statement is ``with read_base():``."""
    match statement:
        case ast.With([ast.withitem(ast.Call(ast.Name("read_base") | ast.Attribute(attr="read_base")))]):
            return True
    return False


def _future_flags(tree: ast.Module) -> int:
    """Return the compiler's flags for what a file imports from `__future__`."""
    names = [
        alias.name
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        for alias in statement.names
        if alias.name in __future__.all_feature_names  # else the statement raises its own error where it is run
    ]
    return reduce(or_, [getattr(__future__, name).compiler_flag for name in names], 0)


def _names_assigned(statement: ast.stmt) -> list[str]:
    """Return the plain names to which a statement assigns a value."""
    match statement:
        case ast.Assign(targets=targets):
            parts = [part for target in targets for part in ast.walk(target)]  # of `a, (b, c) = ...`
            return [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
    return []


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


def _writes_of(path: list[str], value: ast.expr, line: int) -> Iterator[Write]:
    """Yield where a key and all keys inside its value are set."""
    yield Write(path, line, value.id if isinstance(value, ast.Name) else None)
    for key, line_below, below in _items(value):
        yield from _writes_of([*path, key], below, line_below)


def _items(value: ast.expr) -> Iterator[tuple[str, int, ast.expr]]:
    """Yield the keys, lines and values in a literal dict, list or tuple, or in a call of `dict` or `ConfigDict`."""
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
    """Return the parts of a target such as ``a.b["c"]``; an empty list for a more complex target."""
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
