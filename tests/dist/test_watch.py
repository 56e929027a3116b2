"""The watch: ranks that wait for each other, calls that hang on a device, and what it costs the store."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import HashStore

from lockstep.dist import all_reduce, barrier, broadcast, get_rank, init_dist, main_process_first
from lockstep.errors import CollectiveMismatchError, CollectiveTimeoutError, DistError
from lockstep.groups import resolve
from lockstep.testing import ranks
from lockstep.watch.board import Board
from lockstep.watch.watch import current_watch

from .reference import assert_group_works

HERE = r"\S*test_watch\.py:\d+"
SUM = r"all_reduce\(float32\[2\], sum\)"


def ones() -> torch.Tensor:
    return torch.ones(2)


def raised(call: Callable[[], object], kind: type[DistError] = CollectiveMismatchError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# Ranks that wait for each other in different groups.


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


# Calls on a device.


class Running:
    """A call that a device has not completed."""

    def __init__(self) -> None:
        self.is_complete = False

    def is_completed(self) -> bool:
        return self.is_complete


def call_on_device(what: str = "all_reduce", group: torch_dist.ProcessGroup | None = None) -> Running:
    """Record a call as one that was queued on a device, and has not ended there."""
    calls = resolve(group).calls
    assert calls is not None

    def queue() -> Running:
        calls.add(what, (ones(),))
        calls.running = (calls.number, time.monotonic(), running := Running())
        return running

    return queue()


def busy_until_failure(seconds: float = 20.0) -> None:
    begun = time.monotonic()
    while resolve().calls.failure is None and time.monotonic() - begun < seconds:
        time.sleep(0.01)


@ranks(2, fresh=True)
def test_a_mismatch_of_calls_on_a_device_is_raised_by_the_next_call() -> None:
    init_dist("pytorch", timeout=60)
    all_reduce(ones())
    call_on_device("all_reduce" if get_rank() == 0 else "reduce")
    busy_until_failure()
    text = raised(barrier)
    assert re.search(r"their call 2 differs:\n  rank 0: all_reduce.*\n  rank 1: reduce", text), text


@ranks(3, fresh=True)
def test_who_is_late_for_a_call_on_a_device_is_named_at_the_timeout() -> None:
    init_dist("pytorch", timeout=3)
    all_reduce(ones())
    barrier()
    if get_rank() == 1:
        time.sleep(8)
        with pytest.raises(DistError):
            all_reduce(ones())
        return
    call_on_device()
    busy_until_failure()
    with pytest.raises(CollectiveTimeoutError) as caught:
        all_reduce(ones())
    late = r"rank 1 of the default group \(3\) did not take part in call 3, all_reduce\(.*\) at .*, in time"
    assert re.match(
        rf"{late} \(rank \d of 3\):\n  rank 1: last call 2, barrier\(\) at {HERE}(.|\n)* now in\n", str(caught.value)
    )
    assert caught.value.failed_ranks == (1,)


@ranks(2, fresh=True)
def test_a_call_that_ends_on_its_device_does_not_fail() -> None:
    init_dist("pytorch", timeout=3)
    running = call_on_device()
    time.sleep(2)
    running.is_complete = True
    time.sleep(3)
    assert resolve().calls.running is None
    assert_group_works()


@ranks(2, fresh=True)
def test_ranks_that_wait_for_each_other_on_devices() -> None:
    init_dist("pytorch", timeout=60)
    group = torch_dist.new_group([0, 1])
    own = None if get_rank() == 0 else group
    call_on_device(group=own)
    while resolve(own).calls.failure is None:
        time.sleep(1)  # at one place, as a rank that waits for its device
    text = raised(lambda: barrier(own))
    assert "of the default group (2) waits for rank 1\n" in text
    assert "of the group of ranks 0, 1 waits for rank 0" in text


# What it costs the store.


class Counted:
    """A store that counts its requests."""

    def __init__(self, store: Any, after: Callable[[str], None] = lambda name: None) -> None:
        self.store, self.after, self.requests = store, after, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            self.requests[name] += 1
            result = function(*arguments)
            self.after(name)
            return result

        return call

    def taken(self) -> int:
        number = self.requests.total()
        self.requests.clear()
        return number


@pytest.mark.parametrize("size", [2, 32, 1000])
def test_requests_do_not_grow_with_the_number_of_ranks(size: int) -> None:
    met = HashStore()
    stores = [Counted(met) for _ in range(size)]
    boards = [Board(store, rank, size, lambda rank=rank: {"rank": rank}) for rank, store in enumerate(stores)]
    for board in boards:
        board.answer()  # as at their first look
    assert [store.taken() for store in stores] == [4] * size
    for board in boards:
        board.answer()
    assert [store.taken() for store in stores] == [1] * size  # nobody has asked

    def answer(name: str) -> None:
        if name == "multi_set":
            for board in boards[:-1]:
                board.answer()

    stores[-1].after = answer
    assert boards[-1].ask(range(size)) == {rank: {"rank": rank} for rank in range(size)}
    # Who has begun, and where; a number, the question, a look of its own, who has answered, and what.
    assert stores[-1].taken() == 7
    assert [store.taken() for store in stores[:-1]] == [3] * (size - 1)
    stores[-1].after = lambda name: None
    for board in boards[1:]:
        board.end({"rank": board.rank, "ended": True})
    assert boards[0].missing() == []
    assert boards[0].last_words(range(1, size)) == {rank: {"rank": rank, "ended": True} for rank in range(1, size)}
    assert stores[0].taken() <= 5
    assert [store.taken() for store in stores[1:]] == [1] * (size - 1)


def test_a_question_that_another_one_overwrites_is_answered() -> None:
    store = HashStore()
    boards = [Board(store, rank, 3, lambda rank=rank: {"rank": rank}) for rank in range(3)]
    boards[2].answer()
    first, second = store.add("asks", 1), store.add("asks", 1)
    store.set("asked/2", str(second))
    store.set("asked/2", str(first))
    boards[2].answer()
    assert boards[2].answered == second


@ranks(2, 4, fresh=True)
def test_requests_of_a_rank_while_it_works_and_while_it_waits() -> None:
    init_dist("pytorch", timeout=60)
    barrier()
    watch = current_watch()
    watch.store = watch.board.store = store = Counted(watch.store)
    begun = time.monotonic()
    time.sleep(3)
    # Each look at what is asked, and each second two for the calls of the group.
    seconds = time.monotonic() - begun
    assert store.taken() <= seconds / watch.board.tick + 2 * seconds + 10
    if get_rank() == 1:
        time.sleep(6)
    barrier()
    # The others have looked for this rank after 1, 2 and 4 seconds.
    seconds = time.monotonic() - begun - seconds
    assert store.taken() <= 3 * (seconds / watch.board.tick + 2 * seconds + 10)
