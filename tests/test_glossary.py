"""docs/glossary.md: a word has one meaning, so a class has a name of its own, and what the page names exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lockstep"
TREES = {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
WORDS = [row for row in ROWS if row[0] not in ("word", "---")]


def test_no_two_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(file)
    assert len(homes) > 300
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_each_word_is_explained_once() -> None:
    words = [word for row in WORDS for word in row[0].split(", ")]
    assert len(words) > 40
    assert sorted(words) == sorted(set(words))


def test_what_the_glossary_names_exists() -> None:
    code = " ".join(ast.unparse(tree) for tree in TREES.values())
    known = set(re.findall(r"\w+", code)) | {part for file in TREES for part in re.findall(r"\w+", file)} | {"lockstep"}
    named = {name for row in WORDS for name in re.findall(r"`([^`]+)`", row[2])}
    assert len(named) > 40
    assert {name for name in named if name.endswith(".py") and name not in TREES} == set()
    assert {part for name in named for part in re.findall(r"[A-Za-z_]\w+", name)} - known - {"py"} == set()
