"""A process that nothing else can end, ended by the watch."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEAVE = "from lockstep.watch.interrupt import end_process\n"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import sys; sys.stdout = None",  # closed before the start
        "import sys\ndef hook(*_): raise ValueError\nsys.excepthook = hook",
        # A thread that hangs holds the lock of a handler of logging.
        "import logging, threading, time\nhandler = logging.StreamHandler()\n"
        "def hold():\n    with handler.lock: time.sleep(600)\n"
        "threading.Thread(target=hold, daemon=True).start(); time.sleep(0.2)",
    ],
    ids=["plain", "no stdout", "a hook that raises", "a lock that is held"],
)
def test_the_process_ends_whatever_holds_it(before: str) -> None:
    script = f"{before}\n{LEAVE}end_process(ValueError('gone'))\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert ("ValueError: gone" in done.stderr) == ("hook" not in before)
