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

from lockstep.errors import LaunchError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ESCAPES = "backslashreplace"
_FAILING = ("strict", "surrogateescape", "surrogatepass")  # what Python chooses by itself, too, and may raise an error


class _Lossy(io.FileIO):
    """A file that drops what can't be written.

    Attributes:
        error: why something was dropped, the last time; None if all was written.
    """

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        view, written = memoryview(data).cast("B"), 0
        try:
            while written < len(view):  # of a pipe that somebody has set to not block, it may be a part, or nothing
                part = super().write(view[written:])
                if part is None:
                    select.select([], [self], [])
                written += part or 0
        except OSError as error:
            self.error = error
        return len(view)


def tolerate_closed_output() -> None:
    """Let `sys.stdout` and `sys.stderr` drop what can't be written, and escape what their encoding lacks.

    Streams that somebody has put in their place, as pytest and notebooks do, stay as they are; so does what somebody
    has chosen for letters that the encoding lacks (`PYTHONIOENCODING=ascii:replace`).
    """
    try:
        os.fstat(0)
    except OSError:
        _open_null_device()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        is_own = stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper)
        if stream is None or (is_own and stream.closed):  # when the interpreter started, or by the script
            setattr(sys, name, _stream(name, _open_null_device()))
        elif is_own:
            with suppress(OSError):
                stream.flush()
            is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
            errors = _ESCAPES if stream.errors in _FAILING else stream.errors
            setattr(sys, name, _stream(name, number, stream.encoding, errors, stream.line_buffering, is_unbuffered))


def write_output_to(path: str | os.PathLike[str]) -> None:
    """Append standard output and error, also of C libraries, to one file, whose folder is made if it is not there."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if file in (1, 2):  # which was closed
        os.set_inheritable(file, True)
    else:
        os.close(file)


def require_shown() -> None:
    """Raise a `LaunchError` if something on standard output was dropped, unless its reader has gone by choice."""
    print(end="", flush=True)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", getattr(sys.stdout, "buffer", None))
    error = raw.error if isinstance(raw, _Lossy) else None
    if error is not None and not isinstance(error, BrokenPipeError):
        raise LaunchError(f"standard output must take what is printed, but does not: {error.strerror}") from error


def _stream(
    name: str,
    number: int,
    encoding: str = "utf-8",
    errors: str | None = _ESCAPES,
    line_buffering: bool = False,
    is_unbuffered: bool = False,
) -> io.TextIOWrapper:
    raw = _Lossy(number, "wb", closefd=False)
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding,
        errors,
        line_buffering=line_buffering,
        write_through=is_unbuffered,
    )
    vars(stream)["mode"] = "w"  # Python, too, gives its streams this attribute
    return stream


def _open_null_device() -> int:
    """Open the null device, and return its descriptor, the lowest free one: the one that was closed, if that still is.

    A standard descriptor must not stay closed: the next file to be opened would get its number, and what a library in C
    prints would be written into that file.
    """
    number = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(number, True)
    return number
