"""A run that goes on under ColossalAI, and under another strategy after it, in the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.testing import run_ranks

from ..switching import switch_to_and_fro
from .training import config_of


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_ddp_colossalai_fsdp_colossalai_ddp(kind: str, tmp_path: Path):
    run_ranks(2, switch_to_and_fro, tmp_path, config_of(kind))
