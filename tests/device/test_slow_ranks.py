"""Under DDP on the simulated accelerator, whose host runs ahead of it, a slow rank is named, and only that one."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Start, launch
from .slow import BEGIN, FAULTS, SECONDS

PARTS = {"data": "data", "forward": "compute", "hook": "compute"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, start: Start) -> dict[str, Any]:
    """What rank 0 has recorded, by what was slow on rank 1."""
    return launch(start, tmp_path_factory.mktemp("slow"), 2, "slow.py")[0]


@pytest.mark.parametrize("what", FAULTS)
def test_the_slow_rank_and_what_is_slow_are_named(found: dict[str, Any], what: str) -> None:
    slow = found[what]["straggler"]
    assert [(row["rank"], row["part"]) for row in slow] == ([(1, PARTS[what])] if what in PARTS else [])
    assert all(row["begin"] >= BEGIN - 9 and row["lost"] > 0.5 * SECONDS for row in slow)


@pytest.mark.parametrize("what", PARTS)
def test_what_the_other_rank_waits_is_no_wait_for_data(found: dict[str, Any], what: str) -> None:
    means = found[what]["train"][-1]  # over both ranks
    assert means["comm_time"] > 0.25 * SECONDS
    assert means["data_time"] < (0.75 if what == "data" else 0.25) * SECONDS
    assert means["time"] > 0.5 * SECONDS
