"""Where one rank fails, without a launcher, every other one raises an error that names it, with its call and line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from . import cases
from .cases import Case
from .running import alone
from .table import Table

LOADED = 20.0  # seconds that a loaded machine may take beyond the timeout; the table has what they were


def check(case: Case, size: int, folder: Path, table: Table, *, environment: Mapping[str, str] | None = None) -> None:
    outcome = alone(size, folder, *case.words, failing=case.failing, environment=environment)
    others = [rank for rank in range(size) if rank != case.failing]
    told = [case.is_told_by(outcome.raised.get(rank)) for rank in others]
    table.alone(case, size, outcome, told)
    assert all(told), "\n".join(f"rank {rank}: {outcome.raised.get(rank) or outcome.said[rank]}" for rank in others)
    assert [outcome.codes[rank] for rank in others] == [1] * len(others), outcome.said
    assert case.code == 1 or outcome.codes[case.failing] != 0
    if isinstance(case, cases.CallsDiffer):
        assert outcome.codes == [1] * size, outcome.said
    assert max(outcome.raised[rank].seconds for rank in others) < case.timeout + LOADED


def each(some: list[Case]):
    """Parametrize a test by cases, each of them on two ranks and on four."""
    by_size = pytest.mark.parametrize("size", [2, 4])
    by_case = pytest.mark.parametrize("case", some, ids=[case.id for case in some])
    return lambda test: by_size(by_case(test))


@each(cases.IN_A_COLLECTIVE)
def test_in_a_collective(case: Case, size: int, tmp_path: Path, table: Table) -> None:
    check(case, size, tmp_path, table)


@each(cases.ON_A_DEVICE)
def test_on_a_device(case: Case, size: int, tmp_path: Path, table: Table) -> None:
    check(case, size, tmp_path, table)


@pytest.mark.parametrize("case", cases.ON_A_DEVICE, ids=[case.id for case in cases.ON_A_DEVICE])
def test_ranks_that_their_device_holds_for_ever_end_with_the_error(case: Case, tmp_path: Path) -> None:
    outcome = alone(2, tmp_path, *case.words, environment={"STUCK": "1"})
    kind, _, text = case.error.partition(": ")
    assert outcome.codes[0] == 1
    shown = rf"{kind}: {text}(.|\n)*The main thread does not go on:\nFile \"\S*job\.py\", line \d+, in on_a_device\n"
    said = outcome.said[0].replace("[rank0]: ", "")  # torch's, before each line
    assert re.search(shown, said), said


@each(cases.IN_BACKWARD)
def test_in_a_backward_pass(case: Case, size: int, tmp_path: Path, table: Table) -> None:
    check(case, size, tmp_path, table)


@each(cases.IN_A_TRAINING)
def test_in_a_training(case: Case, size: int, tmp_path: Path, table: Table) -> None:
    check(case, size, tmp_path, table)


@each([*cases.IN_CALLS, cases.OF_TORCH])
def test_in_calls_that_differ(case: Case, size: int, tmp_path: Path, table: Table) -> None:
    check(case, size, tmp_path, table)


@pytest.mark.parametrize("case", [*cases.OF_MANY, cases.IN_CALLS[0]], ids=lambda case: case.id)
def test_of_thirty_two_ranks(case: Case, tmp_path: Path, table: Table) -> None:
    check(case, 32, tmp_path, table)
