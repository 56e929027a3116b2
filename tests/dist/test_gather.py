"""Laws of all_gather, gather and scatter: any shapes and dtypes, both calling orders, errors that reach every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.dist import (
    all_gather,
    gather,
    gather_object,
    get_default_group,
    get_dist_info,
    get_rank,
    get_world_size,
    scatter,
)
from lockstep.errors import PeerError
from lockstep.testing import ranks
from lockstep.transport.handles import Handle

from .reference import assert_group_works
from .strategies import (
    LAYOUTS,
    NO_GROUP,
    SIZES,
    Drawn,
    Laid,
    Sent,
    any_tensors,
    bytes_of,
    gradients_may_end,
    lay_out,
    run_on,
    same_bytes,
    zeros,
)

# How a rank calls: all_gather(data) or all_gather(list, data), and that with a handle.
FORMS = ("returns", "fills", "fills later")
LARGE = 1000  # elements: more than fits into a header


@dataclass(frozen=True)
class Gathering:
    """One tensor from each rank, and in which form each calls."""

    drawn: Drawn
    forms: list[str]
    dst: int


@st.composite
def gatherings(draw: Callable[..., Any]) -> tuple[int, list[Gathering]]:
    """Draw a number of ranks, and tensors that differ from rank to rank in everything, large and small mixed."""
    size = draw(st.sampled_from(SIZES))
    everyone = max(size, 1)
    return (
        size,
        [
            Gathering(
                Drawn(
                    draw(st.lists(any_tensors(), min_size=everyone, max_size=everyone)), draw(st.sampled_from(LAYOUTS))
                ),
                ["fills later"] * everyone  # which does not meet the others
                if draw(st.booleans())
                else draw(st.lists(st.sampled_from(FORMS[:-1]), min_size=everyone, max_size=everyone)),
                draw(st.integers(0, everyone - 1)),
            )
            for _ in range(draw(st.integers(1, 4)))
        ],
    )


def own(call: Gathering) -> Tensor:
    data = call.drawn.here().data
    return data.requires_grad_(data.dtype.is_floating_point)


def places(call: Gathering) -> list[Laid]:
    """Return room for every rank's tensor, laid out as the tensors are."""
    return [lay_out(zeros(tuple(x.shape), x.dtype), call.drawn.layout) for x in call.drawn.tensors]


def all_gather_each(todo: list[Gathering]) -> list[list[Sent]]:
    with gradients_may_end():
        return [[Sent(x) for x in all_gather_one(call)] for call in todo]


def all_gather_one(call: Gathering) -> list[Tensor]:
    data = own(call)
    before, form = bytes_of(data), call.forms[get_rank()]
    if form == "returns":
        gathered = all_gather(data)
        assert all(x.is_contiguous() and not x.requires_grad for x in gathered)
    else:
        room = places(call)
        finish(all_gather([x.data for x in room], data, async_op=form == "fills later"))
        assert all(x.has_clean_gaps() for x in room)
        gathered = [x.data for x in room]
    assert torch.equal(bytes_of(data), before)
    return gathered


def finish(handle: Handle | None) -> None:
    if handle is not None:
        assert handle.wait()
        assert handle.wait()
        assert handle.is_completed()


@given(gatherings())
@settings(max_examples=60)
def test_all_gather_gives_every_rank_the_tensors_of_all_in_either_form(case: tuple[int, list[Gathering]]) -> None:
    size, todo = case
    for rows in run_on(size, all_gather_each, todo):
        for call, row in zip(todo, rows, strict=True):
            assert all(same_bytes(mine.data, wanted) for mine, wanted in zip(row, call.drawn.tensors, strict=True))


def gather_each(todo: list[Gathering]) -> list[list[Sent]]:
    with gradients_may_end():
        return [[Sent(x) for x in gather_one(call)] for call in todo]


def gather_one(call: Gathering) -> list[Tensor]:
    data, is_dst = own(call), get_rank() == call.dst
    before, form = bytes_of(data), call.forms[get_rank()]
    if form == "returns":
        gathered = gather(data, call.dst)
    else:
        room = places(call) if is_dst else None
        rooms = [x.data for x in room] if room is not None else None
        done = gather(data, rooms, call.dst, async_op=form == "fills later")
        if form == "fills later":
            finish(done)
        else:
            assert done is None if is_dst else done == []
        assert room is None or all(x.has_clean_gaps() for x in room)
        gathered = rooms or []
    assert torch.equal(bytes_of(data), before)
    return gathered


@given(gatherings())
@settings(max_examples=50)
def test_gather_gives_dst_the_tensors_of_all_in_either_form(case: tuple[int, list[Gathering]]) -> None:
    size, todo = case
    for rank, rows in enumerate(run_on(size, gather_each, todo)):
        for call, row in zip(todo, rows, strict=True):
            wanted = call.drawn.tensors if rank == call.dst else []
            assert all(same_bytes(mine.data, x) for mine, x in zip(row, wanted, strict=True))


def scatter_each(todo: list[Gathering]) -> list[Sent]:
    with gradients_may_end():
        return [Sent(scatter_one(call)) for call in todo]


def scatter_one(call: Gathering) -> Tensor:
    mine = places(call)[get_rank()]
    mine.data.requires_grad_(mine.data.dtype.is_floating_point)
    parts = [lay_out(x, call.drawn.layout).data for x in call.drawn.tensors] if get_rank() == call.dst else None
    finish(scatter(mine.data, parts, call.dst, async_op=call.forms[get_rank()] == "fills later"))
    assert mine.has_clean_gaps()
    assert mine.data.grad_fn is None
    return mine.data


@given(gatherings())
@settings(max_examples=40)
def test_scatter_gives_rank_i_the_ith_tensor_of_src(case: tuple[int, list[Gathering]]) -> None:
    size, todo = case
    for rank, received in enumerate(run_on(size, scatter_each, todo)):
        for call, mine in zip(todo, received, strict=True):
            assert same_bytes(mine.data, call.drawn.tensors[rank])


def change_what_was_gathered() -> None:
    for numel in (1, LARGE):
        data = torch.full((numel,), 1.0 + get_rank())
        for gathered in (all_gather(data), gather(data, 0)):
            for rank, part in enumerate(gathered):
                assert part[0].item() == 1 + rank
                part.fill_(-1)
        assert data[0].item() == 1 + get_rank()


@pytest.mark.parametrize("size", SIZES)
def test_what_was_gathered_has_memory_of_its_own(size: int) -> None:
    run_on(size, change_what_was_gathered)


def name_the_group() -> None:
    data, group, size = torch.tensor([get_rank()]), get_default_group(), get_world_size()
    room = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    assert all_gather(data, group) == all_gather(data, group=group) == all_gather(data, None) == list(range(size))
    all_gather(room, data, group)
    assert room == list(range(size))
    wanted = list(range(size)) if get_rank() == size - 1 else []
    assert gather(data, size - 1, group) == gather(data, dst=size - 1, group=group) == wanted
    gather(data, [x.zero_() for x in room] if wanted else None, size - 1, group)
    assert room == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_the_group_stands_in_its_place_in_either_form(size: int) -> None:
    run_on(size, name_the_group)


@ranks(2)
def test_a_list_may_hold_the_tensor_that_is_gathered() -> None:
    for numel in (1, LARGE):
        row = [torch.full((numel,), float(get_rank())) for _ in range(2)]
        all_gather(row, row[get_rank()])
        assert [x.unique().tolist() for x in row] == [[0.0], [1.0]]


@ranks(2)
def test_the_tensor_that_is_gathered_may_be_one_to_fill_for_another_rank() -> None:
    for numel in (1, LARGE, 2**20):
        data, other = torch.full((numel,), float(get_rank())), torch.zeros(numel)
        gather(data, [other, data] if get_rank() == 0 else None, 0)
        if get_rank() == 0:
            assert [x.unique().tolist() for x in (other, data)] == [[0.0], [1.0]]


@ranks(2)
def test_what_is_sent_and_what_src_keeps_of_a_scatter_is_said_to_be_read_on_the_present_stream() -> None:
    """Who waits may do so on another stream than that on which the copy was allocated."""
    rows = torch.arange(4.0).view(2, 2).t()
    data, read = torch.empty(2), list[Tensor]()
    with patch("lockstep.transport.moving.used_on_current_stream", lambda x: read.append(x) or x):
        handle = scatter(data, list(rows) if get_rank() == 0 else None, async_op=True)
        assert handle is not None
        handle.wait()
        assert data.tolist() == rows[get_rank()].tolist()
        assert [x.tolist() for x in read] == (rows.flip(0).tolist() if get_rank() == 0 else [])
        read.clear()
        gather(rows[0], [torch.empty(2), torch.empty(2)] if get_rank() == 0 else None, 0)
        assert [x.tolist() for x in read] == ([rows[0].tolist()] if get_rank() == 1 else [])
        read.clear()
        handle = all_gather([torch.empty(2), torch.empty(2)], rows[0], async_op=True)  # not contiguous
        assert handle is not None
        handle.wait()
        assert [x.tolist() for x in read] == [rows[0].tolist()]


@ranks(2)
def test_a_warning_that_is_an_error_leaves_no_message_behind() -> None:
    data = torch.ones(LARGE, requires_grad=True) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="gather"):
            gather(data)
    parts = gather(torch.full((LARGE,), 7.0))
    assert all(part.eq(7).all() for part in parts)
    assert_group_works()


@ranks(2)
def test_a_handle_is_completed_when_waiting_would_not_block() -> None:
    data, room = torch.ones(2**20), [torch.zeros(2**20) for _ in range(2)]
    if get_rank() == 1:
        handle = all_gather(room, data, async_op=True)
        handle.wait()
        assert handle.is_completed()
    else:
        handle = all_gather(room, data, async_op=True)
        while not handle.is_completed():
            pass
        handle.wait()
    assert all(torch.equal(x, data) for x in room)


@ranks(2)
def test_conjugates_that_torch_has_not_computed_yet_are_gathered_as_what_they_are() -> None:
    for numel in (1, LARGE):
        data = torch.full((numel,), 1 + 2j).conj()
        room = [torch.zeros(numel, dtype=torch.complex64).conj() for _ in range(2)]
        all_gather(room, data)
        for part in (*room, *all_gather(data), *gather(data)):
            assert part[0].item() == 1 - 2j
        scatter(room[0].zero_(), [data, data] if get_rank() == 0 else None)
        assert room[0][0].item() == 1 - 2j
        assert all_gather(torch.full((numel,), 1j).conj().imag)[1][0].item() == -1


def raises_here(culprit: int, error: type[Exception], message: str) -> Any:
    """Expect `error` on rank `culprit`, and on the others the news of it."""
    if get_rank() == culprit:
        return pytest.raises(error, match=message)
    return pytest.raises(
        PeerError, match=rf"rank {culprit} of {get_world_size()} could not take part: {error.__name__}"
    )


@ranks(2, 3)
def test_a_list_that_does_not_fit_on_one_rank_raises_on_all_whatever_their_form() -> None:
    culprit, size = get_world_size() - 1, get_world_size()
    for numel in (2, LARGE):
        data = torch.ones(numel)
        fitting = [torch.zeros(numel) for _ in range(size)]
        wrong = {
            "shape": [torch.zeros(numel + 1), *fitting[1:]],
            "dtype": [torch.zeros(numel).double(), *fitting[1:]],
            "length": [torch.zeros(numel)] * (size + 1),
            "entry": [None] * size,
        }
        messages = {
            "shape": rf"`tensor_list\[0\]` must be like rank 0's tensor, \({numel},\) .*, but is \({numel + 1},",
            "dtype": r"but is .* torch.float64",
            "length": f"`tensor_list` must have {size} entries, one for each rank, but has {size + 1}",
            "entry": r"`tensor_list\[0\]` must be a tensor, but is NoneType",
        }
        for kind, places in wrong.items():
            with raises_here(culprit, TypeError if kind == "entry" else ValueError, messages[kind]):
                if get_rank() == culprit:
                    all_gather(places, data)
                elif get_rank() == 0:
                    all_gather(data)
                else:
                    all_gather(fitting, data)
            assert_group_works()


@ranks(2, 3)
def test_a_list_that_does_not_fit_what_is_gathered_raises_on_all_and_the_group_works_on() -> None:
    dst, size = get_world_size() - 1, get_world_size()
    for numel in (2, LARGE):
        data = torch.ones(numel)
        for wrong in ([torch.zeros(numel + 1)] * size, [torch.zeros(numel)] * (size - 1), [None] * size, 3.0):
            if get_rank() == dst:
                with pytest.raises((TypeError, ValueError), match="`gather_list"):
                    gather(data, wrong, dst)
            else:
                with pytest.raises(PeerError, match=rf"rank {dst} of {size} could not take part: .*`gather_list"):
                    gather(data, None, dst)
            assert_group_works()


@ranks(2, 3)
def test_a_list_on_another_rank_than_dst_raises_on_all() -> None:
    size = get_world_size()
    other, data = size - 1, torch.ones(2)

    places = [torch.zeros(2) for _ in range(size)] if get_rank() in (0, other) else None
    with raises_here(other, ValueError, "`gather_list` must be None except on `dst`, rank 0, but is list"):
        gather(data, places, 0)
    with raises_here(other, ValueError, "`object_gather_list` must be None except on `dst`, rank 0, but is list"):
        gather_object(1, places, 0)
    gather(data, places if get_rank() == 0 else [], 0)  # on another rank, torch takes an empty one
    assert get_rank() != 0 or torch.equal(torch.stack(places), torch.ones(size, 2))
    assert_group_works()


@ranks(2, 3)
def test_a_wrong_list_on_src_raises_on_all() -> None:
    src, size = get_world_size() - 1, get_world_size()
    for numel in (2, LARGE):
        full = [torch.ones(numel)] * size
        for wrong, error in ((None, ValueError), (full[1:], ValueError), ([None] * size, TypeError), (3, TypeError)):
            with raises_here(src, error, "`scatter_list"):
                scatter(torch.zeros(numel), wrong if get_rank() == src else None, src)
            assert_group_works()


@ranks(2, 3)
def test_a_tensor_unlike_what_is_scattered_raises_on_all() -> None:
    size = get_world_size()
    for numel in (2, LARGE):
        parts = [torch.full((numel,), 1.0 + rank) for rank in range(size)]
        mine = torch.zeros(numel + (get_rank() == size - 1))
        with raises_here(
            size - 1, ValueError, rf"`tensor` must be like what rank 0 sends here, \({numel},\) .* but is"
        ):
            scatter(mine, parts if get_rank() == 0 else None, 0)
        assert not mine.any()
        assert_group_works()


def refuse_wrong_calls() -> None:
    rank, size = get_dist_info()
    data = torch.ones(2)
    for not_a_tensor in (3.0, None, [data] * size):
        with pytest.raises(TypeError, match="`data` must be a tensor, or a list to fill with a tensor in second place"):
            all_gather(not_a_tensor)
    with pytest.raises(TypeError, match="`group` must be None, a ProcessGroup or a one-axis DeviceMesh, but is tensor"):
        all_gather(torch.ones(size, 2), data)
    with pytest.raises(TypeError, match=r"`async_op` needs the form all_gather\(tensor_list, tensor\)"):
        all_gather(data, async_op=True)
    if rank == 0:
        with pytest.raises(TypeError, match=r"`async_op` needs the form gather\(tensor, gather_list, dst\)"):
            gather(data, async_op=True)
    for call in (lambda index: gather(data, index), lambda index: gather(data, None, index)):
        for dst in (-1, size):
            with pytest.raises(ValueError, match=rf"`dst` must be .*, but is {dst} \(rank {rank} of {size}"):
                call(dst)
    with pytest.raises(TypeError, match="`dst` must be an int"):
        gather(data, None, "0")
    with pytest.raises(TypeError, match="`data` must be a tensor, but is list"):
        gather([data])
    with pytest.raises(TypeError, match="`data` must be a tensor, but is float"):
        gather(3.0, [torch.empty(2) for _ in range(size)] if rank == 0 else None)
    for src in (-1, size):
        with pytest.raises(ValueError, match=rf"`src` must be .*, but is {src} \(rank {rank} of {size}"):
            scatter(data, [data] * size, src)
    with pytest.raises(TypeError, match="`tensor` must be a tensor, but is list"):
        scatter([data], [data] * size)
    assert_group_works()


@pytest.mark.parametrize("size", SIZES)
def test_wrong_calls_are_refused_on_every_rank_and_the_group_works_on(size: int) -> None:
    run_on(size, refuse_wrong_calls)


def gather_many_dims() -> None:
    data = torch.zeros([1] * 61)
    assert all_gather(data)[-1].shape == data.shape
    assert all(x.shape == data.shape for x in gather(data))


@pytest.mark.parametrize("size", [NO_GROUP, 2])
def test_tensors_may_have_many_dims(size: int) -> None:
    run_on(size, gather_many_dims)
