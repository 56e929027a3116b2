"""Ranks that make calls which don't match: an error on every rank, with the calls and their lines; no wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.dist import CollectiveMismatchError, all_reduce, check_collectives, init_dist
from lockstep.testing import RankFailure, ranks, run_ranks

from . import cases, mismatch

# Mode, and rounds of four calls that go before.
MODES = {"off, early": ("off", 1), "off, late": ("off", 15), "sample": ("sample", 15), "always": ("always", 15)}


def differ(case: str, checks: Any, rounds: int, *, knows: bool = False) -> None:
    init_dist("pytorch", timeout=60)
    check_collectives(checks)
    with pytest.raises(CollectiveMismatchError) as caught:
        mismatch.run(case, rounds, knows=knows)
    assert cases.shows(str(caught.value), case), str(caught.value)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", list(cases.CALLS))
@ranks(2, fresh=True)
def test_every_rank_raises_and_shows_the_calls(case: str, mode: str) -> None:
    differ(case, *MODES[mode])


@pytest.mark.parametrize(
    "case", [x for x in cases.CALLS | cases.KNOWN_CALLS if "async" not in x and x != "last-left-out"]
)
@ranks(2, 4, fresh=True)
def test_known_calls_that_are_swapped_late_are_found_where_all_are_compared(case: str) -> None:
    differ(case, "always", 15, knows=True)


@pytest.mark.parametrize("mode", ["off", "sample"])
@pytest.mark.parametrize(
    "case", [x for x in cases.CALLS | cases.KNOWN_CALLS if x not in cases.OTHER_SIZES and x != "last-left-out"]
)
@ranks(2, 4, fresh=True)
def test_swaps_of_one_size_are_found_in_every_mode(case: str, mode: str) -> None:
    differ(case, mode, 15, knows=True)


@pytest.mark.parametrize("case", [x for x in cases.KNOWN_CALLS if "large" in x and "async" not in x])
@ranks(4, fresh=True)
def test_two_halves_of_a_group_that_make_different_large_calls_all_raise(case: str) -> None:
    init_dist("pytorch", timeout=60)
    check_collectives("always")
    with pytest.raises(CollectiveMismatchError) as caught:
        mismatch.run(case, 15, knows=True, who=(2, 3))
    assert cases.shows(str(caught.value), case, "2, 3", "0, 1"), str(caught.value)
    data = torch.ones(30_000)
    all_reduce(data)  # the group is usable: nothing of these calls is in flight
    assert data.unique().tolist() == [4.0]


def send_other_sizes(case: str) -> None:
    mismatch.run(case, 15, knows=True)


@pytest.mark.parametrize("case", ["large-shape", "async-shape"])
def test_gloo_ends_a_process_where_sizes_differ_that_nobody_has_compared(case: str) -> None:
    """Not ours to choose: if this fails, gloo has learned to raise, and docs/errors.md can promise more."""
    with pytest.raises(RankFailure, match=r"killed by SIGABRT") as caught:
        run_ranks(2, send_other_sizes, case)
    assert "Received data size doesn't match expected size" in str(caught.value)
