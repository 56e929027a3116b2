"""A rank that does not arrive is named before the timeout, too; `test_survivors.py` has what follows it."""

from __future__ import annotations

import re
from pathlib import Path

from .running import alone

WAITING = (
    r"waiting \d+ s for rank 1 of the default group \(2\) in all_reduce\(.*\) at \S*job\.py:\d+\n"
    r"  rank 1: last call 1, barrier\(\) at \S*job\.py:\d+(.|\n)* in loop_for_ever\n"
)


def test_a_warning_says_for_whom_a_rank_waits_before_the_timeout(tmp_path: Path) -> None:
    outcome = alone(2, tmp_path, "all_reduce", "endless loop", "4", environment={"LOCKSTEP_HEARTBEAT": "1"})
    assert re.search(WAITING, outcome.said[0]), outcome.said[0]
