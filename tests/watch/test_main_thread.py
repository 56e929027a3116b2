"""Where the main thread is, as the watch asks."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from lockstep.watch.absent import AbsentSearch
from lockstep.watch.main_thread import frames_of_main_thread, is_in_own_code


class _Kept:
    """Refers to itself, so that the garbage collector alone ends it; notes who was running then."""

    interrupted: list[str] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.interrupted.append(sys._getframe(1).f_code.co_name)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections begin between instructions, outside of calls of C")
def test_no_collection_begins_while_the_list_of_threads_is_locked() -> None:
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            _Kept()
            frames_of_main_thread()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert _Kept.interrupted
    assert "frames_of_main_thread" not in _Kept.interrupted
    assert gc.isenabled()


class _Guard:
    """A local variable whose end must come in the thread that has made it, as that of torch's guards."""

    made = 0
    ended_in: list[int] = []

    def __init__(self) -> None:
        type(self).made += 1

    def __del__(self) -> None:
        self.ended_in.append(threading.get_ident())


def test_local_variables_of_the_main_thread_end_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Guard, "made", 0)
    monkeypatch.setattr(_Guard, "ended_in", [])
    gate, has_looked = threading.Lock(), threading.Event()
    gate.acquire()

    def wait_guarded() -> None:
        guard = _Guard()  # noqa: F841
        gate.acquire()  # until the thread that looks opens it

    def let_main_thread_leave(*event: object) -> Callable[..., Any]:
        """At each line of the thread that looks: let the main thread leave its function and enter it again."""
        made = _Guard.made
        gate.release()
        while _Guard.made == made:
            time.sleep(0.001)
        return let_main_thread_leave

    def look() -> None:
        sys.settrace(let_main_thread_leave)
        frames_of_main_thread()
        sys.settrace(None)
        has_looked.set()
        gate.release()

    thread = threading.Thread(target=look)
    thread.start()
    while not has_looked.is_set():
        wait_guarded()
    thread.join()
    assert len(_Guard.ended_in) > 5
    assert set(_Guard.ended_in) == {threading.get_ident()}


def test_the_stack_is_whole() -> None:
    found: list[list[tuple[str, int | None, str]]] = []

    def look() -> None:
        found.append([(code.co_filename, line, code.co_name) for code, _, line in frames_of_main_thread()])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    expected = [(one.filename, one.name) for one in reversed(traceback.extract_stack())]
    assert [(file, name) for file, _, name in found[0]][-len(expected) :] == expected


def test_modules_of_python_belong_to_who_calls_them():
    found, looked = [], threading.Event()

    def look() -> None:
        found.append(frames_of_main_thread())
        looked.set()

    timer = threading.Timer(0.2, look)
    timer.start()
    looked.wait(10)
    assert found[0][0][0].co_filename == threading.__file__
    assert is_in_own_code(found[0])
    # As where lockstep waits for its own thread.
    assert not is_in_own_code([found[0][0], (AbsentSearch.find.__code__, 0, 1), *found[0]])


def test_a_rank_that_writes_a_checkpoint_by_torch_does_not_wait_for_others() -> None:
    writes = (FileSystemWriter.write_data.__code__, 0, 1)
    assert is_in_own_code([writes])
    assert not is_in_own_code([(torch.distributed.barrier.__wrapped__.__code__, 0, 1), writes])
