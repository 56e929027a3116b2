"""Bases by import: ``with read_base(): from .base import *``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from lockstep.config.config_file import BaseFile
from lockstep.errors import ConfigError


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


def is_read_base(statement: ast.AST) -> bool:
    """Return whether a statement is ``with read_base():``."""
    match statement:
        case ast.With([ast.withitem(ast.Call(ast.Name("read_base") | ast.Attribute(attr="read_base")))]):
            return True
    return False


def imported_bases(tree: ast.Module, path: Path) -> list[BaseFile]:
    """Return the configs that the file at `path` imports, in order.

    Raises:
        ConfigError: the context holds something other than such imports, or is not at the top level.
    """
    outer = [statement for statement in tree.body if is_read_base(statement)]
    for node in ast.walk(tree):
        if is_read_base(node) and node not in outer:
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
    folder = Path(*path.parts[: -statement.level]) if statement.level else _package_folder(parts.pop(0), where)
    names = {alias.asname or alias.name: alias.name for alias in statement.names}
    base = folder.joinpath(*parts).with_suffix(".py")
    return BaseFile(base, "read_base()", statement.lineno, None if "*" in names else names)


def _package_folder(package: str, where: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{where}: there is no package `{package}` to import a config from; one beside this file takes a dot, "
            f"as in `from .{package} import *`"
        )
    return Path(next(iter(spec.submodule_search_locations)))
