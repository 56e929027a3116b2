"""The page of MMEngine's names says where each of them is."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from environments import REFERENCE

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
def test_the_page_says_where_each_public_name_is() -> None:
    names = runpy.run_path(str(ROOT / "compat" / "mmengine" / "names.py"))
    page = (ROOT / "docs" / "mmengine-names.md").read_text()
    assert names["written"](page, names["table"](names["published"](REFERENCE))) == page
