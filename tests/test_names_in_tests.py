"""Tests of words that CI runs in part, or in environments of their own, name nothing that lockstep no longer has."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent


def modules_in(tree: ast.AST) -> dict[str, ModuleType]:
    """Return the modules of lockstep that a file imports, by the name that they have there."""
    found: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            parent = importlib.import_module(str(node.module))
            for alias in node.names:
                with suppress(ModuleNotFoundError):  # it is no module
                    part = getattr(parent, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                    found |= {alias.asname or alias.name: part} if isinstance(part, ModuleType) else {}
    return found


def names_in(tree: ast.AST, modules: dict[str, ModuleType]) -> Iterator[tuple[ModuleType, str]]:
    """Yield the modules that a file uses with the names it takes from them, or replaces in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            module, name = node.args[:2]
            if isinstance(module, ast.Name) and module.id in modules and isinstance(name, ast.Constant):
                yield modules[module.id], str(name.value)


@pytest.mark.parametrize("room", sorted({path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}))
def test_what_tests_take_from_modules_is_there(room: str) -> None:
    gone = []
    for path in [TESTS / room] if room.endswith(".py") else sorted((TESTS / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for module, name in names_in(tree, modules_in(tree)):
            if not hasattr(module, name):
                gone.append(f"{path.relative_to(TESTS)}: {module.__name__}.{name}")
    assert not gone
