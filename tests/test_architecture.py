"""docs/architecture.md: each walk leads from one function that exists to the next one that it calls."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STEP = re.compile(r"^\d+\. `([\w/]+\.py)::([\w.]+)`(?:[^`\n]*through `(\w+)`)?", re.MULTILINE)
"""``1. `dist/reduce.py::all_reduce` ...``, with "through `name`" where the next function is called by another name."""
WALKS = {
    title: STEP.findall(text)
    for title, text in re.findall(r"^### Walk: (.+?)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
MOST_HOPS = {"a training step": 10, "resuming": 6, "the first batches after resuming": 4}


def test_the_page_has_five_walks() -> None:
    assert len(WALKS) >= 5
    assert set(MOST_HOPS) <= set(WALKS)


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_leads_from_function_to_function(title: str) -> None:
    for (file, function, through), (_, following, _) in pairwise(WALKS[title]):
        called = through or following.rpartition(".")[2]
        names = names_used(definition(file, function))
        assert called in names, f"{file}::{function} does not call {called}"
    file, function, _ = WALKS[title][-1]
    definition(file, function)


@pytest.mark.parametrize("title", MOST_HOPS)
def test_a_walk_is_short(title: str) -> None:
    assert len(WALKS[title]) - 1 <= MOST_HOPS[title]


def test_the_files_of_the_page_exist() -> None:
    """Those of the tables, which name a file within the room of the section's title."""
    sections = re.findall(r"^## `(\w+)/`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    named = [(room, file) for room, text in sections for file in re.findall(r"`([\w/]+\.py)`", text)]
    assert len(named) > 20
    source = ROOT / "src" / "lockstep"
    assert [each for each in named if not any((source / base / each[1]).is_file() for base in (each[0], ""))] == []


def definition(file: str, function: str) -> ast.AST:
    """Return the syntax tree of a function, a method or a class."""
    node: ast.AST = ast.parse((ROOT / "src" / "lockstep" / file).read_text())
    for name in function.split("."):
        inner = {each.name: each for each in getattr(node, "body", ()) if hasattr(each, "name")}
        assert name in inner, f"{file} has no {function}"
        node = inner[name]
    return node


def names_used(node: ast.AST) -> set[str]:
    """Return the names and attributes that a function uses."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
