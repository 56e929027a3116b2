"""Collectives in flight, and tensors of any layout."""

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
    all_to_all,
    barrier,
    broadcast,
    gather,
    get_rank,
    get_world_size,
    init_dist,
    reduce,
    reduce_scatter,
    scatter,
)
from lockstep.dist.consistency import FIRST_CALLS
from lockstep.groups import resolve
from lockstep.testing import ranks
from lockstep.transport.handles import in_backend
from lockstep.watch.watch import side_store

from ..dist.reference import assert_group_works

NUMEL = 70_001


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


@ranks(3, fresh=True)
def test_asynchronous_calls_that_differ_are_found_by_the_next_exchange() -> None:
    init_dist("pytorch")
    for _ in range(FIRST_CALLS):
        all_reduce(torch.ones(3))
        all_reduce(torch.ones(3), "max")
    handle = all_reduce(torch.ones(3), "max" if get_rank() == 1 else "sum", async_op=True)
    with pytest.raises(CollectiveMismatchError, match=r"rank 1: all_reduce\(float32\[3\], max, async\)"):
        barrier()
    assert handle.wait()  # gloo adds and takes the greatest alike
    assert_group_works()


@ranks(2)
def test_a_call_may_have_no_caller_in_python() -> None:
    calls, others = resolve().calls, _thread._count()
    assert calls is not None
    number = calls.number
    _thread.start_new_thread(barrier, ())
    while calls.number == number or _thread._count() > others:
        time.sleep(0.01)
    assert_group_works()


@ranks(2)
def test_a_future_completes_with_the_collective() -> None:
    data = torch.tensor([1, 5])
    handle = all_reduce(data + 2 * get_rank(), "mean", async_op=True)
    outputs = [torch.empty(1), torch.empty(2)]
    gathered = all_gather(outputs, torch.ones(1 + get_rank()), async_op=True)
    for one in (gathered, handle):
        one.get_future().wait()  # gloo completes it before the `Work`
        assert one.wait()
        assert one.is_completed()
    assert [x.tolist() for x in outputs] == [[1.0], [1.0, 1.0]]


@ranks(2)
def test_an_asynchronous_call_waits_for_nobody() -> None:
    """Rank 0 comes back from calls that rank 1 has not made, and tells it so over the store."""
    outputs, store = [torch.empty(1), torch.empty(2)], side_store()
    filled, own = torch.empty(1), torch.ones(1 + get_rank())
    if get_rank() == 1:
        store.wait(["started"])
    handles = [
        all_reduce(torch.ones(200_000), async_op=True),
        broadcast(torch.ones(2), async_op=True),
        reduce(torch.ones(2), async_op=True),
        reduce_scatter(torch.ones(2), [torch.ones(2), torch.ones(2)], async_op=True),
        all_gather(outputs, own, async_op=True),
        gather(own, outputs if get_rank() == 0 else None, 0, async_op=True),
        scatter(filled, [torch.ones(1), torch.ones(1)] if get_rank() == 0 else None, async_op=True),
        all_to_all(outputs[:1] * 2, [torch.ones(1), torch.ones(1)], async_op=True),
        barrier(async_op=True),
    ]
    if get_rank() == 0:
        store.set("started", "")
    for handle in handles:
        assert handle is not None
        assert handle.wait()
    assert filled.item() == 1
    assert_group_works()


@ranks(2, fresh=True)
def test_a_device_without_memory_is_told_by_torchs_own_error() -> None:
    init_dist("pytorch", timeout=60)
    comm = resolve(None)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"), in_backend(comm):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert comm.calls is not None
    assert comm.calls.has_failed
