"""A run that goes on under DeepSpeed, and under another strategy after it, in the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.testing import run_ranks

from ..switching import switch_to_and_fro
from .training import config_of


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_ddp_deepspeed_fsdp_deepspeed_ddp(kind: str, tmp_path: Path):
    run_ranks(2, switch_to_and_fro, tmp_path, config_of(kind))
