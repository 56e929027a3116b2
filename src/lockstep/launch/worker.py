"""The process of one rank: runs a script or a module as `python` does, for the agent that started it; or a function.

```
python -m lockstep.launch.worker AGENT_PID LOG_DIR (SCRIPT | -m MODULE | --function) [ARGS...]
```

What it adds to `python SCRIPT`:

- It ends with its agent, even if the agent is killed by SIGKILL (on Linux).
- If LOG_DIR is not empty, all local ranks except 0 write their output to files there.
- Output appears line by line, and lines of several ranks do not mix.
- An error that ends the script is written to the file that the agent reads (``TORCHELASTIC_ERROR_FILE``, in torch's
  format), instead of to a terminal where the tracebacks of all ranks would mix. The report says whether the error only
  follows the failure of another rank.
- So is an error that lockstep raises when the process ends, because the ranks have made different calls.
- At a signal of the agent (`STACK_SIGNAL`) it writes where it is, even if it hangs.
- It makes a file (`TRAINED_FILE`) when its training has completed an iteration: a signal before that leaves nothing to
  save.

It does not import torch, so that the script can still set variables that torch reads when it is imported.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import faulthandler
import io
import json
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Literal

from lockstep.errors import (
    INPUT_ERRORS,
    PEER_IS_GONE,
    CollectiveTimeoutError,
    PeerError,
    Preempted,
    error_in_words,
    message_of,
    place_of,
    with_causes,
)
from lockstep.launch.job import FUNCTION
from lockstep.location import is_of_disk
from lockstep.masking import mask_text, printable
from lockstep.output import tolerate_closed_output, write_output_to
from lockstep.topology.environ import LEFT_FILE

# Their frames come before those of the user's script in a traceback, which leaves them out.
_OUTER_PACKAGES = {"lockstep", "lockstep.cli", "lockstep.launch", "typer", "typer._click", "click"}
# Parts of torch's messages when another rank does not come in time, in a script that does not use lockstep.
_TIMEOUT_MESSAGES = ("Timed out waiting", "wait timeout after")
_MOST_SHOWN = 20_000  # characters of the beginning of a traceback, and as many of its end
_TRACEBACK = "Traceback (most recent call last):\n"
_PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGRTMAX if sys.platform == "linux" else None
"""At this signal a rank writes its stack to `stack_file`."""
TRAINED_FILE = "LOCKSTEP_TRAINED_FILE"
"""Variable that names a file: it is there when a rank has completed an iteration."""
FAILING_FILE = "LOCKSTEP_FAILING_FILE"
"""Variable that names a file: it is there while the agent ends its ranks because one has failed."""
RESUME_SINCE = "LOCKSTEP_RESUME_SINCE"
"""Variable of ranks of a training that were restarted: when the job began, in seconds since 1970."""
RUNS_FILE = "LOCKSTEP_RUNS_FILE"
"""Variable of ranks of a training that may be restarted: a file with the names of the run folders of their job."""

_has_left = False  # whether the script has ended without an error: what is raised after that is raised at exit


def main(argv: list[str]) -> None:
    """Run the script or module in `argv`, and exit with its exit code."""
    agent, log_dir, *target = argv
    _die_with(int(agent))
    has_log = log_dir != "" and os.environ["LOCAL_RANK"] != "0"
    if has_log:
        write_output_to(rank_log(log_dir, os.environ["RANK"]))
    tolerate_closed_output()
    _buffer_lines()
    faulthandler.enable()
    _write_stack_on_signal()
    sys.excepthook = _record_or_show
    try:
        _run(target)
        _leave()
    except SystemExit as error:
        if error.code not in (None, 0):
            _record(error)
        else:
            _leave()
        if isinstance(error, Preempted):
            end_soon(Preempted.EXIT_CODE)
        raise
    except BaseException as error:
        code = _exit_code(error)
        sys.last_value = error  # what runs at exit then knows that the rank has failed, as without a launcher
        is_interrupt = type(error) is KeyboardInterrupt  # Ctrl-C; a class derived from it is an error of the script's
        if not _record(error) and not is_interrupt:
            raise
        if is_interrupt:
            sys.exit(code)
        if has_log:
            sys.stderr.write(printable(mask_text(_formatted(error))))
        sys.exit(code)


def rank_log(log_dir: str | Path, rank: int | str) -> Path:
    """Return the file to which a rank writes its output."""
    return Path(log_dir) / f"rank_{rank}.log"


def stack_file(error_file: str) -> Path:
    """Return the file to which a rank writes its stack, beside the one for its error."""
    return Path(error_file).with_name("stack")


@cache
def note_trained() -> None:
    """Tell the launcher, if one asks, that this rank has completed an iteration. Further calls do nothing."""
    with suppress(OSError):  # a full disk must not end a training
        if path := os.environ.get(TRAINED_FILE):
            Path(path).touch()


def note_run(name: str) -> None:
    """Tell ranks that may start again in place of this one that a run folder is one of their job."""
    if (path := os.environ.get(RUNS_FILE)) and os.environ.get("LOCAL_RANK") == "0":
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def noted_runs() -> set[str]:
    """Return the names of the run folders that ranks of this job have noted on this node."""
    with suppress(OSError):  # none has
        return set(Path(os.environ.get(RUNS_FILE, "")).read_text(encoding="utf-8").splitlines())
    return set()


def end_soon(code: int) -> None:
    """End as the interpreter does, but without freeing each object, as the processes of `multiprocessing` end.

    Whoever sent a signal does not wait for long, and to free what torch has imported takes 0.5 to 0.9 s of CPU time.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that nothing has caught, as Python does, but without the secrets in it: a `sys.excepthook`."""
    sys.stderr.write(printable(mask_text(_formatted(error.with_traceback(trace)))))


def _leave() -> None:
    """Note that the script has ended without an error, also for ranks that wait for this one to join them."""
    global _has_left
    _has_left = True
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).with_name(LEFT_FILE).touch()


def _die_with(agent: int) -> None:
    """Make the kernel kill this process when the agent ends (Linux); exit if the agent has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != agent:  # it died before the kernel was asked
        sys.exit(1)


def _buffer_lines() -> None:
    """Buffer output by lines: each is written at once and in one piece, also where `python -u` would write words."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _write_stack_on_signal() -> None:
    """Write the stack of the thread that takes it, which is the main thread, to `stack_file` at each `STACK_SIGNAL`.

    Those of other threads would change while they are read: one that runs then ends the process (CPython 3.11.7).
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=stack_file(path).open("w"), all_threads=False)


def _run(target: list[str]) -> None:
    if target[0] == "-m":
        sys.argv = target[1:]
        _import_from(os.getcwd())
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    elif target[0] == FUNCTION:
        sys.argv = target
        _call(Path(os.environ.pop("LOCKSTEP_PAYLOAD")).read_text(encoding="utf-8"))
    else:
        sys.argv = target
        _import_from(str(Path(target[0]).resolve().parent))
        runpy.run_path(target[0], run_name="__main__")


def _import_from(folder: str) -> None:
    """Let modules be imported from a folder as `python` does, in the place of the one that `-m` has put there."""
    if not sys.flags.safe_path:  # else Python has put none there, and a script finds none in its folder
        sys.path[0] = folder


def _call(packed: str) -> None:
    """Call the function that `launch` has packed, in a module `__main__` of its own.

    There pickle finds the classes of a notebook's cells, when ranks send each other objects of them.
    """
    sys.path[:], content = pickle.loads(base64.b64decode(packed))
    sys.modules["__main__"] = module = ModuleType("__main__")
    function = pickle.loads(content)
    vars(module).update(getattr(getattr(function, "func", function), "__globals__", {}))  # `func` of a partial
    function()


def _record(error: BaseException) -> bool:
    """Write an error to the agent's file; return whether the agent has given one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now, kind = time.time(), type(error).__name__
    extra: dict[str, object] = {"timestamp": str(int(now)), "time": now, "type": kind, "exitcode": _exit_code(error)}
    try:
        place, follows, ranks = place_of(error.__traceback__), _follows(error), _failed_ranks(error)
        is_told = _has_left or isinstance(error, (SystemExit, *INPUT_ERRORS)) or is_of_disk(error)
        shown = None if is_told else _without_launcher(error.__traceback__)
        if is_told and isinstance(error.__cause__, OSError):  # which the message repeats
            error.__cause__ = None
        stack, message = mask_text(_formatted(error.with_traceback(shown))), mask_text(error_in_words(error))
        extra |= {
            "py_callstack": stack,
            "follows": follows,
            "place": place,
            "failed_ranks": ranks,
            "at_exit": _has_left,
        }
    except Exception as second:  # an error's attributes may be functions of the user's
        message = f"{kind}, which can't be shown: {type(second).__name__} in {place_of(second.__traceback__)}"
        extra["py_callstack"] = message
    report = {"message": {"message": message, "extraInfo": extra}}  # the form that torchelastic reads
    draft = Path(f"{path}.{os.getpid()}")  # the agent may be reading the file
    draft.write_text(json.dumps(report))
    draft.replace(path)
    return True


def _exit_code(error: BaseException) -> int:
    kind = type(error)  # not `isinstance`, which asks the error for its `__class__`
    if issubclass(kind, SystemExit):
        code: object = getattr(error, "code", None)
        return code & 0xFF if isinstance(code, int) else 1
    return 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1


def _formatted(error: BaseException) -> str:
    """Return an error's traceback; of one that is very long, the beginning and the end.

    The first line of its message is kept as it is. Further lines and notes are indented, so that no text of a message
    can look like a line that the launcher itself has printed.
    """
    parts, in_message = [], False
    for part in traceback.format_exception(error):
        if part[:1] in (" ", "\n") or part == _TRACEBACK:
            in_message = False
            parts.append(part)
        else:
            indent = "    " if in_message else ""
            parts.append(indent + part.rstrip("\n").replace("\n", "\n    ") + "\n")
            in_message = True
    text = "".join(parts)
    more = len(text) - 2 * _MOST_SHOWN
    if more <= 0:
        return text
    return f"{text[:_MOST_SHOWN]}\n... ({more} characters left out) ...\n{text[-_MOST_SHOWN:]}"


def _record_or_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an error that nothing has caught, as at the end of the process, to the agent's file."""
    if not _record(error):
        show_error(kind, error, trace)


def _follows(error: BaseException) -> Literal["gone", "late"] | None:
    """Return "gone" or "late" if an error says only that another rank is gone, or did not come in time.

    The causes of the error are looked at, too. None is an error of this rank's own.
    """
    for behind in with_causes(error):
        text = message_of(behind) if isinstance(behind, RuntimeError) else ""
        if isinstance(behind, CollectiveTimeoutError) or any(words in text for words in _TIMEOUT_MESSAGES):
            return "late"
        if isinstance(behind, PeerError) or any(words in text for words in PEER_IS_GONE):
            return "gone"
        if (ranks := _failed_ranks(behind)) and int(os.environ["RANK"]) not in ranks:
            return "gone"
    return None


def _failed_ranks(error: BaseException | None) -> list[int]:
    """Return the ranks that an error, or its cause, names as those that failed; empty if it names none."""
    for one in (error, None if error is None else error.__cause__):
        ranks = getattr(one, "failed_ranks", ())
        if ranks and isinstance(ranks, tuple):
            return [rank for rank in ranks if isinstance(rank, int)]
    return []


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the launcher and of `runpy`, which come before the user's script."""
    while trace is not None and trace.tb_next is not None:
        module = trace.tb_frame.f_globals
        if module.get("__package__") not in _OUTER_PACKAGES and module.get("__name__") != "runpy":
            break
        trace = trace.tb_next
    # Only frames of runpy are left: the script has a syntax error, or the module does not exist.
    return None if trace is not None and trace.tb_frame.f_globals.get("__name__") == "runpy" else trace


if __name__ == "__main__":
    main(sys.argv[1:])
