"""Figures in a page of the documentation: what stands between two marks is written by the word that they name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SPEED = Path(__file__).parents[1] / "docs" / "speed.md"


def marks(word: str) -> tuple[str, str]:
    return f"<!-- make {word} -->\n", f"<!-- end of make {word} -->\n"


def write_section(page: Path, word: str, text: str) -> None:
    """Replace what stands between the two marks of a word."""
    begin, end = marks(word)
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} must have the lines {begin.strip()} and {end.strip()}, but has not")
    page.write_text(before + begin + text + end + after)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are aligned right."""
    rules = ["---", *["--:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rules, *rows))
