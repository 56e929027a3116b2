"""The record of calls: which line has made a call."""

from __future__ import annotations

import _thread
import os
import threading
from typing import Any

import pytest

import lockstep
from lockstep.calls import Calls

PLAIN = """def loop():
    collective()
def collective():
    check_call()
"""
IN_A_BLOCK = """from contextlib import contextmanager
def loop():
    with block(): pass
@contextmanager
def block():
    check_call()
    yield
"""


@pytest.mark.parametrize(("loop", "line"), [(PLAIN, 2), (IN_A_BLOCK, 3)])
def test_a_call_that_no_line_of_a_user_has_made_is_that_of_lockstep(loop: str, line: int) -> None:
    calls, done = Calls(), threading.Event()
    names: dict[str, Any] = {"check_call": lambda: calls.add("barrier", ()), "done": done.set}
    exec(compile(loop, os.path.join(os.path.dirname(lockstep.__file__), "made_up.py"), "exec"), names)
    # As in `python -m lockstep`, the outermost frame is Python's own.
    exec(compile("def begin():\n    loop()\n    done()", "<frozen runpy>", "exec"), names)
    _thread.start_new_thread(names["begin"], ())
    assert done.wait(10)
    assert calls.call(1).site.endswith(f"made_up.py:{line}")


def test_what_has_called_the_command_has_not_made_its_calls() -> None:
    calls, folder = Calls(), os.path.dirname(lockstep.__file__)
    names: dict[str, Any] = {"check_call": lambda: calls.add("barrier", ())}
    exec(compile(PLAIN, os.path.join(folder, "made_up.py"), "exec"), names)
    exec(compile("def command():\n    loop()", os.path.join(folder, "cli", "made_up.py"), "exec"), names)
    exec(compile("command()", "/somewhere/typer/main.py", "exec"), names)
    assert calls.call(1).site.endswith("lockstep/made_up.py:2")
    exec(compile("def hook():\n    collective()", "/home/me/hook.py", "exec"), names)
    exec(compile("def command():\n    hook()", os.path.join(folder, "cli", "made_up.py"), "exec"), names)
    exec(compile("command()", "/somewhere/typer/main.py", "exec"), names)
    assert calls.call(2).site.endswith("hook.py:2")


def test_a_call_that_is_not_kept_is_none() -> None:
    calls = Calls()
    calls.add("barrier", ())
    assert str(calls.call(1)).startswith("barrier()")
    assert (calls.call(0), calls.call(2)) == (None, None)
    calls.reset()  # while a thread has the number of a call before
    assert calls.call(1) is None
