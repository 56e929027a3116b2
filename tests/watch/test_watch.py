"""The watch: calls that hang on a device, handles that are waited for late, and what it asks of the store."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as torch_dist

from lockstep.dist import all_gather, all_reduce, barrier, destroy_dist, gather, get_rank, init_dist
from lockstep.dist.consistency import check_call
from lockstep.errors import CollectiveTimeoutError, DistError
from lockstep.groups import resolve
from lockstep.testing import ranks
from lockstep.transport.handles import waiting
from lockstep.watch import absent
from lockstep.watch.absent import AbsentSearch
from lockstep.watch.failures import backend_errors_translated
from lockstep.watch.watch import current_watch

from ..dist.reference import assert_group_works, ones, raised
from .test_board import Counted

HERE = r"\S*test_watch\.py:\d+"


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
def test_who_is_late_for_a_call_on_a_device_is_named_at_the_timeout(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=3)
    all_reduce(ones())
    barrier()
    if get_rank() == 1:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 2)))
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
    (tmp_path / str(get_rank())).touch()


@ranks(2, fresh=True)
def test_a_call_that_has_raised_at_its_timeout_is_not_compared_any_more(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=1)
    if get_rank() == 1:
        while not (tmp_path / "raised").exists():
            time.sleep(0.01)
        destroy_dist()  # this one has made fewer calls, which is no news: the other one has its error
        return
    watch, has_looked = current_watch(), threading.Event()
    assert watch is not None
    look = AbsentSearch.find

    def look_late(search: AbsentSearch) -> Any:
        is_late = threading.current_thread().name == "lockstep-watch"
        while is_late and not watch.board.last_states([1]):
            time.sleep(0.01)
        found = look(search)
        if is_late:
            has_looked.set()
        return found

    pytest.MonkeyPatch().setattr(AbsentSearch, "find", look_late)  # the process ends with the test
    raised(lambda: all_reduce(ones()), CollectiveTimeoutError)
    (tmp_path / "raised").touch()
    has_looked.wait(10)
    assert resolve().calls.failure is None


@ranks(5, fresh=True)
def test_the_stack_of_ranks_that_are_late_at_one_place_is_shown_once(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=2)
    if get_rank() == 0:
        text = raised(barrier, CollectiveTimeoutError)
        (tmp_path / "raised").touch()
        assert re.search(
            r"\n  rank 1: no call .* now in\n +File .*(\n +File .*)+\n  ranks 2, 4: at the same place", text
        )
        assert re.search(r"\n  rank 3: no call .* now in\n +File ", text)
    elif get_rank() == 3:
        until(lambda: (tmp_path / "raised").exists())
    else:
        while not (tmp_path / "raised").exists():
            time.sleep(1)


@ranks(2, fresh=True)
def test_a_call_that_ends_on_its_device_does_not_fail() -> None:
    init_dist("pytorch", timeout=2)
    running = call_on_device()
    time.sleep(1.2)
    running.is_complete = True
    time.sleep(1.5)
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


# The store.


@ranks(2, fresh=True)
def test_a_group_that_torch_has_made_after_another_one_is_watched_whose_store_is_gone(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    for number in range(2):
        store = torch_dist.FileStore(str(tmp_path / str(number)), 2)
        torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        all_reduce(ones())
        watch = current_watch()
        assert watch is not None
        assert watch.default() is torch_dist.GroupMember.WORLD
        watch.cut_off()
        torch_dist.destroy_process_group()


@ranks(4, fresh=True)
def test_requests_of_a_rank_while_it_works_and_while_it_waits() -> None:
    init_dist("pytorch", timeout=60)
    barrier()
    watch = current_watch()
    watch.store = watch.board.store = store = Counted(watch.store)
    begun = time.monotonic()
    time.sleep(2)
    # Each look at what is asked, and each second two for the calls of the group.
    seconds = time.monotonic() - begun
    assert store.taken() <= seconds / watch.board.tick + 2 * seconds + 10
    if get_rank() == 1:
        time.sleep(4)
    barrier()
    # The others have looked for this rank after 1 and 2 seconds.
    seconds = time.monotonic() - begun - seconds
    assert store.taken() <= 3 * (seconds / watch.board.tick + 2 * seconds + 10)


@ranks(6, fresh=True)
def test_one_rank_asks_who_is_absent_and_the_others_hear_it(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=7)  # six ranks also meet in it
    barrier()
    have_raised = [tmp_path / str(rank) for rank in range(5)]
    if get_rank() < 5:
        text = raised(barrier, CollectiveTimeoutError)
        assert re.search(r"rank 5 of the default group \(6\) did not take part(.|\n)*\n  rank 5: last call 1, ", text)
        have_raised[get_rank()].touch()
    until(lambda: all(path.exists() for path in have_raised))
    # Who looks at a call that lasts for 1, 2 and 4 seconds, and who asks when its time is over.
    assert current_watch().store.add("asks", 0) <= 5


@ranks(3, fresh=True)
def test_who_is_absent_is_heard_from_a_rank_whose_watch_has_found_it_before_its_main_thread(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=2)
    barrier()
    watch, calls = current_watch(), resolve().calls
    assert watch is not None
    ask = AbsentSearch.ask

    def ask_late(search: AbsentSearch, **options: Any) -> Any:
        if get_rank() == 0 and not search.in_call:
            until(lambda: calls.failure is not None)  # by the watch, which has found it
        return ask(search, **options)

    pytest.MonkeyPatch().setattr(AbsentSearch, "ask", ask_late)  # the process ends with the test
    if get_rank() == 1:
        once = AbsentSearch.find_by_one_rank

        def find_late(search: AbsentSearch) -> Any:
            while not (tmp_path / "0").exists():
                watch.board.answer()
                time.sleep(0.05)
            return once(search)

        pytest.MonkeyPatch().setattr(AbsentSearch, "find_by_one_rank", find_late)
    if get_rank() < 2:
        assert "rank 2 of the default group (3) did not take part" in raised(barrier, CollectiveTimeoutError)
        (tmp_path / str(get_rank())).touch()
    until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))


@ranks(2, fresh=True)
def test_a_rank_that_is_late_in_code_of_its_own_inside_of_a_call_does_not_take_the_others_for_late(
    tmp_path: Path,
) -> None:
    """As in a backward pass, which it began before them: its watch must not find that nobody is absent."""
    init_dist("pytorch", timeout=3)
    barrier()
    check_call("backward_pass", resolve(), compares=False)
    have_raised = tmp_path / "raised"
    with waiting(resolve()):
        if get_rank() == 1:
            until(have_raised.exists)
        else:
            time.sleep(0.8)
            says = r"rank 1 of the default group \(2\) did not take part in (.|\n)*, in until"
            with pytest.raises(CollectiveTimeoutError, match=says), backend_errors_translated():
                torch_dist.barrier()
            have_raised.touch()


@ranks(6, fresh=True)
def test_one_rank_asks_where_all_find_that_the_calls_of_the_first_differ() -> None:
    init_dist("pytorch", timeout=60)
    barrier()
    call_on_device("all_reduce" if get_rank() == 0 else "reduce").is_complete = True
    busy_until_failure()
    assert re.search(r"call 2 differs:\n  rank 0: all_reduce.*\n  ranks 1-5: reduce", raised(barrier))
    assert current_watch().store.add("asks", 0) <= 3  # what others do, and that the group has failed


@ranks(2, fresh=True)
def test_a_handle_that_is_waited_for_late_does_not_fail() -> None:
    init_dist("pytorch", timeout=2)
    parts = [ones(), ones()]
    handles = [
        all_reduce(ones(), async_op=True),
        all_gather(parts, ones(), async_op=True),
        barrier(async_op=True),
        gather(ones(), parts if get_rank() == 0 else None, async_op=True),
    ]
    time.sleep(3)
    for handle in handles:
        handle.wait()
    assert_group_works()


@ranks(2, fresh=True)
def test_calls_that_wait_leave_one_key_of_a_group_in_the_store() -> None:
    init_dist("pytorch", timeout=60)
    store, keys = current_watch().store, []
    for _ in range(3):
        if get_rank() == 1:
            time.sleep(1.6)
        barrier()
        keys.append(store.num_keys())
    assert keys[0] == keys[2]


@ranks(2, fresh=True)
def test_a_group_that_was_destroyed_does_not_end_the_watch() -> None:
    init_dist("pytorch", timeout=60)
    group = torch_dist.new_group([0, 1])
    barrier(group)
    torch_dist.destroy_process_group(group)
    if get_rank() == 1:
        time.sleep(2)  # rank 0 asks what it does
    barrier()
    assert not current_watch().is_cut_off


@ranks(2, fresh=True)
@pytest.mark.parametrize("what", ["the store is gone", "a fault of its own", "it is late"])
def test_only_a_store_that_does_not_answer_is_said_to_be_silent(what: str, tmp_path: Path) -> None:
    init_dist("pytorch", timeout=2)
    barrier()
    find, board = AbsentSearch.find_by_one_rank, current_watch().board
    board.seconds_to_answer /= 3

    def find_otherwise(search: AbsentSearch) -> Any:
        if what == "it is late":
            time.sleep(2 * board.seconds_to_answer)
            return find(search)
        raise KeyError if what == "a fault of its own" else torch_dist.DistStoreError

    pytest.MonkeyPatch().setattr(AbsentSearch, "find_by_one_rank", find_otherwise)  # the process ends with the test
    if get_rank() == 1:
        until(lambda: (tmp_path / "raised").exists())
        return
    with patch.object(absent, "_logger") as logger:
        text = raised(barrier, CollectiveTimeoutError)
    (tmp_path / "raised").touch()
    assert ("nor does the store answer" in text) == (what == "the store is gone")
    assert logger.exception.called == (what == "a fault of its own")


class Silent:
    """A store that does not answer for a while."""

    def __init__(self, store: Any) -> None:
        self.store, self.is_silent = store, True

    def __getattr__(self, name: str) -> Any:
        if self.is_silent:
            raise torch_dist.DistStoreError("wait timeout")
        return getattr(self.store, name)


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < seconds
        time.sleep(0.05)


@ranks(2, fresh=True)
def test_a_store_that_was_silent_for_a_while_is_asked_again() -> None:
    init_dist("pytorch", timeout=60)
    barrier()
    watch = current_watch()
    watch.store = watch.board.store = store = Silent(watch.store)
    until(lambda: watch.is_cut_off)
    store.is_silent = False
    until(lambda: not watch.is_cut_off)
    barrier()
    call_on_device("all_reduce" if get_rank() == 0 else "reduce")
    busy_until_failure()
    assert "differs" in raised(barrier)


# What a thread beside the watch learns.


@ranks(2, fresh=True)
def test_a_failure_that_a_search_hears_of_ends_the_call_that_waits(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=300)
    other = torch_dist.new_group([0, 1])
    all_reduce(ones(), group=other)
    watch = current_watch()
    comm = resolve(other)
    assert watch is not None
    if get_rank() == 1:
        until(lambda: (tmp_path / "told").exists() and comm.calls.failure is not None)
        assert "they differ" in raised(lambda: all_reduce(ones(), group=other))
        return

    def search() -> None:
        until(lambda: comm.calls.number == 2)
        watch.store.set(f"failure/{comm.group_name}", '["calls", "they differ", [1]]')  # nobody is notified
        watch.hear()
        (tmp_path / "told").touch()

    thread = threading.Thread(target=search)
    thread.start()
    assert "they differ" in raised(lambda: all_reduce(ones(), group=other))
    thread.join()


@ranks(2, fresh=True)
def test_a_rank_that_goes_on_after_a_search_looks_for_others_no_longer() -> None:
    init_dist("pytorch", timeout=60)
    all_reduce(ones())
    watch, comm = current_watch(), resolve()
    assert watch is not None
    AbsentSearch(watch, comm, comm.calls, comm.calls.number).find()
    assert watch.state()["looks"]
    all_reduce(ones())
    assert not watch.state()["looks"]
