"""Ranks that don't arrive: the error of those that wait names them, with what they did last and where they are."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from .jobs import Ended, run_job

SCRIPT = Path(__file__).with_name("late.py")
TIMEOUT = 4.0
LOADED = 20.0  # seconds more that a loaded machine may take
STACK = r"now in\n +File \"\S*late\.py\", line \d+, in loop_for_ever\n"
SAID = {
    "loop": rf"CollectiveTimeoutError: rank 1 of the default group .* did not take part (.|\n)*rank 1: (.|\n)*{STACK}",
    "stop": r"CollectiveTimeoutError: rank 1 (.|\n)*does not answer, because it is stopped \(process \d+ on ",
    "exit": r"(PeerError: rank 1|CollectiveMismatchError)(.|\n)*  rank 1: has ended",
    "kill": r"PeerError: rank 1 of the default group (.|\n)*  rank 1: is gone \(process \d+ on ",
}


def end_rank_1(ranks: list[subprocess.Popen[str]]) -> None:
    """Wait for the others, then kill rank 1, which would not end by itself."""
    deadline = time.monotonic() + 90
    while any(rank.poll() is None for number, rank in enumerate(ranks) if number != 1):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    ranks[1].kill()


def run(fault: str, place: str, size: int) -> list[Ended]:
    environment = {"LOCKSTEP_HEARTBEAT": "1"}
    return run_job(size, str(SCRIPT), fault, place, str(TIMEOUT), environment=environment, meanwhile=end_rank_1)


def seconds_until_raised(output: str) -> float:
    begun, raised = (re.findall(rf"\n{word} at ([0-9.]+)", output)[-1] for word in ("fault", "raised"))
    return float(raised) - float(begun)


@pytest.mark.parametrize("fault", list(SAID))
@pytest.mark.parametrize(("place", "size"), [("call", 2), ("call", 4), ("ddp", 2)])
def test_those_that_wait_name_the_rank_that_does_not_arrive(fault: str, place: str, size: int) -> None:
    for rank, (code, output) in enumerate(run(fault, place, size)):
        if rank != 1:
            assert code == 3, output
            assert re.search(SAID[fault], output), output
            assert seconds_until_raised(output) < TIMEOUT + LOADED


def test_a_rank_lost_in_the_backward_pass_of_fsdp_is_named() -> None:
    assert re.search(SAID["kill"], run("kill", "fsdp", 2)[0].output)


def test_a_warning_says_for_whom_a_rank_waits_before_the_timeout() -> None:
    output = run("loop", "call", 2)[0].output
    waited = re.findall(
        r"waiting (\d+) s for rank 1 of the default group \(2\) in all_reduce\(.*\) at \S*late\.py:\d+", output
    )
    assert waited
    assert re.search(rf"waiting (.|\n)*rank 1: last call 1, barrier\(\) at \S*late\.py:\d+(.|\n)*{STACK}", output)
