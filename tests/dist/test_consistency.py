"""`check_collectives`: ranks that call different things learn it, all of them, before anything is sent."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from lockstep.dist import (
    all_gather,
    all_gather_object,
    all_gather_tree,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_object_list,
    broadcast_tree,
    check_collectives,
    collect_results,
    gather,
    gather_object,
    get_rank,
    get_world_size,
    init_dist,
    is_distributed,
    reduce,
    reduce_scatter,
    scatter,
    scatter_object_list,
    sync_random_seed,
)
from lockstep.errors import CollectiveMismatchError
from lockstep.groups import resolve
from lockstep.testing import ranks

from .reference import assert_group_works
from .strategies import NO_GROUP, run_on


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# Calls, by what an error must say of them.
CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce(float32[], sum)": lambda: all_reduce(ones()),
    "all_reduce(float32[2], sum)": lambda: all_reduce(ones(2)),
    "all_reduce(float32[2], max)": lambda: all_reduce(ones(2), "max"),
    "all_reduce(float32[2, 3], sum)": lambda: all_reduce(ones(2, 3)),
    "all_reduce(int64[2], sum)": lambda: all_reduce(ones(2, dtype=torch.int64)),
    "reduce(float32[2], mean, 1)": lambda: reduce(ones(2), 1, "mean"),
    "reduce(float32[2], mean, 0)": lambda: reduce(ones(2), 0, "avg"),
    "broadcast(float32[2], 0)": lambda: broadcast(ones(2)),
    "broadcast(float32[2], 1)": lambda: broadcast(ones(2), 1),
    "all_gather()": lambda: all_gather(ones(2)),
    "all_gather_object()": lambda: all_gather_object(1),
    "gather(0)": lambda: gather(ones(2)),
    "gather(1)": lambda: gather(ones(2), 1),
    "gather_object(1)": lambda: gather_object(1, 1),
    "scatter(1)": lambda: scatter(ones(2), [ones(2)] * get_world_size(), 1),
    "barrier()": lambda: barrier(),
    "collect_results(2)": lambda: collect_results([1], 2),
    "collect_results(1)": lambda: collect_results([1], 1),
}


OTHERS = {2: "rank 1", 3: "ranks 1, 2"}


@ranks(2, 3)
def test_every_rank_learns_what_each_called() -> None:
    check_collectives("always")
    try:
        for first, others in pairwise(CALLS):
            called = [others if rank else first for rank in range(get_world_size())]
            with pytest.raises(CollectiveMismatchError) as raised:
                CALLS[called[get_rank()]]()
            table = "\n".join(
                rf"  {who}: {re.escape(call)} at \S*test_consistency\.py:\d+"
                for who, call in (("rank 0", first), (OTHERS[get_world_size()], others))
            )
            assert re.search(
                rf"their call \d+ differs:\n{table}\nIf one of these lines is under a condition", str(raised.value)
            )
            assert_group_works()
    finally:
        check_collectives("off")


@ranks(2)
def test_nothing_is_changed_by_a_mismatch() -> None:
    check_collectives("always")
    try:
        data = torch.full((2 + get_rank(),), 5.0)
        with pytest.raises(CollectiveMismatchError):
            all_reduce(data)
        assert data.unique().tolist() == [5.0]
    finally:
        check_collectives("off")


LISTED = r"ranks of the group of ranks 1, 2 .*\n  rank 0: barrier\(\) at .*\n  rank 1: all_gather\(\) at "


@ranks(3)
def test_in_a_subgroup_calls_are_listed_by_its_ranks() -> None:
    group = torch_dist.new_group([1, 2])
    check_collectives("always")
    try:
        if get_rank() > 0:
            with pytest.raises(CollectiveMismatchError, match=LISTED):
                barrier(group) if get_rank() == 1 else all_gather(ones(1), group)
            assert_group_works(group)
    finally:
        check_collectives("off")
    assert_group_works()


def call_everything() -> None:
    size, rank = get_world_size(), get_rank()
    check_collectives("always")
    try:
        all_reduce(ones(2))
        reduce(ones(2), size - 1)
        reduce_scatter(ones(1 + rank), [ones(1 + other) for other in range(size)])
        broadcast(ones(2), size - 1)
        all_to_all([ones(1 + rank)] * size, [ones(1 + other) for other in range(size)])
        barrier()
        # Shapes and dtypes are free in these.
        assert len(all_gather(ones(rank))) == size
        gather(ones(rank, dtype=torch.int64 if rank else torch.half), size - 1)
        scatter(ones(1 + rank), [ones(1 + other) for other in range(size)])
        assert all_gather_object(rank) == list(range(size))
        gather_object({"rank": rank}, size - 1)
        assert broadcast_object(rank) == 0
        broadcast_object_list([rank])
        scatter_object_list([None], list(range(size)))
        assert all_reduce_dict({"a": 1, "b": 2.0})["a"] == size
        all_reduce_params([ones(1), ones(2, 2)])
        assert len(all_gather_tree([rank])) == size
        broadcast_tree((rank,), size - 1)
        assert sync_random_seed(7 + rank) == 7
        collect_results([rank], size)
    finally:
        check_collectives("off")


@pytest.mark.parametrize("size", [NO_GROUP, 1, 2, 3])
def test_calls_that_belong_together_pass_the_check(size: int) -> None:
    run_on(size, call_everything)


def calls_until_a_mismatch(
    mode: str,
    known: Sequence[Callable[[], None]],
    new: Callable[[], None] | None = None,
    then: Callable[[], None] | None = None,
    rounds: int = 60,
) -> int:
    """Return how many calls pass after many of two known ones, where rank 0 has then made another one than the rest."""
    passed = -1

    def differ() -> None:
        nonlocal passed
        (known[0] if get_rank() == 0 else new or known[1])()
        for _ in range(1000):
            passed += 1
            (then or known[0])()
            if passed == 300:
                time.sleep(3)  # the watch compares them

    check_collectives(mode)
    try:
        before = resolve().calls.number
        for _ in range(rounds):
            known[0]()
            known[1]()
        with pytest.raises(CollectiveMismatchError, match=f"their call {before + 2 * rounds + 1} differs"):
            differ()
    finally:
        check_collectives("off")
    return passed


NUMELS = pytest.mark.parametrize("numel", [50, 5000, 50_000])  # in messages of two sizes, and by the backend


def sums_and_maxima(numel: int) -> list[Callable[[], None]]:
    return [lambda: all_reduce(ones(numel), "sum"), lambda: all_reduce(ones(numel), "max")]


# Calls that send nothing.
SILENT = [lambda: broadcast(ones(0), 0), lambda: broadcast(ones(0), 1)]


@NUMELS
@ranks(2, 3, fresh=True)
def test_the_first_20_calls_are_compared_in_every_mode(numel: int) -> None:
    init_dist("pytorch")
    assert calls_until_a_mismatch("off", sums_and_maxima(numel), rounds=3) == -1
    assert_group_works()


@ranks(2, fresh=True)
def test_a_sample_finds_a_mismatch_of_the_past() -> None:
    init_dist("pytorch")
    assert 0 <= calls_until_a_mismatch("sample", SILENT, then=barrier) < 150


@ranks(3, fresh=True)
def test_a_mismatch_of_later_calls_is_found_by_the_watch() -> None:
    init_dist("pytorch")
    assert calls_until_a_mismatch("off", SILENT, then=barrier) >= 0


@ranks(3, fresh=True)
def test_a_call_of_a_new_kind_does_not_meet_another_one() -> None:
    init_dist("pytorch")
    assert calls_until_a_mismatch("off", sums_and_maxima(50), new=lambda: all_reduce(ones(50), "min")) == -1


@ranks(2, fresh=True)
def test_always_compares_every_call() -> None:
    init_dist("pytorch")
    assert calls_until_a_mismatch("always", SILENT) == -1
    assert_group_works()


@ranks(2)
def test_lines_may_differ() -> None:
    for _ in range(60):
        if get_rank() == 0:
            all_reduce(ones(1))
        else:
            all_reduce(ones(1))
    assert_group_works()


@pytest.mark.parametrize("mode", ["on", "", None, True])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match=f"`mode` must be one of off, sample, always, but is {mode!r}"):
        check_collectives(mode)


@ranks(2, fresh=True)
def test_the_environment_sets_the_mode() -> None:
    os.environ["LOCKSTEP_CHECK"] = "always"
    init_dist("pytorch")
    with pytest.raises(CollectiveMismatchError):
        all_reduce(ones(1 + get_rank()))
    assert_group_works()


@ranks(2, fresh=True)
def test_an_unknown_mode_in_the_environment_is_refused_before_ranks_meet() -> None:
    os.environ["LOCKSTEP_CHECK"] = "sometimes"
    with pytest.raises(ValueError, match=r"LOCKSTEP_CHECK is not understood: .* but is 'sometimes'"):
        init_dist("pytorch")
    assert not is_distributed()
    del os.environ["LOCKSTEP_CHECK"]
    init_dist("pytorch")
    assert_group_works()
