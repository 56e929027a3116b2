"""Reductions that go straight from rank to rank: every rank combines a part, and sends it to the others."""

from __future__ import annotations

import _thread
import time
from datetime import timedelta

import pytest
import torch

from lockstep.dist import (
    CollectiveMismatchError,
    all_gather,
    all_reduce,
    all_reduce_params,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    init_dist,
    reduce,
    reduce_scatter,
)
from lockstep.dist.consistency import FIRST_CALLS
from lockstep.errors import DistError
from lockstep.groups import resolve
from lockstep.testing import ranks
from lockstep.transport.pairs import PairwiseCpu, transport_of
from lockstep.watch.watch import side_store

from .reference import OPS, assert_group_works

NUMEL = 70_001  # no multiple of a number of ranks, and too large for a small message in any dtype
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool)
_FOLD = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def random(dtype: torch.dtype, numel: int = NUMEL, seed: int = 0) -> torch.Tensor:
    """Return numbers that differ from rank to rank."""
    generator = torch.Generator().manual_seed(100 * seed + get_rank())
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (numel,), generator=generator).to(dtype)


def in_order(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return what the ranks' tensors give one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = _FOLD[op](total, part)
    return total / len(parts) if op == "mean" else total


@pytest.mark.parametrize("op", OPS)
@ranks(3, 4)
def test_tensors_are_combined_in_the_order_of_the_ranks(op: str) -> None:
    dtypes = [torch.int64, torch.uint8] if op in ("band", "bor", "bxor") else [torch.float32, torch.float64]
    for dtype in dtypes:
        mine = random(dtype)
        expected = in_order(op, all_gather(mine))
        data = mine.clone()
        all_reduce(data, op)
        assert torch.equal(data, expected), dtype
        for dst in range(get_world_size()):
            data = mine.clone()
            reduce(data, dst, op)
            assert torch.equal(data, expected if get_rank() == dst else mine), (dtype, dst)
        inputs = [random(dtype, seed=number) for number in range(get_world_size())]
        output = torch.empty_like(mine)
        reduce_scatter(output, inputs, op)
        assert torch.equal(output, in_order(op, all_gather_of(inputs)[get_rank()])), dtype


def all_gather_of(inputs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return, for each place of the list, every rank's tensor."""
    return [all_gather(one) for one in inputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(3)
def test_any_dtype_gives_what_small_tensors_give(dtype: torch.dtype) -> None:
    for op in ("sum", "min", "max"):
        whole = random(dtype)
        pieces = [piece.clone() for piece in whole.split(1000)]
        all_reduce(whole, op)
        for piece in pieces:
            all_reduce(piece, op)  # in small messages, which other tests compare with Python's numbers
        assert torch.equal(whole, torch.cat(pieces)), op


@ranks(3)
def test_memory_of_any_layout() -> None:
    for data in (
        torch.ones(700, 100).T,
        torch.ones(70_001, 2)[:, 0],
        torch.ones(1, 70_000, 1),
        torch.ones(2, 70_000).cfloat().conj(),
    ):
        all_reduce(data)
        assert bool((data == 3).all())
    with torch.inference_mode():
        data = torch.ones(70_001)
    all_reduce(data)
    assert bool((data == 3).all())
    weight = torch.nn.Parameter(torch.ones(70_001))
    all_reduce(weight)
    assert bool((weight == 3).all())


@ranks(3, 4)
def test_handles_may_be_waited_for_late_and_in_any_order() -> None:
    rank, size = get_rank(), get_world_size()
    data = [torch.full((NUMEL,), float(number)) for number in range(6)]
    handles = [all_reduce(one, async_op=True) for one in data[:3]]
    handles += [reduce(one, number % size, async_op=True) for number, one in enumerate(data[3:])]
    store = side_store()
    if rank == 1:
        store.wait([f"waited/{other}" for other in range(size) if other != 1])  # the others must not need this rank
    else:
        handles[rank].wait()
        store.set(f"waited/{rank}", "")
    for handle in handles if rank % 2 else reversed(handles):
        assert handle.wait()
        assert handle.wait()
        assert handle.is_completed()
    assert [one[0].item() for one in data[:3]] == [0, size, 2 * size]
    for number, one in enumerate(data[3:]):
        assert rank != number % size or one.unique().tolist() == [(3 + number) * size]
    assert_group_works()


@ranks(3)
def test_a_dropped_handle_completes_for_the_others() -> None:
    for _ in range(5):
        data = torch.ones(NUMEL)
        handle = all_reduce(data, async_op=True)
        if get_rank() == 0:
            del handle
        else:
            handle.wait()
            assert bool((data == 3).all())
    barrier()
    assert_group_works()


@ranks(2, 3)
def test_handles_in_inference_mode() -> None:
    rank, size = get_rank(), get_world_size()
    with torch.inference_mode():
        data, output = torch.ones(NUMEL), torch.zeros(NUMEL)
        handles = [
            all_reduce(data, async_op=True),
            reduce_scatter(output, [torch.full((NUMEL,), 1.0 + rank)] * size, async_op=True),
        ]
        for handle in handles:
            assert handle is not None
            while not handle.is_completed():  # which starts a thread
                time.sleep(0.01)
            handle.wait(timedelta(seconds=30))
        assert bool((data == size).all())
        assert bool((output == sum(range(1, size + 1))).all())


@ranks(3)
def test_many_in_flight_at_once() -> None:
    data = [torch.full((20_000 + number,), float(number)) for number in range(200)]
    handles = [all_reduce(one, async_op=True) for one in data]
    for handle in handles:
        handle.wait()
    assert [one.unique().tolist() for one in data] == [[3.0 * number] for number in range(200)]
    all_reduce_params(data)
    assert [one.unique().tolist() for one in data] == [[9.0 * number] for number in range(200)]


@pytest.mark.parametrize("async_op", [False, True])
@ranks(3, fresh=True)
def test_a_swap_of_known_calls_is_found(async_op: bool) -> None:
    def call(numel: int) -> None:
        handle = all_reduce(torch.ones(numel), async_op=async_op)
        if handle is not None:
            handle.wait()

    init_dist("pytorch")
    for _ in range(FIRST_CALLS):
        call(70_000)
        call(80_000)
        broadcast(torch.ones(3))
    with pytest.raises(CollectiveMismatchError, match=r"rank 1: all_reduce\(float32\[70000\], sum\)"):
        call(70_000 if get_rank() == 1 else 80_000)


@ranks(3, fresh=True)
def test_a_mismatch_is_found_while_handles_are_in_flight() -> None:
    init_dist("pytorch")
    for _ in range(FIRST_CALLS):
        for numel in (1, 2, NUMEL):
            all_reduce(torch.ones(numel))
    handles = [all_reduce(torch.ones(numel), async_op=True) for numel in (1, NUMEL, 1)]
    with pytest.raises(CollectiveMismatchError, match=r"rank 1: all_reduce\(float32\[1\], sum\)"):
        all_reduce(torch.ones(1 if get_rank() == 1 else 2))
    assert len(handles) == 3


@ranks(2)
def test_a_call_may_have_no_caller_in_python() -> None:
    calls, others = resolve().calls, _thread._count()
    assert calls is not None
    number = calls.number
    _thread.start_new_thread(barrier, ())
    while calls.number == number or _thread._count() > others:
        time.sleep(0.01)
    assert_group_works()


@ranks(3, fresh=True)
def test_a_reduction_that_was_interrupted_is_not_taken_for_complete() -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    init_dist("pytorch")
    comm, data = resolve(), torch.ones(NUMEL)
    transport = transport_of(comm)
    assert isinstance(transport, PairwiseCpu)
    handle = transport.reduce(data, None, "sum", async_op=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lockstep.transport.direct._ReductionInParts._send_on", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    for _ in range(2):
        assert not handle.is_completed()
        with pytest.raises(DistError, match="has failed or was interrupted before its end"):
            handle.wait()
    assert bool((data == 1).all())
