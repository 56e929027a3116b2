"""No module of the package imports, by any way, a module that imports it: annotations and late imports included."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["lockstep", *path.relative_to(PACKAGE).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(path: Path, known: set[str]) -> set[str]:
    """Return the modules of the package that a file names in imports, wherever they stand in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & known or {node.module}
    return found & known


def cycles_in(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach each other (Tarjan 1972, SIAM J. Comput. 1, 146)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            group = set(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(group)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_a_cycle_is_found() -> None:
    assert cycles_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_there_is_no_cycle() -> None:
    known = modules()
    graph = {name: imports_of(path, set(known)) - {name} for name, path in known.items()}
    assert len(graph) > 150
    assert cycles_in(graph) == []
