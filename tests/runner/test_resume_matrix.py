"""The matrix of `make resume-matrix`: some of its cases, and whether it sees what would be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.resume import data, strategies
from benchmarks.resume.data import Case, Layout, Step, order_of

pytestmark = pytest.mark.checkpoints


def test_some_cases():
    kept = Case("by epoch", Layout(2, 6), Layout(3, 4), keeps_global_batch=True, title="kept")
    grown = Case("stream", Layout(1, 3), Layout(2, 3, workers=2), title="grown")
    found = data.run([kept, grown])
    assert [(one.passed, one.faults) for one in found.values()] == [(5, []), (5, [])]
    difference = found[kept].loss_difference
    assert difference is not None
    assert difference < data.LOSS_TOLERANCE
    assert data.table(found)[2:] == [
        f"| by epoch | kept |  | 5 of 5 |  |  | {difference:.1e} |",
        "| stream | grown | 5 of 5 |  |  |  |  |",
    ]


def steps_of(epochs: int) -> list[Step]:
    return [
        Step(4 * epoch + batch, epoch, order_of(epoch)[12 * batch : 12 * batch + 12], 0.0)
        for epoch in range(epochs)
        for batch in range(4)
    ]


CASE = Case("by epoch", Layout(1, 12), Layout(1, 12))


@pytest.mark.parametrize("loop", ["by epoch", "by epoch, rounded up", "by iteration"])
def test_faults_are_seen(loop):
    case, steps = replace(CASE, loop=loop), steps_of(3)
    assert data._fault(case, steps[:6], steps[6:]) is None
    again = [*steps[:6], replace(steps[6], indices=steps[5].indices), *steps[7:]]
    swapped = [*steps[:6], replace(steps[6], indices=steps[6].indices[::-1]), *steps[7:]]
    fewer = [*steps[:6], replace(steps[6], indices=steps[6].indices[1:]), *steps[7:]]
    left_out = [*steps[:6], *(replace(step, iteration=step.iteration - 1) for step in steps[7:])]
    counted_twice = [*steps[:6], *(replace(step, iteration=step.iteration - 1) for step in steps[6:])]
    for wrong in (again, swapped, fewer, left_out, counted_twice):
        assert data._fault(case, wrong[:6], wrong[6:]) is not None


def test_cases_are_distinct_and_faults_of_rows_are_seen():
    cases = data.cases()
    assert len(cases) == len(set(cases))
    pairs = {
        (case.saved.ranks, case.resumed.ranks) for case in cases if case.loop == "stream" and case.keeps_global_batch
    }
    assert len(pairs) == 16
    names = [row.name for row in strategies.ROWS]
    found = {
        row.name: {
            "plain": {"losses": [0.0] * 16},
            "dropout": {"losses": [1.0] * 16},
            f"dropout from {row.name}": {"losses": [1.0] * 10},
            **{
                f"{kind} from {name}": dict.fromkeys(("model", "optimizer", "average", "schedules"), 0.0)
                | {"losses": [0.0] * 10}
                for name in names
                for kind in ("plain", "averaged")
            },
        }
        for row in strategies.ROWS
    }
    assert strategies.faults(strategies.ROWS, found) == []
    found["DDP-2"]["plain from FSDP-3"]["losses"] = [2e-6] * 10
    found["DDP-3"]["averaged from FSDP-3"]["average"] = 1e-9
    del found["single"]["plain from single"]
    found["FSDP-2"]["dropout from FSDP-2"]["losses"] = [1.0 + 1e-7] * 10  # not bit for bit
    found["FSDP-3"]["dropout"]["losses"] = found["FSDP-3"]["plain"]["losses"]  # there was none
    assert [line.split(":")[0] for line in strategies.faults(strategies.ROWS, found)] == [
        "single to single", "single to single", "FSDP-2, with dropout", "FSDP-3 to DDP-2", "FSDP-3 to DDP-3",
        "FSDP-3, with dropout",
    ]  # fmt: skip
