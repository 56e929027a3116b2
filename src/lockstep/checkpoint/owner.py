"""Drafts belong to processes: the name of a draft says which process made it, so that others can tell if it has ended.

This module does not import torch.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

DRAFT = re.compile(r"\.(?P<name>.+)\.draft(\.(?P<pid>\d+)\.(?P<began>\d+)\.(?P<host>.+))?")
"""Names of drafts; those of lockstep 0.1.0.dev0 did not name their process."""


def name_of_draft(name: str) -> str:
    """Return the name of the draft that this process makes of a checkpoint."""
    return f".{name}.draft.{os.getpid()}.{_start_of(os.getpid())}.{_host()}"


def is_alive(draft: re.Match[str]) -> bool | None:
    """Return whether the process that made a draft is alive; None if it can't be asked, as it is on another host."""
    if draft["pid"] is None or draft["host"] != _host():
        return None
    return _start_of(int(draft["pid"])) == draft["began"]


def _host() -> str:
    return re.sub(r"[^\w.\-]", "_", socket.gethostname())[:100]


def _start_of(pid: int) -> str | None:
    """Return when a process began, in ticks since the start of the system, to tell it from another of its number.

    None if there is no such process; "0" where the system does not say when it began.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return "0"
    except OSError:
        return None
    state, began = fields[0], fields[19]
    return None if state in "ZX" else began  # dead, but not yet collected by its parent
