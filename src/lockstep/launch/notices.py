"""Lines for the person who started a job, on stderr, among them one before the import of torch, which takes seconds."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from types import FrameType

from lockstep.masking import printable


def say(text: str) -> None:
    """Print a line, marked as lockstep's."""
    print(f"lockstep: {printable(text)}", file=sys.stderr, flush=True)


@contextmanager
def loading_torch(text: str | None = None) -> Iterator[None]:
    """Print a line as soon as something within this block imports torch, and let Ctrl-C interrupt only after the block.

    A timer could not print the line: while the shared libraries load, no other thread can run. A `KeyboardInterrupt`
    inside torch's C++ initialization is lost or aborts the process (torch 2.13). A second Ctrl-C does not wait. If
    torch has been imported already, the block does nothing.

    Args:
        text: the line; None prints none.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed in the block.
    """
    if "torch" in sys.modules:
        yield
        return
    finder = _BeforeTorch(text)
    sys.meta_path.insert(0, finder)
    try:
        with _interrupted_afterwards():
            yield
    finally:
        finder.remove()


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
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


class _BeforeTorch(MetaPathFinder):
    """Finds no module, but is asked for each."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torch":
            self.remove()
            if self._text is not None:
                say(self._text)

    def remove(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)
