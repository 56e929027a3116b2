"""Lines for the person who started a job, on stderr: stdout belongs to the scripts and to results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder


def say(text: str) -> None:
    """Print a line, marked as lockstep's."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


@contextmanager
def said_before_torch(text: str) -> Iterator[None]:
    """Print a line as soon as something within this block imports torch, which takes seconds; otherwise print nothing.

    A timer would not do: while the shared libraries load, no other thread can run.
    """
    finder = _BeforeTorch(text)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.remove()


class _BeforeTorch(MetaPathFinder):
    """Finds no module, but is asked for each."""

    def __init__(self, text: str) -> None:
        self._text = text

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torch":
            self.remove()
            say(self._text)

    def remove(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)
