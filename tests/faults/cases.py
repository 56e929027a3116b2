"""The faults: where one rank fails and how, what the errors of the others say, and what the launcher says first."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from .running import Raised

SHORT = 2.0  # seconds: the timeout where ranks wait for one that does not come
STEPS = 5.0  # the same where they train before: on a loaded machine that takes a while
TO_BEGIN = 10.0  # the same where many ranks begin on two cores
_CALL = r"call \d+, all_reduce\(float32\[100000\], sum\) at \S*job\.py:\d+"
_TORCH = r"a collective of torch's own"
_WHO = "of the default group"


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        place: a key of `job.PLACES`.
        fault: a key of `job.FAULTS`.
        error: a pattern: the error of each other rank.
        says: what the launcher says first; `{pid}` is the process that fails.
        code: the exit code of the launcher.
        then: a pattern: what else the launcher says.
        timeout: the timeout of collectives, in seconds.
        failing: the rank that fails.
    """

    place: str
    fault: str
    error: str
    says: str
    code: int = 1
    then: str = ""
    timeout: float = 30.0
    failing: int = 1

    @property
    def id(self) -> str:
        """Its name in the tests."""
        return f"{self.fault} in {self.place}"

    @property
    def words(self) -> tuple[str, str, str]:
        """Arguments of `job.py`."""
        return self.place, self.fault, str(self.timeout)

    def is_told_by(self, raised: Raised | None) -> bool:
        """Return whether another rank's error is the right one."""
        return raised is not None and re.match(self.error, f"{raised.kind}: {raised.text}") is not None

    def is_said_by(self, message: str, pids: dict[int, int]) -> bool:
        """Return whether the launcher's first line names the rank, and how it failed."""
        first = self.says.format(pid=pids[self.failing])
        return message.startswith(f"rank {self.failing} {first}") and re.search(self.then, message) is not None


def gone(during: str = _CALL, then: str = "is gone", rank: int = 1) -> str:
    """Return a pattern for a `PeerError`."""
    lost = "ended or lost the connection during"
    return rf"PeerError: rank {rank} {_WHO} \(\d+\) {lost} {during}.*(.|\n)*  rank {rank}: {then}"


def late(of: str = _CALL, then: str = r"last call \d+(.|\n)* now in\n +File") -> str:
    """Return a pattern for a `CollectiveTimeoutError`."""
    return rf"CollectiveTimeoutError: rank 1 {_WHO} \(\d+\) did not take part in {of}.* in time (.|\n)*  rank 1: {then}"


IN_WORKER = r"has ended with ValueError: Caught ValueError in DataLoader worker process 0"
BOOM = r"has ended with ValueError: boom"
STOPPED = r"does not answer, because it is stopped \(process \d+ on "
LEFT = r"CollectiveMismatchError: (.|\n)*\n +rank 1: has ended, after barrier\(\) at \S*job\.py:\d+"
IN_LOOP = r"(last call|no call)(.|\n)* now in\n +File \"\S*job\.py\", line \d+, in loop_for_ever"
OF_MEMORY = "the kernel has killed" if Path("/proc/vmstat").exists() else "run out of memory"
BY_WHOM = "Where nobody else did, the machine may have run out of memory"
WAITED = r"After it: rank \d(.|\n)* at job\.py:\d+"  # where the others waited

RAISED = "raised ValueError (pid {pid})"
DIFFERS = "raised CollectiveMismatchError (pid {pid})"
LEFT_EARLY = "exited with code 0 (pid {pid}) while other ranks went on"
KILLED = "was ended by SIGKILL (pid {pid})"
RUNS = "was still running (pid {pid}"

IN_A_COLLECTIVE = [
    Case("all_reduce", "raises", gone(then=BOOM), RAISED, then="ValueError: boom"),
    Case("all_reduce", "raises and ends slowly", gone(then=BOOM), RAISED, then="ValueError: boom"),
    Case("all_reduce", "leaves its group", LEFT, DIFFERS, then="  rank 1: has ended, after barrier"),
    Case("all_reduce", "exits with 3", LEFT, "exited with code 3 (pid {pid})", 3),
    Case("all_reduce", "exits with 0", LEFT, LEFT_EARLY, then="  rank 1: has ended, after barrier"),
    Case("all_reduce", "os._exit(0)", gone(), LEFT_EARLY, then=WAITED),
    Case("all_reduce", "aborts", gone(), "was ended by SIGABRT (pid {pid})", 134),
    Case("all_reduce", "SIGKILL", gone(), KILLED, 137, BY_WHOM),
    Case("all_reduce", "SIGTERM", gone(), "was ended by SIGTERM (pid {pid})", 143),
    Case("all_reduce", "SIGSTOP", late(then=STOPPED), "was stopped (SIGSTOP, pid {pid})", 1, WAITED, SHORT),
    Case("all_reduce", "endless loop", late(), RUNS, 1, rf"in loop_for_ever\n(.|\n)*{WAITED}", SHORT),
    Case("all_reduce", "deaf to SIGTERM", late(), RUNS, 1, "so the launcher killed it", SHORT),
]
OF_MANY = [
    replace(next(case for case in IN_A_COLLECTIVE if case.fault == fault), timeout=TO_BEGIN)
    for fault in ("SIGKILL", "SIGSTOP")
]
ON_A_DEVICE = [
    Case("a call on a device", "raises", gone(then=BOOM), RAISED, then="ValueError: boom"),
    Case("a call on a device", "SIGKILL", gone(), KILLED, 137),
    Case("a call on a device", "SIGSTOP", late(then=STOPPED), "was stopped (SIGSTOP, pid {pid})", 1, WAITED, SHORT),
    Case(
        "a call on a device",
        "endless loop",
        late(),
        RUNS,
        1,
        rf"in loop_for_ever\n(.|\n)*{WAITED}",
        SHORT,
    ),
]
IN_A_SCRIPT_WITHOUT_LOCKSTEP = [
    Case("a script without lockstep", one.fault, "", one.says, one.code, timeout=one.timeout)
    for one in IN_A_COLLECTIVE
    if one.fault in ("raises and ends slowly", "os._exit(0)", "SIGKILL", "SIGSTOP", "endless loop")
]
IN_BACKWARD = [
    case
    for place in ("DDP's backward pass", "FSDP's backward pass")
    for case in (
        Case(place, "raises", gone(_TORCH, BOOM), RAISED),
        Case(place, "SIGKILL", gone(_TORCH), KILLED, 137),
        Case(place, "SIGSTOP", late(_TORCH, STOPPED), "was stopped (SIGSTOP, pid {pid})", timeout=STEPS),
        Case(place, "endless loop", late(_TORCH, IN_LOOP), RUNS, timeout=STEPS),
    )
]
_ANY = "(a collective of torch's own|call )"
IN_A_TRAINING = [
    Case("worker of a data loader", "raises", gone(_ANY, IN_WORKER), RAISED, then="in DataLoader worker process 0"),
    Case(
        "worker of a data loader",
        "SIGKILL",
        gone(_ANY, r".*(is killed by signal: Killed|exited unexpectedly|ConnectionResetError)"),
        "raised ",
    ),
    Case(
        "worker of a data loader",
        "endless loop",
        late(_ANY, r"(.|\n)*queues\.py\", line \d+, in get"),
        RUNS,
        timeout=STEPS,
    ),
    Case("hook", "raises", gone(_ANY, BOOM), RAISED, then="in AtPlace.after_train_iter"),
    Case("hook", "endless loop", late(_ANY, IN_LOOP), RUNS, timeout=STEPS),
    Case("process of a metric", "raises", gone(_ANY, BOOM), RAISED),
    Case(
        "compute_metrics", "raises", r"PeerError: rank 0 of \d could not take part: ValueError: boom", RAISED, failing=0
    ),
    Case("save", "raises", gone(_ANY, BOOM), RAISED),
    Case("save", "SIGKILL", gone(_ANY), KILLED, 137),
    Case(
        "save",
        "no space for it",
        r"OSError: \[Errno 27\] .* could not be written: rank 1: ",
        "raised OSError (pid {pid})",
    ),
]
# Rank 1 makes another call than the others: what the errors show of it, and of them.
CALLS = {
    "op": (r"all_reduce\(float32\[40\], max\)", r"all_reduce\(float32\[40\], sum\)"),
    "small-op": (r"all_reduce\(float32\[1\], max\)", r"all_reduce\(float32\[1\], sum\)"),
    "dtype": (r"all_reduce\(int32\[40\], sum\)", r"all_reduce\(float32\[40\], sum\)"),
    "shape": (r"all_reduce\(float32\[41\], sum\)", r"all_reduce\(float32\[40\], sum\)"),
    "small-shape": (r"all_reduce\(float32\[3\], sum\)", r"all_reduce\(float32\[2\], sum\)"),
    "broadcast-shape": (r"broadcast\(float32\[2, 20\], 0\)", r"broadcast\(float32\[40\], 0\)"),
    "root": (r"broadcast\(float32\[40\], 1\)", r"broadcast\(float32\[40\], 0\)"),
    "order": (r"broadcast\(float32\[40\], 0\)", r"all_reduce\(float32\[40\], sum\)"),
    "left-out": (r"broadcast\(float32\[40\], 0\)", r"all_reduce\(float32\[40\], sum\)"),
    "last-left-out": (r"has ended, after all_reduce\(float32\[40\], max\)", r"all_reduce\(float32\[40\], sum\)"),
    "keys": (r"'b': int64\[\]", r"'a': int64\[\]"),
    "gather": (r"gather\(0\)", r"all_gather\(\)"),
    "first": (r"main_process_first\(\)", r"all_reduce\(float32\[40\], sum\)"),
}
# The same of calls that all ranks have made before, so that no mode compares them as new ones.
KNOWN_CALLS = {
    "middle-shape": (r"all_reduce\(float32\[3000\], sum\)", r"all_reduce\(float32\[2000\], sum\)"),
    "sizes": (r"all_reduce\(float32\[2000\], sum\)", r"all_reduce\(float32\[40\], sum\)"),
    "large-shape": (r"all_reduce\(float32\[50000\], sum\)", r"all_reduce\(float32\[40000\], sum\)"),
    "large-op": (r"all_reduce\(float32\[40000\], max\)", r"all_reduce\(float32\[40000\], sum\)"),
    "large-and-small": (r"all_reduce\(float32\[40000\], sum\)", r"all_reduce\(float32\[40\], sum\)"),
    "large-broadcast-shape": (r"broadcast\(float32\[50000\], 0\)", r"broadcast\(float32\[40000\], 0\)"),
    "large-root": (r"broadcast\(float32\[40000\], 1\)", r"broadcast\(float32\[40000\], 0\)"),
    "params": (
        r"all_reduce_params\(sum, float32\[40003\]\)",
        r"all_reduce_params\(sum, float32\[40004\]\)",
    ),
    "async-shape": (r"all_reduce\(float32\[50000\], sum, async\)", r"all_reduce\(float32\[40000\], sum, async\)"),
    "async-largest-shape": (
        r"all_reduce\(float32\[1200000\], sum, async\)",
        r"all_reduce\(float32\[1100000\], sum, async\)",
    ),
    "async-broadcast-shape": (r"broadcast\(float32\[50000\], 1, async\)", r"broadcast\(float32\[40000\], 1, async\)"),
    "largest-broadcast-shape": (r"broadcast\(float32\[1200000\], 0\)", r"broadcast\(float32\[1100000\], 0\)"),
    "large-reduce-shape": (r"reduce\(float32\[50000\], sum, 1\)", r"reduce\(float32\[40000\], sum, 1\)"),
    "large-reduce-scatter-shape": (
        r"reduce_scatter\(float32\[30000\], .*\)",
        r"reduce_scatter\(float32\[25000\], .*\)",
    ),
    "reduce-or-broadcast": (r"reduce\(float32\[40000\], sum, 1\)", r"broadcast\(float32\[40000\], 1\)"),
    "reduce-shape": (r"reduce\(float32\[3\], sum, 0\)", r"reduce\(float32\[2\], sum, 0\)"),
    "reduce-root": (r"reduce\(float32\[2\], sum, 1\)", r"reduce\(float32\[2\], sum, 0\)"),
    "reduce-scatter-shape": (r"reduce_scatter\(float32\[3\], .*\)", r"reduce_scatter\(float32\[2\], .*\)"),
    "barrier": (r"barrier\(\)", r"all_reduce\(float32\[40\], sum\)"),
    "to-all": (r"all_to_all\(float32\)", r"all_gather\(\)"),
}

# Where gloo ends a process with SIGABRT, if nothing has compared the calls before: a message is longer than expected.
OTHER_SIZES = frozenset(
    name for name in CALLS | KNOWN_CALLS if name in ("shape", "sizes", "large-and-small", "params") or "-shape" in name
) - {"small-shape", "broadcast-shape", "reduce-shape"}


def shows(text: str, case: str, ones: str = "1", others: str = "0[0-9, -]*") -> bool:
    """Return whether an error shows a key of `CALLS` or `KNOWN_CALLS`: the calls of all ranks, and their lines.

    Args:
        text: of the error.
        case: the key.
        ones: a pattern: the ranks that make the first call.
        others: a pattern: the other ranks.
    """
    of_one, of_others = (CALLS | KNOWN_CALLS)[case]
    return all(
        re.search(rf"\n(\[rank\d\]: )? +ranks? {who}: {call} at \S*mismatch\.py:\d+", text)
        for who, call in ((ones, of_one), (others, of_others))
    )


class CallsDiffer(Case):
    """Rank 1 makes another call."""

    def is_told_by(self, raised: Raised | None) -> bool:
        """Return whether a rank's error shows the calls."""
        return raised is not None and raised.kind == "CollectiveMismatchError" and shows(raised.text, self.fault)


IN_CALLS = [CallsDiffer("calls", name, "", DIFFERS) for name in CALLS]
# Rank 1 calls torch's own all_reduce, which lockstep does not see: the others wait for it, and it for them.
_OWN = r"(has ended with RuntimeError: .* Timed out|last call 60, (.|\n)* now in\n +File \"\S*mismatch\.py\", line \d+)"
_LATE = r"(PeerError|CollectiveTimeoutError): rank 1 .* call 61, all_reduce\(float32\[4000\], sum\) at "
_TORCHS = rf"{_LATE}(.|\n)*  rank 1: {_OWN}"
OF_TORCH = Case("calls", "torch's all_reduce", _TORCHS, "", timeout=SHORT)
