"""Lines for the person who started a job, on stderr, and Ctrl-C during the import of torch, which takes seconds."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.masking import printable


def say(text: str) -> None:
    """Print a line, marked as lockstep's."""
    print(f"lockstep: {printable(text)}", file=sys.stderr, flush=True)


@contextmanager
def loading_torch(text: str | None = None) -> Iterator[None]:
    """Print a line before a block that imports torch, and let Ctrl-C interrupt only after the block.

    A `KeyboardInterrupt` inside torch's C++ initialization is lost or aborts the process (torch 2.13). A second Ctrl-C
    does not wait. If torch has been imported already, this does nothing; outside the main thread, or where SIGINT has
    another handler than Python's, it only prints the line.

    Args:
        text: the line; None prints none.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed in the block.
    """
    if "torch" in sys.modules:
        yield
        return
    if text is not None:
        say(text)
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if interrupted:
        raise KeyboardInterrupt
