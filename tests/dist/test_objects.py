"""Objects between ranks: they arrive as they were sent, or every rank learns why not."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from lockstep.dist import (
    PeerError,
    all_gather,
    all_gather_object,
    all_gather_tree,
    barrier,
    broadcast_object,
    broadcast_object_list,
    broadcast_tree,
    gather,
    gather_object,
    get_default_group,
    get_rank,
    get_world_size,
    scatter_object_list,
)
from lockstep.dist.objects import start_gather_bytes
from lockstep.errors import DistError
from lockstep.testing import ranks, run_ranks
from lockstep.transport import control

from .drawn_objects import assert_same, made, plans
from .reference import assert_group_works
from .strategies import gradients_may_end

# --- every way from rank to rank, called alike: what this rank gets, and what it should


def by_all_gather(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    return all_gather_object(parts[get_rank(group)], group=group), parts


def by_all_gather_into_a_list(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    places = [None] * get_world_size(group)
    all_gather_object(places, parts[get_rank(group)], group)
    return places, parts


def by_gather(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    return gather_object(parts[get_rank(group)], root, group), parts if get_rank(group) == root else None


def by_gather_into_a_list(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    places = [None] * get_world_size(group) if get_rank(group) == root else None
    assert gather_object(parts[get_rank(group)], places, root, group) is None
    return places, parts if get_rank(group) == root else None


def by_broadcast(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    return broadcast_object(parts[get_rank(group)], root, group), parts[root]


def by_broadcast_of_a_list(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    data = [parts[get_rank(group)], "the end"]
    assert broadcast_object_list(data, root, group) is None
    return data, [parts[root], "the end"]


def by_scatter(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    output = [None]
    scatter_object_list(output, parts if get_rank(group) == root else None, root, group)
    return output[0], parts[get_rank(group)]


def by_all_gather_of_trees(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    return all_gather_tree(parts[get_rank(group)], group), parts


def by_broadcast_of_a_tree(parts: list[Any], root: int, group: ProcessGroup | None) -> tuple[Any, Any]:
    return broadcast_tree(parts[get_rank(group)], root, group), parts[root]


Way = Callable[[list[Any], int, ProcessGroup | None], tuple[Any, Any]]
WAYS: tuple[Way, ...] = (
    by_all_gather,
    by_all_gather_into_a_list,
    by_gather,
    by_gather_into_a_list,
    by_broadcast,
    by_broadcast_of_a_list,
    by_scatter,
    by_all_gather_of_trees,
    by_broadcast_of_a_tree,
)
FROM_ROOT = (by_broadcast, by_broadcast_of_a_list, by_broadcast_of_a_tree)


def send_every_way(parts: list[Any], root: int, group: ProcessGroup | None = None) -> None:
    with gradients_may_end():
        for way in WAYS:
            received, expected = way(parts, root, group)
            assert_same(received, expected)


def send_planned(drawn: list[Any], root: int, members: list[int] | None = None) -> None:
    """Send what was drawn, in the default group or in one of `members`, to which the others may not talk."""
    group = None if members is None else torch_dist.new_group(members)
    if members is None or torch_dist.get_rank() in members:
        send_every_way(made(drawn), root, group)


# --- objects arrive


@given(st.data())
@settings(max_examples=60)
def test_any_object_arrives_as_it_was_sent(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 4), label="ranks, 0 for no group")
    drawn = [data.draw(plans()) for _ in range(max(size, 1))]
    root = data.draw(st.integers(0, len(drawn) - 1), label="src, dst")
    if size:
        run_ranks(size, send_planned, drawn, root)
    else:
        send_planned(drawn, root)


@given(st.data())
@settings(max_examples=6)
def test_src_and_dst_are_ranks_of_the_group_in_hand(data: st.DataObject) -> None:
    members = data.draw(st.sampled_from([[1], [2, 3], [1, 3], [1, 2, 3]]))
    drawn = [data.draw(plans()) for _ in members]
    run_ranks(4, send_planned, drawn, data.draw(st.integers(0, len(members) - 1)), members)


@ranks(4)
def test_a_group_may_be_a_mesh_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row = get_rank() // 2 * 2
    assert all_gather_object(get_rank(), mesh["tp"]) == [row, row + 1]
    assert all_gather_object(get_rank(), group=mesh["tp"]) == [row, row + 1]
    assert gather_object(get_rank(), 1, mesh["tp"]) == ([row, row + 1] if get_rank() % 2 else None)
    assert broadcast_object(get_rank(), 1, mesh["tp"]) == row + 1


# --- how they are called


@ranks(2)
def test_arguments_may_be_named() -> None:
    rank, places = get_rank(), [None, None]
    assert all_gather_object(data=rank, group=None) == [0, 1]
    assert gather_object(data=rank, dst=1) == ([0, 1] if rank == 1 else None)
    assert gather_object(rank, object_gather_list=places if rank == 1 else None, dst=1) is None
    assert places == ([0, 1] if rank == 1 else [None, None])
    assert broadcast_object(obj=rank, src=1, group=None) == 1


@ranks(2)
def test_none_in_second_place_is_the_group_where_the_data_are_no_empty_places() -> None:
    assert all_gather_object("data", None) == ["data", "data"]
    assert all_gather_object([1, 2], None) == [[1, 2], [1, 2]]
    assert all_gather_object([None], None) == [[None], [None]]


def test_one_process_may_name_no_group_too() -> None:
    assert all_gather_object([None], None) == [[None]]
    assert all_gather_object([], None) == [[]]
    places = [None]
    assert all_gather_object(places, "data") is None
    assert places == ["data"]


def test_a_group_is_given_once() -> None:
    with pytest.raises(TypeError, match="`group` must be given once, but is given by its place and"):
        gather_object(1, 0, [0], group=[0])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="`group` must be given once, but is given by its place and"):
        gather(torch.ones(1), 0, [0], group=[0])


@ranks(2)
def test_a_group_is_given_once_to_a_call_that_gathers_on_all() -> None:
    group = get_default_group()
    for call, data in ((all_gather, torch.ones(1)), (all_gather_object, 1)):
        with pytest.raises(TypeError, match="`group` must be given once, but is given by its place and"):
            call(data, group, group=group)


@ranks(2)
def test_none_is_an_object_like_any_other() -> None:
    places = [None, None]
    assert all_gather_object(places, "here" if get_rank() == 0 else None) is None
    assert places == ["here", None]
    assert all_gather_object(None) == [None, None]


@ranks(3)
def test_ranks_may_mix_the_two_calling_orders() -> None:
    places = [None] * 3
    if get_rank() == 1:
        all_gather_object(places, get_rank())
    else:
        places = all_gather_object(get_rank())
    assert places == [0, 1, 2]


@ranks(3)
def test_a_process_outside_the_group_is_told_so_and_nobody_waits() -> None:
    group = torch_dist.new_group([1, 2])
    data = ["as long", "as the", "world"]
    if get_rank() == 0:
        for call in (all_gather_object, gather_object, broadcast_object):
            with pytest.raises(ValueError, match="must contain the calling process, but rank 0 of 3"):
                call(data, group=group)
        with pytest.raises(ValueError, match="must contain the calling process, but rank 0 of 3"):
            all_gather_object(data, group)
    assert_group_works()


# --- what arrives is one's own


@ranks(2)
def test_received_data_share_no_memory_with_what_was_sent_nor_with_each_other() -> None:
    mine = [torch.ones(4), torch.ones(2**16), np.ones(4), np.ones(2**16)]
    from_src = broadcast_object(mine)  # which src itself gets back as it is
    parts = [*all_gather_object(mine), *(gather_object(mine) or []), *([from_src] if get_rank() else [])]
    received = [x for part in parts for x in part]
    for number, data in enumerate(received):
        data.fill(number) if isinstance(data, np.ndarray) else data.fill_(number)
    assert [float(data[0]) for data in received] == list(range(len(received)))
    assert all(float(data[0]) == 1 for data in mine)


@ranks(1, 2)
def test_data_are_read_only_only_where_they_were() -> None:
    mine = {"small": np.ones(4), "large": np.ones(2**16)}
    for data in mine.values():
        data.flags.writeable = False
    for part in all_gather_object([mine, np.ones(4), np.ones(2**16)]):
        assert [data.flags.writeable for data in (*part[0].values(), *part[1:])] == [False, False, True, True]


@ranks(1, 2)
def test_one_tensor_in_two_places_stays_one() -> None:
    small, large = torch.ones(4), torch.ones(2**16)
    for part in all_gather_object({"a": small, "b": [small, large], "c": large}):
        assert part["a"] is part["b"][0]
        assert part["b"][1] is part["c"]


@ranks(2)
def test_a_nested_tensor_arrives_as_pickle_sends_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype, says torch
        sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    for received in all_gather_object(sent):
        assert [part.tolist() for part in received.unbind()] == [[1.0] * 2, [0.0] * 3]


# --- sizes at and above the thresholds


@ranks(2)
def test_letters_of_every_length_around_that_of_a_slot_arrive() -> None:
    for nbytes in range(3960, 4100, 2):
        assert all_gather_object(b"x" * (nbytes + get_rank())) == [b"x" * nbytes, b"x" * (nbytes + 1)]
    for nbytes in range(3960, 4100, 7):
        send_every_way([b"x" * nbytes, b"short"], 0)


@ranks(3)
def test_data_of_every_length_around_that_of_a_segment_arrive() -> None:
    for nbytes in (2**16 - 1, 2**16, 2**16 + 1):
        send_every_way([torch.ones(nbytes, dtype=torch.uint8), np.ones(nbytes, np.uint8), b"x" * nbytes], 1)


@ranks(2, 3)
def test_one_rank_sends_megabytes_where_others_send_nothing() -> None:
    parts = [{"mask": torch.arange(2**20), "box": np.arange(1000)}, None, [torch.ones(2**16)]][: get_world_size()]
    send_every_way(parts, get_world_size() - 1)
    send_every_way(parts, 0)


@ranks(2)
def test_so_many_segments_that_their_sizes_alone_fill_a_header() -> None:
    # Each of another size, so that none can be taken for another.
    masks = [torch.full((2**14 + number,), number, dtype=torch.int32) for number in range(520)]
    for way in (by_all_gather, by_gather, by_broadcast, by_scatter):
        received, expected = way([masks[:3], masks], 1, None)
        assert_same(received, expected)


# --- objects that do not arrive


class Stubborn:
    """Refuses to be pickled, with an error of its own."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


UNPICKLABLE: dict[str, Callable[[], object]] = {
    "lambda": lambda: lambda: 0,
    "open file": lambda: sys.stdout,
    "lock": threading.Lock,
    "ValueError": lambda: Stubborn(ValueError("not today")),
    "RuntimeError": lambda: Stubborn(RuntimeError("not today")),
    "message that is no text": lambda: Stubborn(OSError("no file \udcff")),
}


def one_rank_cannot_pickle(way: Way, culprits: set[int], kind: str) -> None:
    rank, size, first = get_rank(), get_world_size(), min(culprits)
    parts = [{"entry": UNPICKLABLE[kind]()} if other in culprits else "well" for other in range(size)]
    teller = scatter_root(culprits, size) if way is by_scatter else None
    is_own_fault = rank == teller if way is by_scatter else rank in culprits
    with pytest.raises(TypeError if is_own_fault else PeerError) as caught:
        way(parts, first if teller is None else teller, None)
    if is_own_fault:
        assert f"is not: {caught.value.__cause__} (rank {rank} of {size})" in str(caught.value)
    else:
        assert caught.value.rank == (first if teller is None else teller)
        assert caught.value.cause.startswith("TypeError: the object must be picklable, but ")
    assert_group_works()


def scatter_root(culprits: set[int], size: int) -> int:
    """Return a rank that sends the bad entry to another: its own it would keep."""
    return (min(culprits) + 1) % size


@pytest.mark.parametrize("kind", UNPICKLABLE)
def test_an_object_that_cannot_be_pickled_is_a_type_error_there_and_a_peer_error_elsewhere(kind: str) -> None:
    for way in WAYS:
        run_ranks(3, one_rank_cannot_pickle, way, {1}, kind)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in FROM_ROOT])
def test_every_rank_whose_object_cannot_be_pickled_says_so_itself(way: Way) -> None:
    run_ranks(2, one_rank_cannot_pickle, way, {0, 1}, "lock")


def cannot_pickle_alone() -> None:
    for way in (by_all_gather, by_gather, by_broadcast):
        with pytest.raises(TypeError, match=r"must be picklable, but function is not: .* \(rank 0 of 1\)"):
            way([lambda: 0], 0, None)


def test_one_process_refuses_what_several_would() -> None:
    cannot_pickle_alone()
    run_ranks(1, cannot_pickle_alone)


def foreign_object() -> Any:
    """Return an object of a class that no other rank knows."""
    module = ModuleType("known_to_one_rank_alone")
    exec("class Result: pass", vars(module))
    sys.modules[module.__name__] = module
    return module.Result()


def one_rank_alone_knows_the_class(way: Way, owner: int) -> None:
    rank, size = get_rank(), get_world_size()
    parts: list[Any] = ["well"] * size
    loads_it = rank != owner and (way not in (by_gather, by_gather_into_a_list) or rank == size - 1 - owner)
    root = size - 1 - owner if way in (by_gather, by_gather_into_a_list) else owner
    try:
        if rank == owner:
            parts = [foreign_object()] * size
        if loads_it:
            with pytest.raises(DistError, match=f"object of rank {owner} must be loadable here, .*known_to_one_rank"):
                way(parts, root, None)
        else:
            way(parts, root, None)
    finally:
        sys.modules.pop("known_to_one_rank_alone", None)
    assert_group_works()


@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_cannot_be_loaded_is_an_error_where_it_arrives(way: Way) -> None:
    run_ranks(3, one_rank_alone_knows_the_class, way, 2)


# --- wrong calls


def test_a_list_to_fill_without_an_object_is_refused() -> None:
    with pytest.raises(TypeError, match="must be given `obj`, this rank's object, with `object_list`"):
        all_gather_object(object_list=[None])


@ranks(2)
def test_a_list_without_a_place_for_each_rank_is_an_error_on_every_rank() -> None:
    right, wrong = [None] * 2, [None] * 3
    for kind, call in (
        ("object_list", lambda places: all_gather_object(places, "data")),
        ("object_gather_list", lambda places: gather_object("data", places, 1)),
        ("scatter_object_input_list", lambda places: scatter_object_list([None], places, 1)),
    ):
        if get_rank() == 1:
            with pytest.raises(ValueError, match=rf"`{kind}` must be .* 2 entries.* but is 3 entries \(rank 1 of 2\)"):
                call(wrong)
        else:
            with pytest.raises(PeerError, match=f"rank 1 of 2 could not take part: ValueError: `{kind}`"):
                call(right if kind == "object_list" else None)
        assert_group_works()


@ranks(2)
def test_scatter_without_a_list_on_src_is_an_error_on_every_rank() -> None:
    with pytest.raises(
        ValueError if get_rank() == 0 else PeerError, match="entries, one for each rank, but is NoneType"
    ):
        scatter_object_list([None])
    assert_group_works()


@ranks(2)
def test_a_list_of_another_length_than_that_of_src_is_an_error_where_it_is() -> None:
    data = [1, 2] if get_rank() == 0 else [None]
    if get_rank() == 0:
        broadcast_object_list(data)
    else:
        with pytest.raises(ValueError, match=r"`data` must have 2 entries, as on rank 0, but has 1 \(rank 1 of 2\)"):
            broadcast_object_list(data)
    assert_group_works()


@ranks(1, 2)
def test_a_rank_outside_the_group_is_refused_before_anything_is_sent() -> None:
    size = get_world_size()
    for call in (
        lambda: gather_object("data", size),
        lambda: broadcast_object("data", -1),
        lambda: broadcast_object_list(["data"], size),
        lambda: broadcast_tree("data", size),
        lambda: scatter_object_list([None], ["data"] * size, size),
    ):
        with pytest.raises(ValueError, match="must be a rank within the group"):
            call()
    with pytest.raises(TypeError, match="`dst` must be an int, but is True"):
        gather_object("data", True)
    assert_group_works()


def test_what_is_no_list_is_refused() -> None:
    with pytest.raises(TypeError, match="`data` must be a list, but is tuple"):
        broadcast_object_list(("data",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`scatter_object_output_list` must be a list with at least one place"):
        scatter_object_list([], ["data"])


@ranks(2)
def test_evaluation_gathers_under_inference_mode() -> None:
    with torch.inference_mode():
        scores = torch.ones(2**16) * get_rank()
        parts = all_gather_object([scores, scores[:2]])
    received: list[Tensor] = [x for part in parts for x in part]
    assert [float(x.sum()) for x in received] == [0, 0, 2**16, 2]


@ranks(2)
def test_the_default_device_is_for_tensors_of_the_user_alone() -> None:
    parts = [{"rank": 0, "letter": b"x" * 5000}, [torch.ones(2**16), torch.ones(3), torch.ones(0), np.ones(2**16)]]
    with torch.device("meta"):
        outcomes = [way(parts, 1, None) for way in WAYS]
    for received, expected in outcomes:
        assert_same(received, expected)


# --- bytes that are gathered while the ranks go on


@ranks(1, 2, 4)
@pytest.mark.parametrize("nbytes", [0, 4_000, 300_000])  # in one message, in part of it, and beside it
def test_bytes_are_gathered_beside_other_collectives(nbytes: int):
    rank, size = get_rank(), get_world_size()
    handles = []
    for number in range(3):
        handles.append(start_gather_bytes(bytes([rank, number]) * (nbytes + rank), size - 1))
        assert gather_object((number, rank), size - 1) == (
            [(number, other) for other in range(size)] if rank == size - 1 else None
        )
        assert [x.tolist() for x in all_gather(torch.full((20_000,), rank))] == [
            [other] * 20_000 for other in range(size)
        ]
    for number, handle in enumerate(handles):
        expected = [bytes([other, number]) * (nbytes + other) for other in range(size)] if rank == size - 1 else None
        with patch.object(control, "transfer_between_hosts", wraps=control.transfer_between_hosts) as moved:
            assert handle.wait() == handle.wait() == expected
        # What is left of all ranks is received at the same time.
        assert len([call for call in moved.call_args_list if call.args[0]]) == (rank == size - 1 > 0)
    assert_group_works()


@ranks(2)
def test_a_gathering_is_complete_when_all_ranks_have_begun_it():
    rank = get_rank()
    barrier()
    if rank == 1:
        time.sleep(0.5)
    handle = start_gather_bytes(bytes([rank]))
    assert rank == 1 or not handle.is_completed()
    assert handle.wait() == ([b"\0", b"\1"] if rank == 0 else None)
    assert handle.is_completed()
    assert_group_works()
