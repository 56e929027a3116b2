"""One rank: runs a script or a module as `python` would, on behalf of the agent that started it.

```
python -m lockstep.launch.worker --agent PID [--log-dir DIR] -- (SCRIPT | -m MODULE) [ARGS...]
```

What it adds to `python SCRIPT`:

- It dies with its agent, even where that is killed by SIGKILL.
- With ``--log-dir``, all local ranks but the first write to files there.
- What it prints appears line by line, and never mixes within a line with what other ranks print.
- An error that ends the script is written to the file that the agent reads (``TORCHELASTIC_ERROR_FILE``, in torch's
  format), instead of to a terminal where the tracebacks of all ranks would mix.

It does not import torch, so that the script can still set variables which torch reads when it is imported.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from lockstep.errors import INPUT_ERRORS

_OUTER_PACKAGES = {"lockstep", "lockstep.cli", "lockstep.launch", "typer", "typer._click"}
_SECONDS_TO_CLEAN_UP = 10
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Run what `argv` names, and leave the process with its exit code."""
    options, target = _parse(argv)
    _die_with(options.agent)
    if options.log_dir is not None and os.environ["LOCAL_RANK"] != "0":
        _write_output_to(rank_log(options.log_dir, os.environ["RANK"]))
    _write_by_lines()
    faulthandler.enable()
    try:
        _run(target)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if error.code not in (None, 0):
            _record(error)
        raise
    except Exception as error:
        if not _record(error):
            raise
        if options.log_dir is not None and os.environ["LOCAL_RANK"] != "0":
            traceback.print_exception(error)
        # The agent acts when this process has ended. Do not let it wait for a clean-up that waits for other ranks.
        timer = threading.Timer(_SECONDS_TO_CLEAN_UP, os._exit, [1])
        timer.daemon = True
        timer.start()
        sys.exit(1)


def rank_log(log_dir: str | Path, rank: int | str) -> Path:
    """Return the file to which a rank writes."""
    return Path(log_dir) / f"rank_{rank}.log"


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="lockstep.launch.worker")
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--log-dir")
    end = argv.index("--")
    return parser.parse_args(argv[:end]), argv[end + 1 :]


def _die_with(agent: int) -> None:
    """Have the kernel kill this process when the agent is no more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != agent:  # it died before the kernel was asked
        sys.exit(1)


def _write_output_to(path: Path) -> None:
    """Append standard output and error, of C libraries too, to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _write_by_lines() -> None:
    """Let a line leave at once and in one piece: unbuffered, `print` writes every word by itself."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _run(target: list[str]) -> None:
    if target[0] == "-m":
        sys.argv = target[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = target
        sys.path[0] = str(Path(target[0]).resolve().parent)
        runpy.run_path(target[0], run_name="__main__")


def _record(error: BaseException) -> bool:
    """Write an error to the agent's file; say whether there is one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now = time.time()
    shown = None if isinstance(error, (SystemExit, *INPUT_ERRORS)) else _own_frames(error.__traceback__)
    lines = traceback.format_exception(error.with_traceback(shown))
    kind = type(error).__name__
    extra = {"py_callstack": "".join(lines), "timestamp": str(int(now)), "time": now, "type": kind}
    report = {"message": f"{kind}: {error}", "extraInfo": extra}
    draft = Path(f"{path}.{os.getpid()}")  # the agent may be looking
    draft.write_text(json.dumps({"message": report}))
    draft.replace(path)
    return True


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames that come before the user's script, or before the work of a lockstep command."""
    while trace is not None and trace.tb_next is not None:
        module = trace.tb_frame.f_globals
        if module.get("__package__") not in _OUTER_PACKAGES and module.get("__name__") != "runpy":
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
