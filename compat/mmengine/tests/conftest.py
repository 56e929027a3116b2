"""Comparing what a script prints here and with the real MMEngine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import REFERENCE, run


@pytest.fixture
def both(tmp_path: Path) -> Callable[[str], tuple[Any, Any]]:
    """Run a script here and with MMEngine, and return both answers."""
    if not REFERENCE:
        pytest.skip("MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7")

    def compare(script: str) -> tuple[Any, Any]:
        return run(sys.executable, script, tmp_path / "ours"), run(REFERENCE, script, tmp_path / "theirs")

    return compare
