"""Calls that hang on a device, as NCCL's do: every rank raises an error that names the rank at fault, and ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.testing.pool import free_port

from .conftest import HERE, Start

SUM = r"all_reduce\(float32\[2\], sum\) at \S*hanging\.py:\d+"
DIFFERS = rf"CollectiveMismatchError: (.|\n)* their call \d+ differs:\n  rank 0: {SUM}\n  rank 1: "
GONE = rf"PeerError: rank 1 .* ended or lost the connection during call \d+, {SUM}, (.|\n)*  rank 1: "
LATE = rf"CollectiveTimeoutError: rank 1 .* did not take part in call \d+, {SUM}, in time (.|\n)*  rank 1: "
CIRCLE = (
    rf"CollectiveMismatchError: .* wait for each other:\n  rank 0: {SUM} of the default group \(2\) waits for rank 1\n"
    rf"  rank 1: {SUM} of the group of ranks 0, 1 waits for rank 0$"
)
BACKWARD = r"backward_pass\(\) at \S*hanging\.py:\d+"
# What rank 1 does: the timeout, the error of rank 0, and whether rank 1 raises the same.
FAULTS = {
    "op": (60, rf"{DIFFERS}all_reduce\(float32\[2\], max\)", True),
    "dtype": (60, rf"{DIFFERS}all_reduce\(int64\[2\], sum\)", True),
    "shape": (60, rf"{DIFFERS}all_reduce\(float32\[3\], sum\)", True),
    "order": (60, rf"{DIFFERS}broadcast\(float32\[2\], 0\)", True),
    "left out": (60, rf"{DIFFERS}broadcast\(float32\[2\], 0\)", True),
    "asynchronous": (60, rf"{DIFFERS}all_reduce\(float32\[3\], sum, async\)", True),
    "other group": (60, CIRCLE, True),
    "dead": (60, rf"{GONE}is gone", False),
    "raises": (60, rf"{GONE}has ended with ZeroDivisionError", False),
    "stopped": (4, rf"{LATE}does not answer, because it is stopped", False),
    "late": (4, rf"{LATE}last call \d+, barrier\(\) (.|\n)* now in\n +File .*, in sleep", False),
}
for strategy in ("ddp", "fsdp"):
    for fault in ("dead", "stopped"):
        timeout, error, is_raised_by_both = FAULTS[fault]
        error = error.replace(rf"call \d+, {SUM}", rf"a collective of torch's own after call \d+, {BACKWARD}")
        FAULTS[f"{strategy}, {fault}"] = (timeout, error, is_raised_by_both)
LOOPING = [(fault, "looping") for fault in ("shape", "dead", "late")]


def run(
    start: Start, folder: Path, fault: str, timeout: int, wait: str, **variables: str
) -> tuple[list[int | None], list[str]]:
    """Return the exit codes of two ranks, None for one that does not end, and their errors."""
    port = str(free_port())
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = (HERE / "hanging.py", fault, timeout, folder, wait)
    ranks = [start(*words, **job, **variables, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    said = []
    try:
        said = [rank.communicate(timeout=180)[1] for rank in (ranks[:1] if "stopped" in fault else ranks)]
    finally:
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, file in enumerate(folder / f"{rank}.json" for rank in range(len(said))):
        if file.exists():
            said[rank] = ": ".join(json.loads(file.read_text())[:2])
    return codes, said


@pytest.mark.parametrize(("fault", "wait"), [*((x, "reading") for x in FAULTS), *LOOPING])
def test_who_is_at_fault_is_named(start: Start, tmp_path: Path, fault: str, wait: str) -> None:
    timeout, error, is_raised_by_both = FAULTS[fault]
    codes, errors = run(start, tmp_path, fault, timeout, wait)
    assert codes[0] == 1, errors
    assert re.match(error, errors[0]), errors
    if is_raised_by_both:
        assert codes[1] == 1
        assert errors[1] == errors[0]


def test_a_rank_that_is_slow_raises_no_error(start: Start, tmp_path: Path) -> None:
    assert run(start, tmp_path, "slow", 60, "reading")[0] == [0, 0]


@pytest.mark.parametrize("wait", ["reading", "looping", "nothing"])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("fault", ["dead", "raises", "ddp, dead", "fsdp, dead"])
def test_calls_that_end_because_a_rank_is_gone_do_not_pass_for_complete(
    start: Start, tmp_path: Path, fault: str, culprit: int, wait: str
) -> None:
    name = fault.rpartition(", ")[2]
    gone = FAULTS[name][1].replace("rank 1", f"rank {culprit}").removesuffix("is gone")
    gone = gone.replace("during call", "during .*call").replace(SUM, ".*")  # also a collective of torch's own after it
    more = {"SIM_CALLS_END_WITHOUT_PEER": "1", "CULPRIT": str(culprit)}
    codes, errors = run(start, tmp_path, fault, 60, wait, **more)
    assert codes[1 - culprit] == 1, errors  # the watchdog would end it by SIGABRT, after a minute
    assert re.search(gone, errors[1 - culprit]), errors


def test_a_rank_that_comes_to_no_collective_says_who_is_gone_before_torch_ends_it(start: Start, tmp_path: Path) -> None:
    codes, errors = run(start, tmp_path, "dead", 60, "sleeping", SIM_CALLS_END_WITHOUT_PEER="1")
    assert codes[0] == 1
    assert re.search(GONE, errors[0]), errors
    assert "The main thread has not come to a collective" in errors[0]
