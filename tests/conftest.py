"""What holds for the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

# A shell starts what runs in the background with Ctrl-C ignored, which the jobs that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a property may start a pool of ranks, which no deadline per example should have to allow for.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")

# pytest changes its own between the phases of a test, torch and scikit-learn set theirs when they are first imported.
_SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "TRITON_", "KMP_")


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that lives as long as the session: torch, and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves environment variables changed or threads running (ranks check themselves)."""
    variables, threads = _variables(), _threads()
    yield
    assert _variables() == variables
    deadline = time.monotonic() + 1
    while (left := _threads() - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def _threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name != "lockstep-data"}  # which an error may keep


def _variables() -> dict[str, str]:
    return {n: value for n, value in os.environ.items() if not n.startswith(_SET_BY_LIBRARIES)}
