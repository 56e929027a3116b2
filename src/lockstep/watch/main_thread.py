"""Where the main thread of a rank is, as the watch tells it to others."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Sequence
from itertools import accumulate, chain, islice, repeat
from operator import attrgetter, itemgetter
from types import CodeType
from typing import TypeAlias

from lockstep.calls import owner_of, short_path
from lockstep.watch.board import State

_FRAMES = 6
_PYTHON = os.path.dirname(os.__file__) + os.sep
_LOCKSTEP = os.path.dirname(os.path.dirname(__file__))
_FOLDERS = tuple(os.path.join(_LOCKSTEP, room, "") for room in ("dist", "transport", "watch"))
# Where torch's collectives and backward passes, and lockstep's collectives, wait for other ranks.
_WAITING = (
    os.path.join("torch", "distributed") + os.sep,
    os.path.join("torch", "autograd") + os.sep,
    os.path.join("torch", "nn", "parallel") + os.sep,
    *_FOLDERS,
    *map(short_path, _FOLDERS),
)
_WRITING = os.path.join("torch", "distributed", "checkpoint") + os.sep  # works there, or waits for a disk


# The code of a function, the instruction that it is at, and the line of that; None if it has none.
Frame: TypeAlias = tuple[CodeType, int, int | None]


def frames_of_main_thread() -> list[Frame]:
    """Return the functions that the main thread is in, the innermost first; none if it has ended.

    No other thread runs meanwhile, and no frame of Python's is kept: a thread that holds one while the main thread
    leaves the function is the one that ends its local variables. Guards among them that switch torch for a block, as
    printing a tensor uses, would then switch the main thread in the middle of an operation (torch 2.13: "Attempted to
    make a tensor into a differentiable view, but the tensor already had autograd metadata").
    """
    # Up to Python 3.11, a garbage collection may begin inside of this call, which holds a lock on the list of threads.
    # If that ends an object whose end lets another thread run, as a data loader's does that joins its workers, all wait
    # for ever (seen on 3.11.7).
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    found: list[Frame] = []
    try:
        innermost = map(itemgetter(threading.main_thread().ident), iter(sys._current_frames, None))
        stack = accumulate(chain(islice(innermost, 1), repeat("f_back")), getattr)
        # One call of C from the first frame to the last, which it leaves by an error: the outermost has no `f_back`.
        found.extend(map(attrgetter("f_code", "f_lasti", "f_lineno"), stack))
    except (AttributeError, KeyError):
        pass
    finally:
        if collects:
            gc.enable()
    return found


def stack_of_main_thread() -> list[str]:
    """Return the innermost frames of the main thread, the innermost first; those of libraries are left out."""
    frames = frames_of_main_thread()
    own = [one for one in frames if owner_of(one[0].co_filename) == "caller"]
    shown = own[:_FRAMES]
    if frames and frames[0] not in shown:
        shown.insert(0, frames[0])
    return [f'File "{short_path(code.co_filename)}", line {line}, in {code.co_name}' for code, _, line in shown]


def is_waiting(state: State) -> bool:
    """Return whether a rank's main thread is where torch or lockstep wait for other ranks, or has waited in vain."""
    return state["looks"] or any(map(_waits_at, state["stack"][:1]))


def is_in_own_code(frames: Sequence[Frame]) -> bool:
    """Return whether a thread is in the user's own code, or in modules of Python's that this has called."""
    files = (code.co_filename for code, _, _ in frames)
    innermost = next((file for file in files if not file.startswith(("<", _PYTHON)) or "-packages" in file), None)
    return innermost is not None and not _waits_at(innermost)


def _waits_at(place: str) -> bool:
    return any(name in place for name in _WAITING) and _WRITING not in place
