"""Ranks that make calls which don't match: an error on every rank, with the calls and their lines; no wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.dist import CollectiveMismatchError, check_collectives, init_dist
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
