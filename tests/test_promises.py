"""docs/promises.md names, for each promise of the README, tests that exist and run; README says when words last ran."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tools.nightly import dated, verified

ROOT = Path(__file__).parents[1]
PROMISES = (ROOT / "docs" / "promises.md").read_text()
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
CITED = re.findall(r"`((?:tests|compat)/[\w/.-]+\.py)::(\w+)`", PROMISES)


def test_each_promise_of_the_readme_is_in_the_table() -> None:
    promised = re.findall(r"^\| \*\*(.+?)\*\* \|", README, re.MULTILINE)
    assert len(promised) >= 10
    assert set(promised) <= set(re.findall(r"^\| (\w.+?) \|", PROMISES, re.MULTILINE))


def test_each_promise_names_tests_that_exist() -> None:
    assert len(CITED) > 80
    missing = [f"{file}::{name}" for file, name in CITED if name not in names_in(ROOT / file)]
    assert missing == []


def test_each_of_them_is_run_by_a_word() -> None:
    """Not one that needs a GPU, nor one that is run by hand."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["norecursedirs"]
    for file, _ in CITED:
        assert "pytest.mark.gpu" not in (ROOT / file).read_text(), file
        folder = "/".join(Path(file).parts[: 3 if file.startswith("compat") else 2])
        assert (file.startswith("tests/") and Path(folder).name not in folders) or folder in MAKEFILE, file


def test_words_that_the_documentation_names_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages.remove(ROOT / "CHANGELOG.md")  # it tells of words that are gone
    named = [(page.name, word) for page in pages for word in re.findall(r"`make ([\w-]+)", page.read_text())]
    assert len(named) > 50
    assert [(page, word) for page, word in named if not re.search(rf"^{word}:", MAKEFILE, re.MULTILINE)] == []


def test_the_readme_says_when_each_word_was_run() -> None:
    assert dated(README, verified()) == README
    assert dated("`make test` not yet", {}) == "`make test` not yet"
    row = "| `make test` | **failed** (2 failed) | 2026-11-26 06:40 | 14.6 | 9ef0641 | 2 cores |"
    assert dated("`make test` 2026-01-01", {"test": row}) == "`make test` failed 2026-11-26"


def names_in(file: Path) -> set[str]:
    """Return the names of the tests at the top level of a file."""
    body = ast.parse(file.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_what_ci_runs_exists() -> None:
    """The tests that .ci/slices.mk names; CI itself would only tell after half an hour."""
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / ".ci" / "slices.mk").read_text())
    assert len(named) > 40
    assert [
        one for one in named if not (ROOT / one[0]).is_file() or (one[1] and one[1] not in names_in(ROOT / one[0]))
    ] == []


def test_each_page_has_a_title_of_its_own() -> None:
    titles = [page.read_text().partition("\n")[0] for page in (ROOT / "docs").glob("*.md")]
    assert len(set(titles)) == len(titles)
