"""Processes by their number (PID): among which processes a number is one process, and what Linux says of it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def pid_namespace() -> str:
    """Return a name of the processes that number each other: those of this machine, or of this container.

    Only among processes of one such name does a number mean the same process. The host's name is part of it for people,
    but does not suffice: a container may have the name of its host, as with its network (`docker run --network host`,
    `hostNetwork` of Kubernetes), and machines may have the same name, as copies of one image.
    """
    host = socket.gethostname()
    with suppress(OSError):  # only Linux has it
        number = os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")
        return f"{host}.{machine()[:8]}.{number}"
    return host


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: state, parent, group, session ...; none if it is gone."""
    with suppress(OSError):
        # The field before them is the command in parentheses, which may hold any characters.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def machine() -> str:
    """Return the ID of this machine's boot, the same in all of its containers; elsewhere than on Linux, its name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
