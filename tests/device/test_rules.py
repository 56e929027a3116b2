"""What the simulator does: it is asynchronous where NCCL is, and what is wrong with NCCL is wrong there, too."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .conftest import HERE, Start, finish

ABORTED = "NCCL communicator was aborted"
BARRIER = {"collective barrier": 1, "waits": 1}


def run(start: Start, name: str, folder: Path, expected: tuple[int, int] = (0, 0)) -> list[Any]:
    ranks = [start(HERE / "rules.py", name, rank, folder) for rank in range(2)]
    with ExitStack() as ends:
        for rank, code in zip(ranks, expected, strict=True):
            ends.callback(finish, rank, code)
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}_*.json"))]


@pytest.fixture(scope="module")
def rules(start: Start, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rule gives on both ranks."""
    return run(start, "all_rules", tmp_path_factory.mktemp("rules"))


def test_the_host_goes_on_beyond_collectives_until_it_reads(rules: Any) -> None:
    work, is_past = False, False  # of rank 0, which rank 1 keeps waiting
    assert rules[0]["queued"] == [None, work, True, is_past, [1], 12.0, True, True]
    assert rules[1]["queued"] == [12.0, True, True]


def test_what_is_read_too_early_is_no_result(rules: Any) -> None:
    assert [rank["early"] for rank in rules] == [[True, own, True, True, 3.0] for own in (1.0, 2.0)]


def test_futures_and_events_are_those_of_the_streams(rules: Any) -> None:
    assert [rank["futures"] for rank in rules] == [[True, 3.0, 6.0]] * 2
    assert [rank["events"] for rank in rules] == [[True, True, True]] * 2


@pytest.mark.parametrize(
    ("name", "results", "counted"),
    [
        ("broadcast", ([2.0], [2.0]), None),
        ("all_reduce", ([1.5], [1.5]), None),
        ("reduce", ([1.0], [3.0]), None),
        ("all_gather", ([[1.0], [2.0]], [[1.0], [2.0]]), None),
        ("all_gather, uneven", ([[1.0], [2.0, 2.0]], [[1.0], [2.0, 2.0]]), "coalesced"),
        ("all_gather_into_tensor", ([1.0, 2.0], [1.0, 2.0]), None),
        ("gather", ([[1.0], [2.0]], [[1.0], [2.0]]), None),
        ("scatter", ([5.0], [6.0]), None),
        ("reduce_scatter", ([3.0], [6.0]), None),
        ("reduce_scatter_tensor", ([10.0], [12.0]), None),
        ("all_to_all_single", ([0.0, 10.0], [1.0, 11.0]), None),
        ("all_to_all_single, uneven", ([2.0], [1.0, 1.0, 2.0]), "all_to_all_single"),
        ("all_to_all", ([[0.0], [10.0]], [[1.0], [11.0]]), None),
        ("batch_isend_irecv", ([2.0], [1.0]), "coalesced"),
        ("coalesced all_reduce", ([[3.0], [10.0, 12.0]], [[3.0], [10.0, 12.0]]), "coalesced"),
    ],
)
def test_a_collective_is_right_and_counted_once(rules: Any, name: str, results: Any, counted: str | None) -> None:
    assert [rank["collectives"][name] for rank in rules] == [
        [result, {f"collective {counted or name}": 1}] for result in results
    ]


def test_messages_and_the_barrier(rules: Any) -> None:
    assert [rank["collectives"]["send, recv"] for rank in rules] == [
        [[1.0], {"collective send": 1}],
        [[1.0], {"collective recv": 1}],
    ]
    assert [rank["collectives"]["barrier"][1] for rank in rules] == [BARRIER] * 2  # NCCL's waits on the host


def test_what_nccl_refuses_is_refused(rules: Any) -> None:
    said = [
        "Cannot use a bit operation with simccl",
        "Input tensor data type is not supported for simccl process group: Short",
        "Tensors must be contiguous",
        "No backend type associated with device type cpu",
    ]
    assert [rank["refused"] for rank in rules] == [said] * 2


def test_calls_that_differ_never_complete_until_the_group_is_aborted(rules: Any) -> None:
    for number, rank in enumerate(rules):
        assert rank["mismatches"] == {
            **dict.fromkeys(["op", "dtype", "size", "order", "left out"], False),
            "a call after the abort": f"{ABORTED} on rank {number}",
            "a wait after the abort": f"{ABORTED} on rank {number}",
            "the others": 3.0,
        }


def test_subgroups_and_several_devices_in_a_process(rules: Any) -> None:
    assert [rank["groups"] for rank in rules] == [[own, 3.0, "sim:simccl"] for own in (1.0, 2.0)]
    assert [rank["devices"] for rank in rules] == [[True]] * 2


def test_the_watchdog_ends_a_process_whose_call_takes_longer_than_the_timeout(start: Start, tmp_path: Path) -> None:
    run(start, "late", tmp_path, (-signal.SIGABRT, 0))


def test_nothing_is_said_of_a_dead_rank(start: Start, tmp_path: Path) -> None:
    assert run(start, "dead", tmp_path) == [[True, True]]


def test_a_forked_child_cannot_use_the_device(start: Start, tmp_path: Path) -> None:
    assert run(start, "forked", tmp_path) == [[7, False]] * 2
