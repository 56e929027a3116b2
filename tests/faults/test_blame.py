"""One rank fails while the others wait for it: the launcher names that rank first, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from . import cases
from .cases import Case
from .running import Outcome, launched
from .table import Table


def check(
    case: Case,
    nproc: int,
    folder: Path,
    table: Table,
    *,
    delay: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    outcome = launched(nproc, folder, *case.words, str(delay), failing=case.failing, environment=environment)
    is_named = case.is_said_by(outcome.message, outcome.pids)
    table.launched(case, nproc, outcome, is_named)
    assert is_named, outcome.said[0]
    assert outcome.codes == [case.code], outcome.said[0]
    return outcome


def on(sizes: list[int], some: list[Case]):
    """Parametrize a test by cases and numbers of ranks."""
    by_size = pytest.mark.parametrize("nproc", sizes)
    by_case = pytest.mark.parametrize("case", some, ids=[case.id for case in some])
    return lambda test: by_size(by_case(test))


@on([2, 4], cases.IN_A_COLLECTIVE[:6])
def test_errors_and_exits_in_a_collective(case: Case, nproc: int, tmp_path: Path, table: Table) -> None:
    check(case, nproc, tmp_path, table)


@on([2, 4], cases.IN_A_COLLECTIVE[6:])
def test_signals_and_hangs_in_a_collective(case: Case, nproc: int, tmp_path: Path, table: Table) -> None:
    outcome = check(case, nproc, tmp_path, table)
    if case.fault == "SIGSTOP":  # the main thread's stack, whichever thread has taken the signal that asks for it
        assert "job.py" in outcome.message.partition("It was here")[2], outcome.message
        assert "_listen" not in outcome.message


@on([2], cases.IN_A_SCRIPT_WITHOUT_LOCKSTEP)
def test_in_a_script_without_lockstep(case: Case, nproc: int, tmp_path: Path, table: Table) -> None:
    check(case, nproc, tmp_path, table)


@on([4], cases.IN_BACKWARD)
def test_in_a_backward_pass(case: Case, nproc: int, tmp_path: Path, table: Table) -> None:
    check(case, nproc, tmp_path, table)


@on([4], cases.IN_A_TRAINING)
def test_in_a_training(case: Case, nproc: int, tmp_path: Path, table: Table) -> None:
    check(case, nproc, tmp_path, table)


@on([2, 4], [case for case in cases.IN_CALLS if case.fault in ("op", "last-left-out", "keys")])
def test_in_calls_that_differ(case: Case, nproc: int, tmp_path: Path, table: Table) -> None:
    outcome = check(case, nproc, tmp_path, table)
    assert cases.shows(outcome.message, case.fault), outcome.said[0]


@pytest.mark.parametrize("fault", ["deaf to SIGTERM", "SIGSTOP"])
def test_a_rank_that_does_not_end_is_not_blamed_for_the_failure_of_another(tmp_path: Path, fault: str) -> None:
    outcome = launched(3, tmp_path, "all_reduce", "raises", "30", "1", environment={"ALSO": fault})
    assert outcome.message.startswith(f"rank 1 raised ValueError (pid {outcome.pids[1]})"), outcome.said[0]
    assert outcome.codes == [1]
    assert ("rank 2 was killed by the launcher" in outcome.message) == (fault != "SIGSTOP")
    assert ("rank 2 was stopped (SIGSTOP)" in outcome.message) == (fault == "SIGSTOP")
