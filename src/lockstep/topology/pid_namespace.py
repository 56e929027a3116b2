"""Where the number of a process is known, a host or a container on it; what Linux says of it; which machine that is."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_FIRST_OF_A_HOST = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux


def pid_namespace() -> str:
    """Return the name of this host; in a container with processes of its own, also the number of their namespace.

    Containers may have the name of their host, as with its network (`docker run --network host`, `hostNetwork` of
    Kubernetes). Each then numbers its processes from 1, and sees no others.
    """
    name = socket.gethostname()
    with suppress(OSError):  # only Linux has it
        namespace = os.readlink("/proc/self/ns/pid")
        if namespace != _FIRST_OF_A_HOST:
            return f"{name}.{namespace.removeprefix('pid:[').removesuffix(']')}"
    return name


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: state, parent, group, session ...; none if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def machine() -> str:
    """Return what all containers of this machine have in common, and no other machine has, whatever they are called."""
    with suppress(OSError):  # only Linux has it
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
