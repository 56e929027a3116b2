"""`run_ranks`: real processes, one group, reports that name the cause."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as torch_dist

from lockstep.dist import all_reduce, destroy_dist, get_rank, get_world_size
from lockstep.testing import RankFailure, run_ranks
from lockstep.testing.messages import STACK_SIGNAL, RankReport
from lockstep.testing.pool import run_body

kept: list[Any] = []


@dataclass(frozen=True)
class Point:
    x: int


def sum_of_ranks() -> int:
    data = torch.tensor(get_rank())
    all_reduce(data)
    return int(data)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_runs_the_body_in_one_group(size: int) -> None:
    assert run_ranks(size, sum_of_ranks) == [sum(range(size))] * size


def describe(a: int, *, point: Point) -> tuple[int, int, int, Point]:
    return get_rank(), os.getpid(), a, point


def test_values_come_back_by_rank_from_processes_that_stay() -> None:
    first = run_ranks(2, describe, 5, point=Point(1))
    second = run_ranks(2, describe, 6, point=Point(2))
    assert [(rank, a, point) for rank, _, a, point in first] == [(0, 5, Point(1)), (1, 5, Point(1))]
    assert [pid for _, pid, _, _ in first] == [pid for _, pid, _, _ in second]
    assert len({os.getpid(), *(pid for _, pid, _, _ in first)}) == 3


def whereabouts() -> tuple[str, str | None, str, str]:
    return os.getcwd(), os.environ.get("SOME_VARIABLE"), os.environ["RANK"], sys.path[0]


def test_ranks_see_the_parents_folder_environment_and_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(2, sum_of_ranks)  # the pool is older than the changes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_VARIABLE", "here")
    monkeypatch.syspath_prepend("/some/path")
    assert run_ranks(2, whereabouts) == [
        (str(tmp_path), "here", "0", "/some/path"),
        (str(tmp_path), "here", "1", "/some/path"),
    ]
    monkeypatch.undo()
    assert [where[1] for where in run_ranks(2, whereabouts)] == [None, None]


def draw_and_disturb() -> tuple[float, float, float, torch.dtype, bool]:
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    state = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    return *drawn, *state


def test_seeds_and_settings_are_the_same_before_every_body_but_seeds_differ_by_rank() -> None:
    first, second = run_ranks(2, draw_and_disturb), run_ranks(2, draw_and_disturb)
    assert first == second
    assert first[0][3:] == (torch.float32, False)
    assert all(a != b for a, b in zip(first[0][:3], first[1][:3], strict=True))


def use_a_subgroup() -> int:
    group = torch_dist.new_group([1])
    data = torch.ones(1)
    if get_rank() == 1:
        torch_dist.all_reduce(data, group=group)
    return sum_of_ranks()


def count_groups() -> int:
    return len(torch_dist.distributed_c10d._world.pg_map)


def test_groups_of_a_body_are_gone_before_the_next() -> None:
    pids = [pid for _, pid, _, _ in run_ranks(2, describe, 0, point=Point(0))]
    assert run_ranks(2, use_a_subgroup) == [1, 1]
    assert run_ranks(2, count_groups) == [1, 1]
    assert run_ranks(2, sum_of_ranks) == [1, 1]
    assert [pid for _, pid, _, _ in run_ranks(2, describe, 0, point=Point(0))] == pids


def environment_of_a_fresh_rank() -> tuple[bool, list[str | None]]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert int(os.environ["MASTER_PORT"]) > 0
    return torch_dist.is_initialized(), [os.environ.get(name) for name in names]


def test_fresh_ranks_are_new_and_have_an_environment_but_no_group() -> None:
    found = run_body(environment_of_a_fresh_rank, (), {}, size=2, fresh=True)
    assert found == [
        (False, ["0", "2", "0", "2", "127.0.0.1"]),
        (False, ["1", "2", "1", "2", "127.0.0.1"]),
    ]


def fail_alone(how: str) -> None:
    print(f"rank {get_rank()} was here")
    if get_rank() == 1:
        match how:
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "abort":
                os.abort()
            case "assert":
                assert get_rank() + 3 == 5
    all_reduce(torch.ones(1))


def leave_early(how: str) -> None:
    if get_rank() == 1:
        match how:
            case "sys.exit":
                sys.exit(3)
            case "skip":
                pytest.skip("no time")
            case "xfail":
                pytest.xfail("no hope")
            case "SkipTest":
                raise unittest.SkipTest("no reason")
            case "warn":
                warnings.warn("careful", UserWarning, stacklevel=1)


def failure_of(body: Callable[..., Any], *args: Any, **options: Any) -> RankFailure:
    """Return how `body` fails on two ranks, and make sure that the next body finds a working pool."""
    with pytest.raises(RankFailure) as caught:
        run_body(body, args, {}, size=2, **options)
    assert run_ranks(2, sum_of_ranks) == [1, 1]
    return caught.value


@pytest.mark.parametrize(
    ("how", "summary"),
    [("exit", "exit code 3"), ("kill", "killed by SIGKILL"), ("abort", "killed by SIGABRT")],
)
def test_a_rank_that_died_comes_before_the_peer_that_noticed(how: str, summary: str) -> None:
    failure = failure_of(fail_alone, how)
    died, raised = failure.reports
    assert (died.rank, died.kind, died.summary) == (1, "died", summary)
    assert (raised.rank, raised.kind) == (0, "raised")
    assert raised.consequence
    assert "by peer" in raised.detail
    assert died.output == "rank 1 was here\n"
    first_line = str(failure).splitlines()[0]
    assert first_line == f"fail_alone on 2 ranks: rank 1 died: {summary} (and rank 0 raised)"


def test_a_crash_shows_where_it_happened() -> None:
    assert "in fail_alone" in failure_of(fail_alone, "abort").reports[0].detail


def test_a_rank_that_raised_comes_before_the_peer_that_waits_for_it() -> None:
    raised, hung = failure_of(fail_alone, "assert").reports
    assert (raised.rank, raised.kind) == (1, "raised")
    assert "assert (1 + 3) == 5" in raised.summary
    assert "where 1 = get_rank()" in raised.detail
    assert "run_body" not in raised.detail
    assert (hung.rank, hung.kind) == (0, "hung")
    assert "in all_reduce" in hung.detail
    assert "in fail_alone" in hung.detail


def test_sys_exit_is_no_success() -> None:
    (raised,) = failure_of(leave_early, "sys.exit").reports
    assert (raised.rank, raised.kind, raised.summary) == (1, "raised", "SystemExit: 3")


@pytest.mark.parametrize("how", ["skip", "xfail", "SkipTest"])
def test_a_rank_may_not_skip(how: str) -> None:
    (raised,) = failure_of(leave_early, how).reports
    assert (raised.rank, raised.kind) == (1, "raised")
    assert "a rank may not skip" in raised.summary
    assert "decided in the parent" in raised.summary


def test_warnings_are_errors_unless_told_otherwise() -> None:
    assert failure_of(leave_early, "warn").reports[0].summary == "UserWarning: careful"
    run_body(leave_early, ("warn",), {}, size=2, warnings="default")


def fail_on_every_rank() -> None:
    raise ValueError(f"rank {get_rank()} is unhappy")


def test_when_all_raise_none_is_taken_for_a_consequence() -> None:
    failure = failure_of(fail_on_every_rank)
    assert [(report.rank, report.kind) for report in failure.reports] == [(0, "raised"), (1, "raised")]


def wait_forever(where: str) -> None:
    if get_rank() == 1:
        if where == "python":
            wait_in_python()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    all_reduce(torch.ones(1))


def wait_in_python() -> None:
    while True:
        pass


@pytest.mark.parametrize("where", ["python", "C"])
def test_a_hang_shows_where_every_rank_stands(where: str) -> None:
    run_ranks(2, sum_of_ranks)  # so that the time limit does not run while the ranks import this module
    failure = failure_of(wait_forever, where, timeout=0.7)
    assert [(report.rank, report.kind) for report in failure.reports] == [(0, "hung"), (1, "hung")]
    assert "not finished after 0.7 s" in failure.reports[0].summary
    assert "in all_reduce" in failure.reports[0].detail
    place = "in wait_in_python" if where == "python" else "in wait_forever"
    assert place in failure.reports[1].detail
    assert "worker.py" not in str(failure)
    assert "die_with_parent" not in str(failure)


def ask_for_stacks_while_threads_run() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=run_python_until, args=(over,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    # Another process asks: this one would hold the interpreter's lock while it sends a signal.
    ask = f"import os, time\nfor _ in range(1000): os.kill(os.getppid(), {STACK_SIGNAL:d}); time.sleep(0.0005)"
    with subprocess.Popen([sys.executable, "-c", ask]) as asking:
        while asking.poll() is None:
            pass
    over.set()
    for thread in threads:
        thread.join()


def run_python_until(over: threading.Event) -> None:
    while not over.is_set():
        Path("a/b").with_name("c").exists()


def test_a_rank_survives_that_it_is_asked_for_its_stack_while_other_threads_run() -> None:
    run_ranks(1, ask_for_stacks_while_threads_run)


LEAKS = {
    "set": "left environment variable LEFT_OVER set",
    "removed": "removed environment variable RANK",
    "changed": "left environment variable WORLD_SIZE changed to '7'",
    "thread": "left thread 'idler' running",
    "file": "leaky.txt open",
    "socket": "unclosed <socket",
    "unclosed": "unclosed file",
    "thread raised": "ValueError('rank 1 is unhappy') ended thread 'unlucky'",
}


def leak(kinds: list[str], folder: Path) -> None:
    if get_rank() == 1:
        for what in kinds:
            leave(what, folder)


def leave(what: str, folder: Path) -> None:
    match what:
        case "set":
            os.environ["LEFT_OVER"] = "1"
        case "removed":
            del os.environ["RANK"]
        case "changed":
            os.environ["WORLD_SIZE"] = "7"
        case "thread":
            threading.Thread(target=time.sleep, args=(100,), daemon=True, name="idler").start()
        case "file":
            kept.append(open(folder / "leaky.txt", "w"))  # noqa: SIM115
        case "socket":
            socket.socket()
        case "group":
            destroy_dist()
        case "unclosed":
            open(folder / "dropped.txt", "w")  # noqa: SIM115
        case "thread raised":
            thread = threading.Thread(target=fail_on_every_rank, name="unlucky")
            thread.start()
            thread.join()


def test_a_body_that_leaves_something_behind_fails_with_each_leak_told(tmp_path: Path) -> None:
    failure = failure_of(leak, list(LEAKS), tmp_path)
    (report,) = failure.reports
    assert (report.rank, report.kind) == (1, "leaked")
    told = [report.summary, *report.detail.splitlines()]
    for complaint in LEAKS.values():
        assert sum(complaint in one for one in told) == 1
    assert len(told) == len(LEAKS)


def test_a_body_may_not_destroy_the_group_of_the_pool(tmp_path: Path) -> None:
    (report,) = failure_of(leak, ["group"], tmp_path).reports
    assert (report.rank, report.kind) == (1, "leaked")
    assert "destroyed the default process group" in f"{report.summary}\n{report.detail}"


def leak_on_all_ranks(count: int) -> None:
    for number in range(count):
        os.environ[f"LEFT_{number}"] = "1"
    if get_rank() == 1:
        print("written by rank 1")


def test_what_each_rank_leaves_is_told() -> None:
    assert str(failure_of(leak_on_all_ranks, 2)).splitlines() == [
        "leak_on_all_ranks on 2 ranks: rank 0 leaked: left environment variable LEFT_0 set (and rank 1 leaked)",
        "",
        "--- rank 0 leaked: left environment variable LEFT_0 set",
        "left environment variable LEFT_1 set",
        "",
        "--- rank 1 leaked: left environment variable LEFT_0 set",
        "left environment variable LEFT_1 set",
        "--- rank 1 wrote:",
        "  written by rank 1",
    ]


def test_a_leak_beside_a_failure_comes_after_it() -> None:
    reports = [RankReport(0, "leaked", "left x open"), RankReport(1, "died", "exit code 3")]
    assert str(RankFailure.of("test_it on 2 ranks", reports)).splitlines() == [
        "test_it on 2 ranks: rank 1 died: exit code 3 (and rank 0 leaked)",
        "",
        "--- rank 1 died: exit code 3",
        "",
        "--- rank 0 leaked: left x open",
    ]


def use_and_put_back(path: str) -> None:
    os.environ["BRIEF"] = "1"
    del os.environ["BRIEF"]
    with open(path, "w") as file, socket.socket():
        print("text", file=file)
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    cycle: list[Any] = [torch.ones(1)]
    cycle.append(cycle)


def test_what_is_put_back_is_no_leak(tmp_path: Path) -> None:
    assert run_ranks(2, use_and_put_back, str(tmp_path / "file")) == [None, None]


def speak() -> None:
    print("a word")
    print("a complaint", file=sys.stderr)
    subprocess.run(["echo", "a child"], check=True)


def test_what_passing_ranks_write_reaches_the_parent(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, sum_of_ranks)
    run_ranks(2, speak)
    run_ranks(2, sum_of_ranks)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank {r}] {text}" for r in (0, 1) for text in ("a word", "a complaint", "a child")]  # fmt: skip


def die_later() -> None:
    threading.Timer(0.05, os._exit, (4,)).start()


def test_a_rank_that_dies_after_its_body_is_not_passed_over() -> None:
    # The thread is still there when the body ends, and ends its process while the rank waits for it.
    assert failure_of(die_later).reports[0].summary == "exit code 4"


def give_a_lambda() -> Callable[[], None]:
    return lambda: None


def test_a_value_that_cannot_travel_is_a_failure_of_the_rank() -> None:
    assert "give_a_lambda.<locals>" in failure_of(give_a_lambda).reports[0].summary


def test_arguments_that_cannot_travel_are_named() -> None:
    with pytest.raises(TypeError, match="argument point of describe must be picklable"):
        run_ranks(2, describe, 1, point=threading.Lock())
    with pytest.raises(TypeError, match="argument number 0 of describe must be picklable"):
        run_ranks(2, describe, threading.Lock(), point=Point(1))


def test_bodies_must_be_found_by_name() -> None:
    def inner() -> None: ...

    for body in (inner, lambda: None, len):
        with pytest.raises(TypeError, match="must be a function at the top level of a module"):
            run_ranks(2, body)


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_sizes_must_be_positive_integers(size: Any) -> None:
    with pytest.raises(ValueError, match="`size` must be an int of at least 1"):
        run_ranks(size, sum_of_ranks)


def test_body_latency_is_reported(record_property: Callable[[str, object], None]) -> None:
    run_ranks(2, get_world_size)
    durations = []
    for _ in range(50):
        begin = time.perf_counter()
        assert run_ranks(2, get_world_size) == [2, 2]
        durations.append(time.perf_counter() - begin)
    record_property("body_latency_ms", 1e3 * sorted(durations)[25])
    print(f"body latency on 2 ranks: median {1e3 * sorted(durations)[25]:.2f} ms")


def process_id() -> int:
    return os.getpid()


def await_end(pids: list[int]) -> None:
    while any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.01)


def test_a_rank_that_dies_between_two_bodies_is_not_passed_over() -> None:
    pids = run_ranks(2, process_id)
    os.kill(pids[1], signal.SIGKILL)
    await_end(pids[1:])
    failure = failure_of(sum_of_ranks)
    assert (failure.reports[0].rank, failure.reports[0].summary) == (1, "killed by SIGKILL")


def test_the_pool_used_longest_ago_makes_room() -> None:
    pids = {size: run_ranks(size, process_id) for size in (1, 2, 3, 4)}
    assert run_ranks(1, process_id) == pids[1]
    run_ranks(5, process_id)
    await_end(pids[2])
    assert run_ranks(1, process_id) == pids[1]
    assert run_ranks(4, process_id) == pids[4]


def sleep() -> None:
    time.sleep(1000)


def interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_pool_is_not_used_again() -> None:
    pids = run_ranks(2, process_id)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, sleep)
    finally:
        signal.signal(signal.SIGALRM, before)
    await_end(pids)
    assert run_ranks(2, sum_of_ranks) == [1, 1]
