"""Bodies of the GPU tests, on the CPU: of what `tests/gpu/test_engines.py` combines, each part once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...gpu import bodies
from ...gpu.test_bodies import check_case, check_moved


@pytest.mark.parametrize("case", ["zero1", "zero3-prefetching", "zero3-offloaded"])
def test_losses_are_those_of_a_plain_loop(case: str, tmp_path: Path):
    check_case(case, 2, tmp_path)


@pytest.mark.parametrize(("before", "after"), bodies.MOVES["deepspeed"])
def test_a_run_goes_on_elsewhere(before: str, after: str, tmp_path: Path):
    check_moved(before, after, 2, tmp_path)
