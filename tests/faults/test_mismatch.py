"""Ranks that make calls which don't match: an error on every rank, with the calls and their lines; no wrong numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.dist import CollectiveMismatchError, check_collectives, init_dist
from lockstep.testing import ranks

from . import mismatch
from .jobs import run_job

# Mode, and rounds of four calls that go before.
MODES = {"off, early": ("off", 1), "off, late": ("off", 15), "sample": ("sample", 15), "always": ("always", 15)}
# For each case: what the error says of rank 1, and of the others.
SAID = {
    "op": (r"all_reduce\(float32\[40\], max\)", r"all_reduce\(float32\[40\], sum\)"),
    "small-op": (r"all_reduce\(float32\[1\], max\)", r"all_reduce\(float32\[1\], sum\)"),
    "dtype": (r"all_reduce\(int32\[40\], sum\)", r"all_reduce\(float32\[40\], sum\)"),
    "shape": (r"all_reduce\(float32\[41\], sum\)", r"all_reduce\(float32\[40\], sum\)"),
    "small-shape": (r"all_reduce\(float32\[3\], sum\)", r"all_reduce\(float32\[2\], sum\)"),
    "broadcast-shape": (r"broadcast\(float32\[2, 20\], 0\)", r"broadcast\(float32\[40\], 0\)"),
    "root": (r"broadcast\(float32\[40\], 1\)", r"broadcast\(float32\[40\], 0\)"),
    "order": (r"broadcast\(float32\[40\], 0\)", r"all_reduce\(float32\[40\], sum\)"),
    "left-out": (r"broadcast\(float32\[40\], 0\)", r"all_reduce\(float32\[40\], sum\)"),
    "last-left-out": (r"has ended, after all_reduce\(float32\[40\], max\)", r"all_reduce\(float32\[40\], sum\)"),
    "keys": (r"'b': int64\[\]", r"'a': int64\[\]"),
    "gather": (r"gather\(0\)", r"all_gather\(\)"),
    "first": (r"main_process_first\(\)", r"all_reduce\(float32\[40\], sum\)"),
}
LINE = r"at \S*mismatch\.py:\d+"


def shows(text: str, case: str) -> bool:
    of_one, of_others = SAID[case]
    return all(
        re.search(rf"\n(\[rank\d\]: )?  ranks? {who}: {call} {LINE}", text)
        for who, call in (("1", of_one), ("0[0-9, ]*", of_others))
    )


def differ(case: str, checks: Any, rounds: int) -> None:
    init_dist("pytorch", timeout=60)
    check_collectives(checks)
    with pytest.raises(CollectiveMismatchError) as caught:
        mismatch.run(case, rounds)
    assert shows(str(caught.value), case), str(caught.value)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", list(SAID))
@ranks(2, fresh=True)
def test_every_rank_raises_and_shows_the_calls(case: str, mode: str) -> None:
    differ(case, *MODES[mode])


@pytest.mark.parametrize("case", list(SAID))
@ranks(4, fresh=True)
def test_every_one_of_four_raises_also_late_without_checks(case: str) -> None:
    differ(case, "off", 15)


@pytest.mark.parametrize("case", ["op", "shape", "last-left-out"])
def test_no_rank_ends_well(case: str) -> None:
    for code, output in run_job(2, str(Path(mismatch.__file__)), case, "15"):
        assert code == 1, output
        assert "CollectiveMismatchError" in output
        assert shows(output, case), output
