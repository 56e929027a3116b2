"""Laws of broadcast, all_to_all and barrier."""

from __future__ import annotations

import time
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
    CollectiveMismatchError,
    all_to_all,
    barrier,
    broadcast,
    check_collectives,
    get_dist_info,
    get_rank,
)
from lockstep.testing import ranks
from lockstep.transport.handles import Handle

from .reference import assert_group_works
from .strategies import (
    LAYOUTS,
    SIZES,
    Drawn,
    Sent,
    any_tensors,
    bytes_of,
    gradients_may_end,
    lay_out,
    raw_tensor,
    run_on,
    same_bytes,
    zeros,
)


def finish(handle: Handle | None) -> None:
    if handle is not None:
        handle.wait()


@dataclass(frozen=True)
class Broadcast:
    drawn: Drawn
    src: int
    async_op: bool


@st.composite
def broadcasts(draw: Callable[..., Any]) -> tuple[int, list[Broadcast]]:
    """Draw a number of ranks, and several broadcasts of tensors of any dtype, shape and layout."""
    size = draw(st.sampled_from(SIZES))
    todo = []
    for model in [sent.data for sent in draw(st.lists(any_tensors(), min_size=1, max_size=5))]:
        src = draw(st.integers(0, max(size, 1) - 1))
        parts = [Sent(model if x == src else zeros(tuple(model.shape), model.dtype)) for x in range(max(size, 1))]
        drawn = Drawn(parts, draw(st.sampled_from(LAYOUTS)), model.dtype.is_floating_point and draw(st.booleans()))
        todo.append(Broadcast(drawn, src, draw(st.booleans())))
    return size, todo


def broadcast_each(todo: list[Broadcast]) -> list[Sent]:
    laid = [call.drawn.here() for call in todo]
    handles = [broadcast(x.data, call.src, None, call.async_op) for call, x in zip(todo, laid, strict=True)]
    for call, handle, x in zip(todo, handles, laid, strict=True):
        finish(handle)
        assert x.has_clean_gaps()
        assert x.data.requires_grad == call.drawn.requires_grad
        assert x.data.grad_fn is None
    return [Sent(x.data) for x in laid]


@given(broadcasts())
@settings(max_examples=60)
def test_broadcast_gives_every_rank_the_bytes_of_src(case: tuple[int, list[Broadcast]]) -> None:
    size, todo = case
    for received in run_on(size, broadcast_each, todo):
        for call, mine in zip(todo, received, strict=True):
            assert same_bytes(mine.data, call.drawn.parts[call.src].data)


@dataclass(frozen=True)
class Exchange:
    """An all_to_all: `table[a][b]` is what rank a sends to rank b."""

    table: list[list[Sent]]
    layout: str
    requires_grad: bool
    async_op: bool


@st.composite
def exchanges(draw: Callable[..., Any]) -> tuple[int, Exchange]:
    """Draw a number of ranks, and tensors of one dtype and of any sizes between them."""
    size = draw(st.sampled_from(SIZES))
    dtype = draw(any_tensors()).data.dtype
    shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (40, 25)])
    everyone = range(max(size, 1))
    table = [[Sent(raw_tensor(dtype, draw(shapes), 10 * a + b)) for b in everyone] for a in everyone]
    return size, Exchange(table, draw(st.sampled_from(LAYOUTS)), dtype.is_floating_point, draw(st.booleans()))


def exchange(call: Exchange) -> list[Sent]:
    rank = get_rank()
    inputs = [lay_out(sent.data, call.layout, call.requires_grad).data for sent in call.table[rank]]
    kept = [bytes_of(x) for x in inputs]
    outputs = [
        lay_out(zeros(tuple(row[rank].data.shape), row[rank].data.dtype), call.layout, call.requires_grad)
        for row in call.table
    ]
    with gradients_may_end():
        finish(all_to_all([x.data for x in outputs], inputs, None, call.async_op))
    assert all(x.has_clean_gaps() and x.data.grad_fn is None for x in outputs)
    assert all(torch.equal(bytes_of(x), before) for x, before in zip(inputs, kept, strict=True))
    return [Sent(x.data) for x in outputs]


@given(exchanges())
@settings(max_examples=40)
def test_all_to_all_gives_rank_b_what_rank_a_sends_it(case: tuple[int, Exchange]) -> None:
    size, call = case
    for rank, received in enumerate(run_on(size, exchange, call)):
        for row, mine in zip(call.table, received, strict=True):
            assert same_bytes(mine.data, row[rank].data)


@ranks(3)
def test_all_to_all_asks_for_equal_numbers_of_elements_alone() -> None:
    outputs = [torch.zeros(2, 3) for _ in range(3)]
    all_to_all(outputs, [torch.full((6,), 10.0 * get_rank() + i) for i in range(3)])
    assert [x.unique().tolist() for x in outputs] == [[0.0 + get_rank()], [10.0 + get_rank()], [20.0 + get_rank()]]


@ranks(3)
def test_all_to_all_of_numbers_of_elements_that_do_not_fit_is_an_error_on_every_rank() -> None:
    check_collectives("always")
    lengths = [1, 1, 4 if get_rank() == 1 else 1]
    with pytest.raises(CollectiveMismatchError, match=r"but rank 1 sends 4 to rank 2, which expects 1$") as caught:
        all_to_all([torch.zeros(1)] * 3, [torch.zeros(length) for length in lengths])
    check_collectives("off")
    assert caught.value.failed_ranks == (1, 2)
    assert_group_works()


@ranks(3)
def test_all_to_all_may_fill_what_it_sends() -> None:
    for numel in (1, 100_000):
        row = [torch.full((numel,), 10.0 * get_rank() + i) for i in range(3)]
        all_to_all(row, row)
        assert [x.unique().tolist() for x in row] == [[10.0 * other + get_rank()] for other in range(3)]
        flat = torch.arange(3.0).repeat_interleave(numel) + 10 * get_rank()
        all_to_all(flat.chunk(3)[::-1], flat.chunk(3), async_op=True).wait()
        assert [x.unique().tolist() for x in flat.chunk(3)[::-1]] == [[10.0 * other + get_rank()] for other in range(3)]


@ranks(2)
def test_memory_that_is_copied_from_is_said_to_be_read_on_the_present_stream() -> None:
    """Who waits may do so on another stream than that on which the memory was allocated, which could reuse it."""
    read: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        read.append(tensor)
        return tensor

    with patch("lockstep.dist.broadcast.used_on_current_stream", note):
        data = torch.arange(6.0).view(2, 3).t()  # not contiguous
        broadcast(data, src=0)
        assert [x.shape for x in read] == [data.shape]
    read.clear()
    with patch("lockstep.transport.moving.used_on_current_stream", note):
        outputs = [torch.zeros(2, dtype=torch.bool) for _ in range(2)]  # sent as bytes
        all_to_all(outputs, [torch.ones(2, dtype=torch.bool)] * 2)
        assert [x.numel() for x in read] == [4, 4]  # what is sent, and what arrives
    assert torch.stack(outputs).all()


@ranks(2)
def test_conjugates_that_torch_has_not_computed_yet_move_as_what_they_are() -> None:
    data = torch.tensor([1 + 1j, 2 - 3j]).conj() if get_rank() == 1 else torch.zeros(2, dtype=torch.complex64).conj()
    assert data.is_conj()
    broadcast(data, 1)
    assert data.tolist() == [1 - 1j, 2 + 3j]
    outputs = [torch.zeros(2, dtype=torch.complex64).conj() for _ in range(2)]
    all_to_all(outputs, [data, data])
    assert [x.tolist() for x in outputs] == [[1 - 1j, 2 + 3j]] * 2


def wait_for_the_last(seconds: float) -> tuple[float, float]:
    time.sleep(seconds * get_rank())
    came = time.monotonic()
    barrier()
    return came, time.monotonic()


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_the_last_has_come(size: int) -> None:
    times = run_on(size, wait_for_the_last, 0.02)
    assert max(came for came, _ in times) <= min(left for _, left in times)


def barrier_in_flight() -> None:
    handles = [barrier(async_op=True) for _ in range(3)]
    assert all(handle.wait() and handle.wait() and handle.is_completed() for handle in handles)


@pytest.mark.parametrize("size", SIZES)
def test_barriers_may_be_in_flight(size: int) -> None:
    run_on(size, barrier_in_flight)


def refuse_wrong_calls() -> None:
    rank, size = get_dist_info()
    data = torch.zeros(2)
    for src in (-1, size):
        with pytest.raises(
            ValueError, match=rf"`src` must be .* 0 to {size - 1}, but is {src} \(rank {rank} of {size}"
        ):
            broadcast(data, src)
    for src in ("0", 0.0, False, None):
        with pytest.raises(TypeError, match="`src` must be an int"):
            broadcast(data, src)
    with pytest.raises(TypeError, match="`data` must be a tensor, but is list"):
        broadcast([data])
    full = [torch.zeros(2) for _ in range(size)]
    for outputs, inputs, name in ((full[1:], full, "output_tensor_list"), (full, [*full, data], "input_tensor_list")):
        with pytest.raises(ValueError, match=f"`{name}` must have {size} entries, one for each rank"):
            all_to_all(outputs, inputs)
    with pytest.raises(TypeError, match="`input_tensor_list` must be a list of tensors"):
        all_to_all(full, data)
    with pytest.raises(TypeError, match=r"`output_tensor_list\[0\]` must be a tensor"):
        all_to_all([None] * size, full)
    with pytest.raises(ValueError, match=r"must have one dtype, but has \['torch.float32', 'torch.float64'\]"):
        all_to_all(full, [x.double() for x in full])
    with pytest.raises(ValueError, match="must have the 3 elements this rank sends itself, but has 2"):
        all_to_all(full, [torch.zeros(3)] * size)
    assert_group_works()


@pytest.mark.parametrize("size", SIZES)
def test_wrong_calls_are_refused_on_every_rank_and_the_group_works_on(size: int) -> None:
    run_on(size, refuse_wrong_calls)
