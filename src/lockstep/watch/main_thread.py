"""Where the main thread of a rank is, as the watch tells it to others."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from types import FrameType

import torch

from lockstep.calls import short_path
from lockstep.watch.board import State

_FRAMES = 6
_LOCKSTEP = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, _LOCKSTEP + os.sep)
_FOLDERS = tuple(os.path.join(_LOCKSTEP, room, "") for room in ("dist", "transport", "watch"))
# Where torch's collectives and backward passes, and lockstep's collectives, wait for other ranks.
_WAITING = (
    os.path.join("torch", "distributed") + os.sep,
    os.path.join("torch", "autograd") + os.sep,
    os.path.join("torch", "nn", "parallel") + os.sep,
    *_FOLDERS,
    *map(short_path, _FOLDERS),
)


def frame_of_main_thread() -> FrameType | None:
    """Return the frame that the main thread runs, or None if there is none."""
    # Up to Python 3.11, a garbage collection may begin inside of this call, which holds a lock on the list of threads.
    # If that ends an object whose end lets another thread run, as a data loader's does that joins its workers, all wait
    # for ever (seen on 3.11.7).
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if collects:
            gc.enable()


def stack_of_main_thread() -> list[str]:
    """Return the innermost frames of the main thread, the innermost first; those of libraries are left out."""
    frame = frame_of_main_thread()
    if frame is None:
        return []
    frames = [(one.filename, one.lineno, one.name) for one in traceback.extract_stack(frame)]
    innermost = frames[-1]
    own = [one for one in frames if not one[0].startswith((*_LIBRARIES, "<frozen"))]
    shown = own[-_FRAMES:]
    if innermost not in shown:
        shown.append(innermost)
    return [f'File "{short_path(file)}", line {line}, in {function}' for file, line, function in reversed(shown)]


def is_waiting(state: State | None) -> bool:
    """Return whether a rank's main thread is where torch or lockstep wait for other ranks, or has waited in vain."""
    if state is not None and state["looks"]:
        return True
    return state is not None and bool(state["stack"]) and any(name in state["stack"][0] for name in _WAITING)
