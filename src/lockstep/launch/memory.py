"""Whether the kernel has killed processes for lack of memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class MemoryKills:
    """How many processes the kernel has killed for lack of memory since this was made."""

    def __init__(self) -> None:
        self._before = _counts()

    def describe(self) -> str:
        """Return what is known about the cause of a SIGKILL that the launcher did not send."""
        kills = [count - self._before[path] for path, count in _counts().items() if path in self._before]
        if not kills:
            return "The launcher did not send it. Where nobody else did, the machine may have run out of memory."
        if max(kills) > 0:
            return (
                f"The machine, or the job's share of it, ran out of memory: the kernel has killed {max(kills)} of its "
                "processes meanwhile. Try a smaller batch, fewer data loader workers, or more memory."
            )
        return "The launcher did not send it, nor did the kernel for lack of memory: somebody else did."


def _counts() -> dict[Path, int]:
    """Return how often the kernel has killed for lack of memory: in this control group, and on the machine."""
    found = {}
    for path in (_PROC / "vmstat", *_of_control_group()):
        with suppress(OSError, ValueError, StopIteration):
            lines = path.read_text().splitlines()
            found[path] = next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return found


def _of_control_group() -> list[Path]:
    """Return the files that count the kills in this process's control group, of version 1 or 2."""
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if controllers == "memory":
                return [_CGROUPS / "memory" / below / "memory.oom_control"]
            if not controllers and (_CGROUPS / below / "memory.events").exists():
                return [_CGROUPS / below / "memory.events"]
    return []
