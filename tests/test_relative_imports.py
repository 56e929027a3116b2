"""What tests import from each other exists, also in folders that only a word with an environment of its own runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def names_in(file: Path) -> set[str]:
    """Return the names that a module or package defines or imports at its top level."""
    if file.is_dir():
        modules = {path.stem for path in file.iterdir()}
        return modules | (names_in(file / "__init__.py") if (file / "__init__.py").exists() else set())
    nodes = list(ast.walk(ast.parse(file.read_text())))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return stored | defined | imported


def missing_from(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = file.parents[node.level - 1]
            source = package.joinpath(*(node.module or "").split("."))
            module = source if source.is_dir() else source.with_suffix(".py")
            if not module.exists():
                yield f"line {node.lineno}: {module.relative_to(ROOT)}"
                continue
            missing = {alias.name for alias in node.names} - {"*"} - names_in(module)
            yield from (f"line {node.lineno}: {name} of {module.relative_to(ROOT)}" for name in sorted(missing))


def test_what_is_imported_from_a_neighbour_exists() -> None:
    files = [file for folder in ("tests", "compat", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    missing = {str(file.relative_to(ROOT)): names for file in files if (names := [*missing_from(file)])}
    assert files
    assert not missing
