"""What makes a rank fail that is not in its code: little memory, a full disk, a network that breaks.

Each gives the environment of a job, or says why it can't be made on this machine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
ADDRESSES = ("10.78.0.1", "10.78.0.2")


class ImpossibleError(Exception):
    """This machine does not allow it."""


@contextmanager
def little_memory(mebibytes: int) -> Iterator[dict[str, str]]:
    """Make a control group (version 1 or 2), and name it in FAULTS_GROUP."""
    parent = GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS
    group = parent / f"lockstep-faults-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.max" if (GROUPS / "cgroup.controllers").exists() else "memory.limit_in_bytes")
        limit.write_text(str(mebibytes * 2**20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise ImpossibleError(f"no control group with a limit of memory: {error}") from None
    try:
        yield {"FAULTS_GROUP": str(group)}
    finally:
        group.rmdir()


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[dict[str, str]]:
    """Mount a disk in memory, and name it in DISK."""
    folder.mkdir()
    _do("mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "lockstep-faults", str(folder))
    try:
        yield {"DISK": str(folder)}
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def two_hosts() -> Iterator[list[Sequence[str]]]:
    """Make two network namespaces with a cable between them; yield the words that begin a command on each of them."""
    names = [f"lockstep-faults-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _do("ip", "-n", name, "link", "set", device, "up")
        # A host has a name of its own, as torch's and lockstep's messages say it.
        named = [("unshare", "--uts", "sh", "-c", f'hostname host{number}; exec "$@"', "sh") for number in range(2)]
        yield [("ip", "netns", "exec", name, *words) for name, words in zip(names, named, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _do(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImpossibleError(f"`{' '.join(words)}` fails: {getattr(error, 'stderr', '') or error}".strip()) from None
