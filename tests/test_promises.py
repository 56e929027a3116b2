"""docs/promises.md names a file for each promise of the README."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_promise_of_the_readme_has_files_that_keep_it() -> None:
    rows = re.findall(r"^\| (.+?) \| (.*`.*) \|$", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    promised = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(promised) >= 10
    assert set(promised) <= {promise for promise, _ in rows}
    files = [file for _, kept_by in rows for file in re.findall(r"`([^`]+\.py)`", kept_by)]
    assert [file for file in files if not (ROOT / file).exists()] == []
