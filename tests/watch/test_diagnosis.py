"""Ranks that wait for each other in calls of different groups."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as torch_dist

from lockstep.dist import all_reduce, barrier, broadcast, destroy_dist, get_rank, init_dist, main_process_first
from lockstep.errors import CollectiveMismatchError, DistError
from lockstep.groups import resolve
from lockstep.testing import ranks
from lockstep.watch.diagnosis import Absent, lines_of

from ..dist.reference import assert_group_works, ones, raised

HERE = r"\S*test_diagnosis\.py:\d+"
SUM = r"all_reduce\(float32\[2\], sum\)"


@ranks(2, 3, fresh=True)
def test_a_subgroup_against_the_default_group() -> None:
    init_dist("pytorch", timeout=60)
    group = torch_dist.new_group([0, 1])
    text = raised(lambda: all_reduce(ones(), group=group) if get_rank() == 0 else barrier())
    first = rf"  rank 0: {SUM} at {HERE} of the group of ranks 0, 1 waits for rank 1\n"
    assert re.search(rf"{first}  rank 1: barrier\(\) at {HERE} of the default group \(\d\) waits for rank 0$", text), (
        text
    )
    with pytest.raises(CollectiveMismatchError):
        barrier()


@ranks(3, fresh=True)
def test_a_chain_of_groups() -> None:
    init_dist("pytorch", timeout=60)
    groups = [torch_dist.new_group(pair) for pair in ([0, 1], [1, 2], [2, 0])]
    text = raised(lambda: barrier(groups[get_rank()]))
    assert (
        len(re.findall(rf"  rank (\d): barrier\(\) at {HERE} of the group of ranks \d, \d waits for rank \d", text))
        == 3
    )


@ranks(3, fresh=True)
def test_a_collective_inside_a_block_that_others_wait_for() -> None:
    init_dist("pytorch", timeout=60)
    group = torch_dist.new_group([0, 1])

    def call() -> None:
        if get_rank() == 2:
            barrier()
            return
        with main_process_first(group):
            resolve(group).calls.inside = "main_process_first"
            barrier()

    text = raised(call, DistError)  # rank 0 may tell the others before they hear it
    raised(barrier)
    waits = rf"  rank 1: main_process_first\(\) at {HERE} of the group of ranks 0, 1 waits for rank 0, which is inside "
    assert re.search(rf"  rank 0: barrier\(\) at {HERE} of the default group \(3\) waits for rank 1\n{waits}", text), (
        text
    )


def test_of_many_ranks_that_are_absent_the_first_are_shown() -> None:
    absent = [Absent(rank, f"is gone (process {rank} on a)", has_ended=True, cause="") for rank in range(300)]
    *shown, last = lines_of(absent).split("\n")
    assert shown == [f"  rank {rank}: is gone (process {rank} on a)" for rank in range(16)]
    assert last == "  and others at 284 further places"


@ranks(2, fresh=True)
def test_a_call_on_one_rank_alone_whose_other_rank_has_left() -> None:
    init_dist("pytorch", timeout=60)
    barrier()
    text = raised(destroy_dist if get_rank() else lambda: all_reduce(ones()), CollectiveMismatchError)
    assert re.search(rf"  rank 0: {SUM} at {HERE}\n  rank 1: has ended, after barrier\(\) at {HERE}\n", text), text
    assert "If one of these lines is under a condition such as `if rank == 0`, move it out of there" in text


@ranks(3, fresh=True)
def test_a_rank_that_is_only_slow_raises_no_alarm() -> None:
    init_dist("pytorch", timeout=60)
    group = torch_dist.new_group([0, 1])
    for _ in range(25):
        broadcast(ones(), 2)  # known: not compared any longer
        if get_rank() < 2:
            barrier(group)
    data = torch.full((2,), float(get_rank()))
    # Ranks 0 and 1 seem to wait for each other, but rank 2 ends that: the first needs it alone.
    calls = [lambda: broadcast(data, 2), lambda: barrier(group)]
    if get_rank() == 2:
        time.sleep(4)
        calls[0]()
    else:
        for call in calls if get_rank() == 0 else reversed(calls):
            call()
    assert data.tolist() == [2.0, 2.0]
    assert_group_works()
