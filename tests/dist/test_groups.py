"""Laws of groups: src and dst are ranks within them, strangers are refused, meshes with one axis are groups."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, ref

import pytest
import torch
import torch.distributed as torch_dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep import groups
from lockstep.dist import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_object_list,
    check_collectives,
    gather,
    gather_object,
    get_backend,
    get_comm_device,
    get_device,
    get_dist_info,
    get_rank,
    get_world_size,
    is_main_process,
    main_process_first,
    reduce,
    reduce_scatter,
    run_on_main,
    scatter,
    sync_random_seed,
)
from lockstep.errors import PeerError
from lockstep.groups import GroupLike, known_groups, resolve
from lockstep.testing import ranks, run_ranks

from .reference import assert_group_works

Members = tuple[int, ...]
# Every way to choose some of up to four ranks; most leave rank 0 out, or keep another order than the numbers'.
SUBGROUPS = [(2, (1,)), (2, (0,)), (3, (1, 2)), (3, (0, 2)), (4, (1, 3)), (4, (1, 2, 3)), (4, (2, 3)), (4, (3,))]

COLLECTIVES: list[Callable[[GroupLike], Any]] = [
    lambda group: all_reduce(torch.ones(1), group=group),
    lambda group: reduce(torch.ones(1), group=group),
    lambda group: reduce_scatter(torch.ones(1), [torch.ones(1)], group=group),
    lambda group: broadcast(torch.ones(1), group=group),
    lambda group: all_to_all([torch.ones(1)], [torch.ones(1)], group),
    lambda group: barrier(group),
    lambda group: all_gather(torch.ones(1), group),
    lambda group: all_gather([torch.ones(1)], torch.ones(1), group),
    lambda group: gather(torch.ones(1), 0, group),
    lambda group: scatter(torch.ones(1), [torch.ones(1)], 0, group),
    lambda group: all_gather_object(1, group=group),
    lambda group: gather_object(1, 0, group),
    lambda group: broadcast_object_list([1], 0, group),
    lambda group: sync_random_seed(group=group),
    lambda group: main_process_first(group).__enter__(),
    get_backend,
    get_rank,
    get_world_size,
    get_dist_info,
    get_comm_device,
    is_main_process,
]


def collectives_of(members: Members, root: int, numel: int) -> dict[str, list[float]] | None:
    """Run every collective in a subgroup; return what each gave to this rank, which calls itself by its global rank."""
    group, me, size = torch_dist.new_group(list(members)), float(get_rank()), len(members)
    if me not in members:
        return None
    seen: dict[str, list[float]] = {}
    assert get_dist_info(group) == (members.index(int(me)), size)

    def mine(count: int = 1) -> list[Tensor]:
        return [torch.full((numel,), 10 * me + index) for index in range(count)]

    def room(count: int = size) -> list[Tensor]:
        return [torch.zeros(numel) for _ in range(count)]

    (total,), (maximum,), (copy,), (part,), (share,) = mine(), mine(), mine(), room(1), room(1)
    all_reduce(total, group=group)
    reduce(maximum, root, "max", group)
    broadcast(copy, root, group)
    reduce_scatter(part, mine(size), group=group)
    scatter(share, mine(size) if get_rank(group) == root else None, root, group)
    filled, exchanged = room(), room()
    all_gather(filled, *mine(), group)
    all_to_all(exchanged, mine(size), group)
    seen["all_reduce"] = total.unique().tolist()
    seen["reduce"] = maximum.unique().tolist() if get_rank(group) == root else []
    seen["broadcast"] = copy.unique().tolist()
    seen["reduce_scatter"] = part.unique().tolist()
    seen["scatter"] = share.unique().tolist()
    for name, row in (
        ("all_gather", all_gather(*mine(), group)),
        ("all_gather into", filled),
        ("gather", gather(*mine(), root, group)),
        ("all_to_all", exchanged),
    ):
        seen[name] = [value for x in row for value in x.unique().tolist()]
    barrier(group)
    assert_group_works(group)
    return seen


@given(st.sampled_from(SUBGROUPS), st.integers(0, 2), st.sampled_from([1, 1000]))
@settings(max_examples=10)
def test_in_a_subgroup_src_and_dst_are_ranks_of_the_group(case: tuple[int, Members], root: int, numel: int) -> None:
    world_size, members = case
    root %= len(members)
    for world_rank, seen in enumerate(run_ranks(world_size, collectives_of, members, root, numel)):
        if world_rank not in members:
            assert seen is None
            continue
        rank, tens = members.index(world_rank), [10.0 * member for member in members]
        is_root = rank == root
        assert seen == {
            "all_reduce": [sum(tens)],
            "reduce": [max(tens)] if is_root else [],
            "broadcast": [tens[root]],
            "reduce_scatter": [sum(tens) + rank * len(members)],
            "scatter": [tens[root] + rank],
            "all_gather": tens,
            "all_gather into": tens,
            "gather": tens if is_root else [],
            "all_to_all": [ten + rank for ten in tens],
        }


def be_a_stranger(check: str) -> None:
    group, mesh = torch_dist.new_group([1]), DeviceMesh("cpu", [1])
    check_collectives(check)
    try:
        for one in (group, mesh):
            for call in COLLECTIVES:
                if get_rank() == 1:
                    call(one)
                else:
                    with pytest.raises(ValueError, match=r"`group` must contain the calling process, but rank 0 of 2"):
                        call(one)
    finally:
        check_collectives("off")
    assert_group_works()


@pytest.mark.parametrize("check", ["off", "always"])
def test_a_process_outside_of_a_group_gets_a_value_error_from_everything(check: str) -> None:
    run_ranks(2, be_a_stranger, check)


@ranks(4)
def test_an_axis_of_a_mesh_is_a_group() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    row, column = get_rank() // 2, get_rank() % 2
    for name, rank, members in (("data", row, [column, column + 2]), ("model", column, [2 * row, 2 * row + 1])):
        axis = mesh[name]
        assert get_dist_info(axis) == (rank, 2)
        assert all_gather(torch.tensor(get_rank()), axis) == members
        data = torch.tensor(get_rank())
        broadcast(data, 1, axis)
        assert data == members[1]
        assert_group_works(axis)


@ranks(2)
def test_a_mesh_with_one_axis_is_a_group() -> None:
    mesh = init_device_mesh("cpu", (2,))
    data = torch.tensor(get_rank())
    reduce(data, 1, "max", mesh)
    assert get_rank() == 0 or data == 1
    assert all_gather_object("ab"[get_rank()], group=mesh) == ["a", "b"]
    assert_group_works(mesh)


@ranks(2)
def test_a_mesh_with_two_axes_is_refused_by_name() -> None:
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    nameless = init_device_mesh("cpu", (1, 2))
    for call in COLLECTIVES:
        with pytest.raises(ValueError, match=r"one axis, but has 2 \(data, model\). Name one: mesh\['data'\]"):
            call(named)
        with pytest.raises(ValueError, match=r"one axis, but has 2 \(without names\). Give it mesh_dim_names"):
            call(nameless)
    assert_group_works()


@ranks(2)
def test_what_is_no_group_is_refused() -> None:
    for wrong in ("gloo", 7, [0, 1], torch.ones(2), object()):
        for call in COLLECTIVES:
            with pytest.raises(
                TypeError, match="`group` must be None, a ProcessGroup or a one-axis DeviceMesh, but is"
            ):
                call(wrong)
    assert_group_works()


class Foreign(torch_dist.ProcessGroup):
    """A group as torchft makes them: torch knows of one rank, and it has two."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def size(self) -> int:
        return 2

    def getBackendName(self) -> str:  # noqa: N802
        return "foreign:0"


@ranks(2)
def test_a_group_whose_ranks_torch_does_not_know_is_refused() -> None:
    group = Foreign()
    with pytest.raises(ValueError, match=r"is a Foreign: torch.distributed does not know it\. Make it by"):
        all_reduce(torch.ones(1), group=group)
    known = torch_dist.distributed_c10d._world.pg_group_ranks  # as torchft's `register` does, by new_group
    known[group] = {get_rank(): 0}
    for call in (lambda: all_reduce(torch.ones(1), group=group), lambda: all_gather_object(1, group)):
        with pytest.raises(ValueError, match=r"is a Foreign: it has 2 ranks, of which torch.distributed knows 1"):
            call()
    del known[group]
    assert_group_works()


@ranks(3)
def test_a_failure_in_a_subgroup_stays_there() -> None:
    group = torch_dist.new_group([1, 2])
    if get_rank() == 1:
        with pytest.raises(ValueError, match=r"`tensor_list` must have 2 entries, .* \(rank 0 of 2\)"):
            all_gather([torch.ones(1)], torch.ones(1), group)
    elif get_rank() == 2:
        with pytest.raises(PeerError, match=r"rank 0 of 2 could not take part: ValueError") as raised:
            all_gather(torch.ones(1), group)
        assert raised.value.rank == 0
    assert_group_works()
    if get_rank() > 0:
        assert_group_works(group)


@ranks(1, fresh=True)
def test_a_backend_that_names_devices_which_are_not_there_talks_on_the_cpu() -> None:
    torch_dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
    assert get_dist_info() == (3, 1024)
    assert get_comm_device().type == get_device()
    all_reduce(torch.ones(2))
    barrier()
    barrier(async_op=True).wait()
    large = "x" * 10_000
    assert gather_object(large, 3)[3] == broadcast_object(large) == run_on_main(lambda: large) == large


@ranks(1)
def test_groups_are_known_to_a_thread_while_another_one_makes_a_group() -> None:
    resolve()
    found, values = known_groups(), WeakKeyDictionary.values
    changed = RuntimeError("dictionary changed size during iteration")
    with patch.object(WeakKeyDictionary, "values", side_effect=[changed, values(groups._resolved)]):
        assert known_groups() == found != []


@ranks(2)
def test_groups_without_a_backend_for_the_cpu_may_be_made_again_and_again() -> None:
    for _ in range(3):
        group = torch_dist.new_group(backend="cuda:gloo")
        barrier(group)
        assert all_gather_object(get_rank(), group=group) == [0, 1]
        torch_dist.destroy_process_group(group)


@ranks(3, timeout=60)
def test_hosts_of_a_group_without_a_backend_for_the_cpu_meet_though_ranks_are_in_unequal_numbers_of_groups() -> None:
    other = torch_dist.new_group([0, 1])
    group = torch_dist.new_group(backend="cuda:gloo")
    assert all_gather_object(get_rank(), group=group) == [0, 1, 2]
    del other


@ranks(2)
def test_a_group_ends_with_its_owner() -> None:
    group = torch_dist.new_group([0, 1])
    assert_group_works(group)
    all_gather(torch.ones(1000), group)
    broadcast(torch.ones(1), 0, group, async_op=True).wait()
    all_gather_object({}, group=group)
    torch_dist.destroy_process_group(group)
    remembered = ref(group)
    del group
    gc.collect()
    assert remembered() is None
