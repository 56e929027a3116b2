"""Standard output and error of this process, made so that a failed write to them does not end a training.

A write fails where a disk is full, a terminal or the reader of a pipe is gone, a stream was closed from the start, or
the locale lacks the letters of a name. A training goes on without what can't be shown.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lossy(io.FileIO):
    """A file that drops what can't be written."""

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            while (written := super().write(data)) is None:  # the other end of a pipe has set it to not block
                select.select([], [self], [])
            return written
        return memoryview(data).nbytes


def tolerate_closed_output() -> None:
    """Let `sys.stdout` and `sys.stderr` drop what can't be written, and escape what their encoding lacks.

    Streams that somebody has put in their place, as pytest and notebooks do, stay as they are.
    """
    if not _is_open(0):
        _open_null_device(0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when the interpreter started
            setattr(sys, name, _stream(_open_null_device(number)))
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):
                stream.flush()
            is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
            setattr(sys, name, _stream(number, stream.encoding, stream.line_buffering, is_unbuffered))


def _stream(
    number: int, encoding: str = "utf-8", line_buffering: bool = False, is_unbuffered: bool = False
) -> io.TextIOWrapper:
    raw = _Lossy(number, "wb", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding,
        "backslashreplace",
        line_buffering=line_buffering,
        write_through=is_unbuffered,
    )


def _open_null_device(number: int) -> int:
    """Open the null device, and return its descriptor: `number`, if that is closed.

    A standard descriptor must not stay closed: the next file to be opened would get its number, and what a library in C
    prints would be written into that file.
    """
    was_open = _is_open(number)
    nowhere = os.open(os.devnull, os.O_RDWR)
    if was_open:  # another file has got its number meanwhile
        return nowhere
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)
    return number


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
