"""Collectives on a simulated accelerator, whose backend has NCCL's rules: what is right, what is read.

It shows that nothing goes over the CPU that should not, that no call waits for a `Work` that is not there, and how
often the host waits for the device; not that it works on hardware.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .calls import CALLS, Cost, table
from .conftest import HERE, Start, launch

BESIDE = "cpu:gloo,sim:simccl"
BACKENDS = {"alone": "sim:simccl", "default": BESIDE}


@pytest.fixture(scope="module", params=BACKENDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Start) -> Any:
    """What each rank of a job has found."""
    return request.param, launch(start, tmp_path_factory.mktemp("device"), 2, "job.py", request.param)


# Where a group has no backend for the CPU, what is on it is moved to the device and back.
ALONE: dict[str, Cost] = {
    "all_reduce, of the CPU": (2, 2, "all_reduce"),
    "all_gather, of the CPU": (3, 3, "all_gather_into_tensor"),
    "all_reduce_dict, of the CPU": (4, 4, "2 all_reduce"),
}


def costs(cost: Cost) -> list[tuple[int, str]]:
    return [(waits, cost[2]) for waits in cost[:2]]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_right_and_costs_no_more_than_it_must(found: Any, name: str) -> None:
    how, ranks = found
    call = CALLS[name]
    cost = ALONE.get(name, call.cost) if how == "alone" else call.cost
    expected = [[*one, gives] for one, gives in zip(costs(cost), call.gives, strict=True)]
    assert [rank[name][0] for rank in ranks] == expected


def test_a_table_says_what_calls_cost_and_what_those_of_torch_do(found: Any) -> None:
    how, ranks = found
    if how == "default":
        bare = {name: call.bare_cost for name, call in CALLS.items() if call.bare_cost is not None}
        assert {name: [tuple(rank[name][1][:2]) for rank in ranks] for name in bare} == {
            name: costs(cost) for name, cost in bare.items()
        }
    assert table() in (HERE.parents[1] / "docs" / "speed.md").read_text()


def test_each_rank_has_its_own_device_and_the_cpu_a_backend(found: Any) -> None:
    assert [rank["device"] for rank in found[1]] == ["sim:0", "sim:1"]
    assert [rank["backends"] for rank in found[1]] == [["simccl", BACKENDS[found[0]]]] * 2


def test_numbers_of_several_dtypes_are_read_as_they_are(found: Any) -> None:
    assert [rank["read"] for rank in found[1]] == [[4099, 2.5]] * 2


def test_no_thread_asks_a_device_in_the_context_of_another(found: Any) -> None:
    assert [rank["queries without a device"] for rank in found[1]] == [0, 0]


def test_a_backend_that_is_named_has_gloo_beside_it(start: Start, tmp_path: Path) -> None:
    assert [rank["backends"] for rank in launch(start, tmp_path, 2, "job.py", "named")] == [["simccl", BESIDE]] * 2


def test_each_rank_may_see_its_own_device_alone(start: Start, tmp_path: Path) -> None:
    assert [rank["device"] for rank in launch(start, tmp_path, 2, "job.py", "own")] == ["sim:0", "sim:0"]


def test_a_device_that_is_named_is_the_current_one(start: Start, tmp_path: Path) -> None:
    assert [rank["device"] for rank in launch(start, tmp_path, 2, "job.py", "chosen")] == ["sim:1", "sim:0"]


def test_a_device_that_two_ranks_see_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match="each rank must have a device of its own, but the local ranks 0, 1 share one with another"
    ):
        launch(start, tmp_path, 2, "job.py", "shared")


def test_ranks_that_are_hosts_of_their_own_to_nccl_may_share_a_device(start: Start, tmp_path: Path) -> None:
    assert [rank["device"] for rank in launch(start, tmp_path, 2, "job.py", "hosts")] == ["sim:0", "sim:0"]


def test_a_mesh_of_a_processs_second_group_has_working_groups_and_its_tensors_are_read(
    start: Start, tmp_path: Path
) -> None:
    assert [rank["sum"] for rank in launch(start, tmp_path, 4, "job.py", "again")] == [[2.0, 2.0]] * 4
