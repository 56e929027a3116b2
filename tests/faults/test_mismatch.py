"""Ranks that make calls which don't match: an error on every rank, with the calls and their lines; no wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.dist import CollectiveMismatchError, all_reduce, check_collectives, init_dist
from lockstep.testing import ranks

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


@pytest.mark.parametrize("mode", ["off", "sample"])
@pytest.mark.parametrize("case", [x for x in cases.CALLS | cases.KNOWN_CALLS if x != "last-left-out"])
@ranks(2, 4, fresh=True)
def test_known_calls_that_are_swapped_late_are_found_in_every_mode(case: str, mode: str) -> None:
    differ(case, mode, 15, knows=True)


# Large calls. Those that gloo runs are compared before: in its trees, a rank of one half sends to one of the other.
COMPARED_BEFORE = (
    "large-broadcast-shape", "large-root", "async-largest-shape", "async-broadcast-shape", "largest-broadcast-shape",
)  # fmt: skip
FOUND_BY_THE_WATCH = (
    "large-shape", "params", "async-shape", "large-reduce-shape", "large-reduce-scatter-shape", "reduce-or-broadcast",
)  # fmt: skip


@pytest.mark.parametrize("case", COMPARED_BEFORE + FOUND_BY_THE_WATCH)
@ranks(4, fresh=True)
def test_two_halves_of_a_group_that_make_different_large_calls_all_raise(case: str) -> None:
    init_dist("pytorch", timeout=60)
    with pytest.raises(CollectiveMismatchError) as caught:
        mismatch.run(case, 15, knows=True, who=(2, 3))
    assert cases.shows(str(caught.value), case, "2, 3", "0, 1"), str(caught.value)
    if case in COMPARED_BEFORE:
        data = torch.ones(30_000)
        all_reduce(data)  # the group is usable: nothing of these calls is in flight
        assert data.unique().tolist() == [4.0]
