"""Laws of all_reduce, reduce and reduce_scatter, against a reference in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as torch_dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.dist import all_reduce, get_dist_info, get_rank, get_world_size, reduce, reduce_scatter
from lockstep.testing import ranks
from lockstep.transport.handles import Handle

from .reference import NOT_WHOLE, OPS, assert_group_works, assert_is, reduced
from .strategies import (
    INTS,
    LAYOUTS,
    ODD,
    REDUCIBLE,
    SIZES,
    Drawn,
    Sent,
    drawn,
    gradients_may_end,
    has_meaning,
    lay_out,
    reductions,
    run_on,
)


@dataclass(frozen=True)
class Call:
    """One reduction: what every rank hands in, and how it calls."""

    op: str
    drawn: Drawn
    dst: int = 0
    async_op: bool = False


@st.composite
def calls(draw: Callable[..., Any]) -> tuple[int, list[Call]]:
    """Draw a number of ranks, and several reductions for them."""
    size = draw(st.sampled_from(SIZES))
    return size, [
        Call(
            op,
            draw(drawn(size, dtype, alike=None if op == "mean" else False)),
            draw(st.integers(0, max(size, 1) - 1)),
            draw(st.booleans()),
        )
        for op, dtype in draw(st.lists(reductions(), min_size=1, max_size=6))
    ]


def finish(handle: Handle | None) -> None:
    if handle is not None:
        handle.wait()


def outcome(call: Callable[[Tensor], Handle | None], mine: Drawn) -> Sent | str:
    """Run a reduction on this rank's tensor; return what became of it, after checking what may not change."""
    laid = mine.here()
    data = laid.data
    kept = data.dtype, data.shape, data.stride(), data.data_ptr(), data.requires_grad, data.grad_fn
    before = data.detach().clone()
    try:
        finish(call(data))
    except ValueError as error:
        if "must be a whole number" not in str(error):
            raise
        assert torch.equal(data.detach(), before)
        return NOT_WHOLE
    finally:
        assert laid.has_clean_gaps()
        assert (data.dtype, data.shape, data.stride(), data.data_ptr(), data.requires_grad, data.grad_fn) == kept
    return Sent(data)


def all_reduce_each(todo: list[Call]) -> list[Sent | str]:
    return [
        outcome(lambda data, call=call: all_reduce(data, call.op, None, call.async_op), call.drawn) for call in todo
    ]


@given(calls())
@settings(max_examples=100)
def test_all_reduce_gives_every_rank_the_reduction_of_all(case: tuple[int, list[Call]]) -> None:
    size, todo = case
    expected = [reduced(call.op, call.drawn.tensors) for call in todo]
    for outcomes in run_on(size, all_reduce_each, todo):
        for call, actual, wanted in zip(todo, outcomes, expected, strict=True):
            assert_outcome(actual, wanted, call.op)


def assert_outcome(actual: Sent | str, expected: Tensor | str, op: str) -> None:
    if isinstance(expected, str) or isinstance(actual, str):
        assert actual == expected
    else:
        assert_is(actual.data, expected, op)


def reduce_each(todo: list[Call]) -> list[Sent | str | None]:
    return [
        outcome(lambda data, call=call: reduce(data, call.dst, call.op, None, call.async_op), call.drawn)
        if get_rank() == call.dst
        else finish(reduce(call.drawn.here().data, call.dst, call.op, None, call.async_op))
        for call in todo
    ]


@given(calls())
@settings(max_examples=60)
def test_reduce_gives_dst_the_reduction_of_all(case: tuple[int, list[Call]]) -> None:
    size, todo = case
    outcomes = run_on(size, reduce_each, todo)
    for index, call in enumerate(todo):
        assert_outcome(outcomes[call.dst][index], reduced(call.op, call.drawn.tensors), call.op)


@dataclass(frozen=True)
class ScatterCall:
    """A reduce_scatter: `lists[i]` is what every rank hands in for rank i, `layout` how the output lies in memory."""

    op: str
    lists: list[Drawn]
    layout: str
    async_op: bool


@st.composite
def scatter_calls(draw: Callable[..., Any]) -> tuple[int, list[ScatterCall]]:
    """Draw a number of ranks, and several reduce_scatters with entries of equal and different shapes."""
    size = draw(st.sampled_from(SIZES))
    todo = []
    for op, dtype in draw(st.lists(reductions(), min_size=1, max_size=3)):
        lists = [draw(drawn(size, dtype)) for _ in range(max(size, 1))]
        if draw(st.booleans()):
            lists = [lists[0]] * len(lists)
        todo.append(ScatterCall(op, lists, draw(st.sampled_from(LAYOUTS)), draw(st.booleans())))
    return size, todo


def reduce_scatter_one(call: ScatterCall) -> Sent | str:
    entries = [entry.here().data for entry in call.lists]
    before = [entry.detach().clone() for entry in entries]
    output = lay_out(torch.zeros_like(before[get_rank()]), call.layout, entries[get_rank()].requires_grad)
    try:
        with gradients_may_end():
            finish(reduce_scatter(output.data, entries, call.op, None, call.async_op))
    except ValueError as error:
        if "must be a whole number" not in str(error):
            raise
        return NOT_WHOLE
    finally:
        assert output.has_clean_gaps()
        assert output.data.grad_fn is None
        assert all(torch.equal(entry, kept) for entry, kept in zip(entries, before, strict=True))
    return Sent(output.data)


def reduce_scatter_each(todo: list[ScatterCall]) -> list[Sent | str]:
    return [reduce_scatter_one(call) for call in todo]


@given(scatter_calls())
@settings(max_examples=60)
def test_reduce_scatter_gives_rank_i_the_reduction_of_the_ith_entries(case: tuple[int, list[ScatterCall]]) -> None:
    size, todo = case
    for rank, outcomes in enumerate(run_on(size, reduce_scatter_each, todo)):
        for call, actual in zip(todo, outcomes, strict=True):
            assert_outcome(actual, reduced(call.op, call.lists[rank].tensors), call.op)


@pytest.mark.parametrize("size", SIZES)
def test_every_op_works_on_every_dtype_that_it_has_a_meaning_for(size: int) -> None:
    todo = []
    for op in OPS:
        for dtype in REDUCIBLE:
            if has_meaning(op, dtype):
                # 6 and 2 a rank: the mean is whole on up to 4 ranks where it is 6 everywhere.
                parts = [torch.tensor([[6], [1]]).mul(1 if op == "mean" else rank + 1) for rank in range(max(size, 1))]
                todo.append(Call(op, Drawn([Sent(part.to(dtype)) for part in parts])))
    for outcomes in run_on(size, all_reduce_each, todo):
        for call, actual in zip(todo, outcomes, strict=True):
            assert_outcome(actual, reduced(call.op, call.drawn.tensors), call.op)


def refuse_what_has_no_meaning() -> None:
    for op in OPS:
        for dtype in (*REDUCIBLE, *ODD):
            if dtype in ODD or not has_meaning(op, dtype):
                data = torch.zeros(2, dtype=torch.uint8).view(-1, 1).expand(2, dtype.itemsize).contiguous().view(dtype)
                with pytest.raises(TypeError, match=f"{dtype}"):
                    all_reduce(data, op)
                with pytest.raises(TypeError, match=f"{dtype}"):
                    reduce(data, 0, op)
                with pytest.raises(TypeError, match=f"{dtype}"):
                    reduce_scatter(data, [data] * get_world_size(), op)
    assert_group_works()


@pytest.mark.parametrize("size", SIZES)
def test_ops_without_meaning_for_a_dtype_are_type_errors_on_one_process_as_on_many(size: int) -> None:
    run_on(size, refuse_what_has_no_meaning)


def refuse_wrong_calls() -> None:
    rank, size = get_dist_info()
    data = torch.ones(2)
    for op in ("median", "", "SUM ", None, 0, True, data, ReduceOp.PREMUL_SUM):
        with pytest.raises(ValueError, match="`op` must be one of sum, mean, product, min, max, band, bor, bxor"):
            all_reduce(data, op)
    for not_a_tensor in (3.0, [1.0], None):
        with pytest.raises(TypeError, match="`data` must be a tensor, but is"):
            all_reduce(not_a_tensor)
    with pytest.raises(TypeError, match="`data` must be dense"):
        all_reduce(data.to_sparse())
    for dst in (-1, size):
        with pytest.raises(
            ValueError, match=rf"`dst` must be .* 0 to {size - 1}, but is {dst} \(rank {rank} of {size}"
        ):
            reduce(data, dst)
    for dst in ("0", 0.0, True, None):
        with pytest.raises(TypeError, match="`dst` must be an int"):
            reduce(data, dst)
    with pytest.raises(
        ValueError, match=f"`input_list` must have {size} entries, one for each rank, but has {size + 1}"
    ):
        reduce_scatter(data, [data] * (size + 1))
    with pytest.raises(TypeError, match="`output` must be a tensor, but is NoneType"):
        reduce_scatter(None, [data] * size)
    with pytest.raises(TypeError, match="`input_list` must be a list of tensors"):
        reduce_scatter(data, None)
    with pytest.raises(TypeError, match=r"`input_list\[0\]` must be a tensor"):
        reduce_scatter(data, [None] * size)
    with pytest.raises(
        ValueError, match=r"`output` must be like `input_list\[rank\]`, \(2,\) torch.float32, but is \(3,"
    ):
        reduce_scatter(torch.ones(3), [data] * size)
    with pytest.raises(ValueError, match="`output` must be like"):
        reduce_scatter(data.double(), [data] * size)
    assert data.tolist() == [1.0, 1.0]
    assert_group_works()


@pytest.mark.parametrize("size", SIZES)
def test_wrong_calls_are_refused_on_every_rank_and_the_group_works_on(size: int) -> None:
    run_on(size, refuse_wrong_calls)


@ranks(2)
def test_a_list_of_two_dtypes_is_refused() -> None:
    entries = [torch.ones(1), torch.ones(1, dtype=torch.int64)]
    with pytest.raises(ValueError, match=r"`input_list` must have one dtype, but has torch.float32, torch.int64"):
        reduce_scatter(entries[get_rank()].clone(), entries)
    assert_group_works()


@ranks(1, 3)
def test_ops_may_be_those_of_torch_or_other_names() -> None:
    for name, op in (
        ("sum", ReduceOp.SUM),
        ("mean", ReduceOp.AVG),
        ("product", ReduceOp.PRODUCT),
        ("max", ReduceOp.MAX),
    ):
        for other in (op, ReduceOp(op), name.upper()):
            data, expected = torch.full((2,), 1.0 + get_rank()), torch.full((2,), 1.0 + get_rank())
            all_reduce(data, other)
            all_reduce(expected, name)
            assert torch.equal(data, expected)
    for alias, name in (("avg", "mean"), ("prod", "product")):
        data, expected = torch.tensor(2.0 + get_rank()), torch.tensor(2.0 + get_rank())
        all_reduce(data, alias)
        all_reduce(expected, name)
        assert torch.equal(data, expected)


def mean_of_extremes() -> None:
    size = get_world_size()
    for dtype in INTS:
        limits = torch.iinfo(dtype)
        data = torch.tensor([limits.min, limits.max, limits.max - 1], dtype=dtype)
        all_reduce(data, "mean")
        assert data.tolist() == [limits.min, limits.max, limits.max - 1]
        # Half of the ranks one below, half one above.
        data = torch.tensor([limits.max - 2 * (get_rank() % 2)], dtype=dtype)
        if size % 2 == 0:
            all_reduce(data, "mean")
            assert data.tolist() == [limits.max - 1]


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_the_largest_integers_does_not_overflow(size: int) -> None:
    run_on(size, mean_of_extremes)


@ranks(4)
def test_the_mean_of_large_half_numbers_does_not_overflow() -> None:
    data = torch.full((3,), 60000.0, dtype=torch.float16)
    all_reduce(data, "mean")
    assert torch.equal(data, torch.full((3,), 60000.0, dtype=torch.float16))


@ranks(1, 2, 3)
def test_min_and_max_are_nan_where_any_rank_has_nan() -> None:
    size = get_world_size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        limits = torch.finfo(dtype)
        numbers = torch.tensor([-math.inf, limits.min, -1.5, -limits.tiny, 0, limits.tiny, 2, limits.max, math.inf])
        values = torch.cat([numbers.to(dtype), torch.full((size,), float(get_rank()), dtype=dtype)])
        values[len(numbers) + get_rank()] = math.copysign(math.nan, get_rank() - 1)  # each rank in another place
        for op in ("min", "max"):
            data, output = values.clone(), torch.empty_like(values)
            all_reduce(data, op)
            reduce_scatter(output, [values] * size, op)
            for result in (data, output):
                assert torch.equal(result[: len(numbers)], numbers.to(dtype)), (dtype, op)
                assert result[len(numbers) :].isnan().all(), (dtype, op)


@ranks(2, 3)
def test_several_reductions_may_be_in_flight_and_be_awaited_in_any_order_and_twice() -> None:
    factor, size = 1 + get_rank(), get_world_size()
    dtypes = (torch.int64, torch.uint16, torch.half)
    data = [torch.full((n,), factor, dtype=dtype) for n in (1, 1000, 50_000, 3_000_000) for dtype in dtypes]
    handles = [all_reduce(x, async_op=True) for x in data]
    for n in (2, 50_000):
        handles.append(reduce_scatter(torch.empty(n), [torch.ones(n)] * size, async_op=True))
        handles.append(reduce(torch.ones(n), 1, async_op=True))
    for handle in reversed(handles):
        assert handle.wait() is True
        assert handle.is_completed()
    for handle in handles:
        assert handle.wait() is True
    assert all(torch.equal(x, torch.full_like(x, sum(range(1, size + 1)))) for x in data)


# In messages of every size, and by the backend.
NUMELS = pytest.mark.parametrize("numel", [1, 1000, 10_000, 100_000, 1_500_000])


@NUMELS
@ranks(2)
def test_on_two_ranks_floats_are_those_of_torch_to_the_last_bit(numel: int) -> None:
    generator = torch.Generator().manual_seed(get_rank())
    for dtype in (torch.float32, torch.float64, torch.half, torch.bfloat16):
        data = torch.randn(numel, generator=generator).to(dtype)
        for op, of_torch in (("sum", ReduceOp.SUM), ("product", ReduceOp.PRODUCT), ("min", ReduceOp.MIN)):
            ours, theirs = data.clone(), data.clone()
            all_reduce(ours, op)
            torch_dist.all_reduce(theirs, of_torch)
            assert torch.equal(ours, theirs), (dtype, op)
    ours, theirs = data.float(), data.float()
    all_reduce(ours, "mean")
    torch_dist.all_reduce(theirs, ReduceOp.AVG)
    assert torch.equal(ours, theirs)


@NUMELS
@ranks(1, 2, 4)
def test_tensors_of_all_sizes_are_reduced(numel: int) -> None:
    size, rank = get_world_size(), get_rank()
    total = sum(range(1, size + 1))
    data = torch.arange(numel, dtype=torch.int32) * (rank + 1)
    entries = [torch.arange(numel, dtype=torch.int32) * (rank + 1) + other for other in range(size)]
    kept = [x.clone() for x in entries]
    for async_op in (False, True):
        for dst in range(size):
            reduced = data.clone()
            finish(reduce(reduced, dst, async_op=async_op))
            assert rank != dst or torch.equal(reduced, torch.arange(numel, dtype=torch.int32) * total)
        output = torch.empty(numel, dtype=torch.int32)
        finish(reduce_scatter(output, entries, async_op=async_op))
        assert torch.equal(output, torch.arange(numel, dtype=torch.int32) * total + rank * size)
        finish(reduce_scatter(output, entries, "max", async_op=async_op))
        assert torch.equal(output, torch.arange(numel, dtype=torch.int32) * size + rank)
    assert all(map(torch.equal, entries, kept))
    assert_group_works()


@ranks(2)
def test_what_is_sent_is_said_to_be_used_on_the_stream_that_waits() -> None:
    """A backend of a device may read it after the wait, and who waits may do so on another stream."""
    read: list[Tensor] = []
    with patch("lockstep.dist.reduce.used_on_current_stream", lambda x: read.append(x) or x):
        halves = torch.ones(3, dtype=torch.float16)  # sent in float32
        handle = reduce(halves, 1, "mean", async_op=True)
        assert handle is not None
        handle.wait()
        assert [(x.dtype, x.numel()) for x in read] == [(torch.float32, 3)]
    read.clear()
    with patch("lockstep.transport.moving.used_on_current_stream", lambda x: read.append(x) or x):
        handle = reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(2)], async_op=True)
        assert handle is not None
        handle.wait()
    assert [x.numel() for x in read] == [4, 4]


@ranks(2, 3)
def test_handles_may_be_dropped() -> None:
    for numel in (1, 50_000):
        for _ in range(20):
            all_reduce(torch.ones(numel), async_op=True)
    assert_group_works()


@ranks(2)
def test_a_handle_whose_mean_is_not_whole_raises_each_time_it_is_awaited() -> None:
    data = torch.tensor([get_rank(), 4])
    handle = all_reduce(data, "mean", async_op=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the mean of torch.int64 data must be a whole number"):
            handle.wait()
    assert data.tolist() == [get_rank(), 4]
    assert_group_works()


@ranks(2)
def test_conjugates_and_negatives_that_torch_has_not_computed_yet_count_as_what_they_are() -> None:
    data = torch.tensor([1 + 2j * (get_rank() + 1)]).conj()
    assert data.is_conj()
    all_reduce(data)
    assert data.tolist() == [2 - 6j]
    data = torch.tensor([1j + 1j * get_rank()]).conj().imag
    assert data.is_neg()
    all_reduce(data)
    assert data.tolist() == [-3.0]
