"""The failures of a job, in order: which rank caused them, which ranks only followed, and the message about it.

What is known of each rank: the error that it reported, how and when its process ended, whether it is stopped, and which
signals the launcher itself has sent to it. The cause is, in this order:

1. the earliest failure of a rank's own: an error, an exit code, or a signal that the launcher did not send;
2. a rank that is stopped (SIGSTOP) while others wait for it;
3. a rank that exited with code 0 where others missed it;
4. the first error that compares the calls of ranks: it names both lines, also of a rank that ends too slowly to say;
5. a rank that still runs when all others have given up waiting for it.

Of several such ranks, it is the one that most errors of the others name.

An error that only says that another rank is gone, or did not come in time, is a consequence, and so is whatever a rank
does after the launcher has sent it a signal.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import CollectiveMismatchError, Preempted, ranks_in_words
from lockstep.launch.worker import rank_log
from lockstep.masking import printable

# Signals that end a rank from outside, or after a crash. An abort may follow the failure of another rank.
_ABORTED = (
    "On a GPU, torch ends a process by SIGABRT after a kernel has failed, as for a label that is out of range: the "
    "first 'Assertion' or 'CUDA error' above says why, and CUDA_LAUNCH_BLOCKING=1 where. On the CPU, gloo ends one "
    "that gets more bytes than it expects: ranks may have made calls that differ. LOCKSTEP_CHECK=always compares "
    "each call of lockstep's before it runs, and names both lines."
)
_KILLED = "The launcher did not send it. Where nobody else did, the machine may have run out of memory."
_OUT_OF_MEMORY = (
    "A lack of memory may be the cause: the kernel has killed {} of this machine's processes for it meanwhile. Try a "
    "smaller batch, fewer data loader workers, or more memory."
)
_DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
# Other ranks may report that a process is gone before the launcher learns of its end.
_SECONDS_TO_LEARN_OF_END = 0.5
USUAL_AT_A_SIGNAL = (SystemExit.__name__, KeyboardInterrupt.__name__)
"""Types of errors by which a rank ends at a signal that the launcher has passed on."""
_STATES = {"D": ", waiting for a disk, a network or a device", "t": ", stopped by a debugger"}


@dataclass(frozen=True, slots=True)
class Report:
    """The error that ended a rank, as it wrote it into the file that the agent gave it.

    Attributes:
        kind: name of the error's type.
        time: when it was raised.
        exit_code: the exit code that follows.
        traceback: the formatted traceback.
        place: the line of the script, as ``FILE:LINE``, or "".
        follows: "gone" or "late" if the error says only that another rank is gone, or did not come in time.
        failed_ranks: the ranks that have caused it, as far as the error says so.
        at_exit: whether the script had ended without an error before.
    """

    kind: str
    time: float
    exit_code: int = 1
    traceback: str = ""
    place: str = ""
    follows: Literal["gone", "late"] | None = None
    failed_ranks: Sequence[int] = ()
    at_exit: bool = False

    @classmethod
    def read(cls, path: str | Path) -> Report | None:
        """Return the report in a file, or None if there is none, or none that can be read."""
        try:
            message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
            extra: dict[str, Any] = message["extraInfo"]
            return cls(
                kind=printable(str(extra.get("type", "an error")), lines=False),
                time=float(extra.get("time", extra["timestamp"])),
                exit_code=int(extra.get("exitcode", 1)),
                traceback=str(extra["py_callstack"]).rstrip(),
                place=printable(str(extra.get("place", "")), lines=False),
                follows=extra.get("follows"),
                failed_ranks=tuple(extra.get("failed_ranks", ())),
                at_exit=bool(extra.get("at_exit", False)),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(slots=True)
class RankRecord:
    """What is known of one rank.

    Attributes:
        rank: the rank in the job.
        pid: its process.
        report: the error that it reported.
        status: its exit code, -n after signal n, or None while it runs.
        ended: when the process ended.
        signals: the signals that the launcher has sent to it.
        signalled: when the launcher sent the first of them, or `STACK_SIGNAL`; infinity if it has sent none.
        state: the letter of its state in /proc when the cause was determined; "T" is stopped.
        stack: where it was then, as a traceback.
        error_file: the file in which it reports its error.
    """

    rank: int
    pid: int
    report: Report | None = None
    status: int | None = None
    ended: float = 0.0
    signals: list[signal.Signals] = field(default_factory=list)
    signalled: float = float("inf")
    state: str = ""
    stack: str = ""
    error_file: str = ""

    @property
    def was_signalled(self) -> bool:
        """Whether the launcher has sent the rank a signal."""
        return self.signalled < float("inf")

    @property
    def own_report(self) -> Report | None:
        """The error that the rank reported before the launcher sent it a signal."""
        return self.report if self.report is not None and self.report.time <= self.signalled else None

    @property
    def own_status(self) -> int | None:
        """How the process ended, if it did before the launcher sent it a signal."""
        return self.status if self.ended <= self.signalled else None

    @property
    def is_preempted(self) -> bool:
        """Whether the rank has stopped at a signal, and saved."""
        return self.report is not None and self.report.kind == Preempted.__name__

    @property
    def has_raised_itself(self) -> bool:
        """Whether the rank has reported an error, also after a signal, that is no exit and no other rank's failure."""
        report = self.report
        is_usual = self.is_preempted or (report is not None and report.kind in USUAL_AT_A_SIGNAL)
        return report is not None and report.follows is None and not is_usual

    @property
    def is_silent(self) -> bool:
        """Whether the rank ran, and had reported no error, until the launcher sent it a signal."""
        return self.own_report is None and self.own_status is None

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP or by a debugger."""
        return self.is_silent and self.state in ("T", "t")

    @property
    def has_left(self) -> bool:
        """Whether the rank has ended with exit code 0."""
        return self.own_report is None and self.own_status == 0

    @property
    def ended_script(self) -> bool:
        """Whether the rank's script had ended without an error before the rank reported one, or ended."""
        return self.has_left or (self.own_report is not None and self.own_report.at_exit)

    @property
    def has_failed(self) -> bool:
        """Whether the rank has raised an error, or ended otherwise than with exit code 0."""
        return not self.is_preempted and not self.is_silent and not self.has_left

    @property
    def follows(self) -> bool:
        """Whether the rank's error says only that another rank is gone, or did not come in time."""
        return self.has_failed and self.own_report is not None and self.own_report.follows is not None

    @property
    def was_killed(self) -> bool:
        """Whether the launcher had to kill the rank."""
        return signal.SIGKILL in self.signals and self.status == -signal.SIGKILL

    @property
    def is_lost(self) -> bool:
        """Whether something from outside ended or stopped the rank: no error of its own, and no signal of ours."""
        was_ended = self.report is None and self.own_status is not None and -self.own_status in _DEADLY
        return self.is_stopped or was_ended

    @property
    def failed_itself(self) -> bool:
        """Whether the rank failed of its own accord."""
        return self.has_failed and not self.follows

    @property
    def moment(self) -> float:
        """When the rank failed or left; infinity while it runs."""
        if self.own_report is not None:
            return self.own_report.time
        if self.own_status is None:
            return float("inf")
        return self.ended - (_SECONDS_TO_LEARN_OF_END if self.own_status != -signal.SIGABRT else 0.0)

    @property
    def exit_code(self) -> int:
        """The exit code of the rank as a shell would see it: 128 + n after signal n; 1 if it raised an error."""
        if self.report is not None:  # also if the launcher stopped the rank before it had ended
            return self.report.exit_code
        status = self.status or 0
        return status if status >= 0 else 128 - status


class Ledger:
    """The failures of the ranks of this node, in order.

    Args:
        records: what is known of each rank; at least one rank has failed, or others waited for one in vain.
        whole_job: these are all ranks of the job. Otherwise a rank that still runs is not blamed for others that wait:
            the cause may be on another node.
        oom_kills: how many processes the kernel has killed meanwhile for lack of memory, as far as it says.
    """

    def __init__(self, records: Sequence[RankRecord], *, whole_job: bool = True, oom_kills: int = 0) -> None:
        self._records = sorted(records, key=lambda record: (record.moment, record.rank))
        self._oom_kills = oom_kills
        self._culprits = _culprits(self._records, whole_job)

    @property
    def is_cause_known(self) -> bool:
        """Whether the first culprit did more than report that another rank failed."""
        return not self._culprits[0].follows

    @property
    def awaited(self) -> list[int]:
        """The ranks of other nodes for which the first culprit only waited in vain."""
        here, report = {record.rank for record in self._records}, self._culprits[0].own_report
        if report is None or report.follows != "late":
            return []
        return [rank for rank in report.failed_ranks if rank not in here]

    @property
    def lost(self) -> list[int]:
        """The ranks that something from outside ended or stopped."""
        return sorted(record.rank for record in self._records if record.is_lost)

    @property
    def exit_code(self) -> int:
        """The exit code of the job: that of the culprit if it failed, else that of the first rank that missed it."""
        failed = [self._culprits[0], *self._records]
        return next((record.exit_code for record in failed if record.has_failed and record.exit_code), 1)

    def describe(self, log_dir: str | Path | None = None, first_rank: int = 0) -> str:
        """Return a message: which rank caused the failures and how, its traceback, and which ranks followed.

        Args:
            log_dir: the folder where ranks write their output, or None.
            first_rank: the rank of this node that has the terminal.
        """
        culprit = self._culprits[0]
        parts = [self._headline()]
        if culprit.own_report is not None:
            if culprit.own_report.kind != "SystemExit":  # such a rank has printed its own message
                parts.append(culprit.own_report.traceback)
        elif culprit.stack:
            parts.append(f"It was here (most recent call first):\n{culprit.stack}")
        if culprit.was_killed and culprit.own_report is None:  # its error has been said, and may take long to end it
            parts.append("It did not end by itself, so the launcher killed it.")
        if culprit.own_report is None and culprit.own_status == -signal.SIGKILL:
            parts.append(_OUT_OF_MEMORY.format(self._oom_kills) if self._oom_kills else _KILLED)
        if culprit.own_report is None and culprit.own_status == -signal.SIGABRT:
            parts.append(_ABORTED)
        after = [words for record in self._records if record not in self._culprits and (words := _consequence(record))]
        if after:
            parts.append(f"After it: {'; '.join(after)}.")
        if log_dir is not None and culprit.rank != first_rank:
            parts.append(f"Its output is in {rank_log(log_dir, culprit.rank)}.")
        return "\n\n".join(part for part in parts if part)

    def _headline(self) -> str:
        culprit, *more = self._culprits
        left_early = culprit.ended_script and not all(record.ended_script for record in self._records)
        if awaited := self.awaited:
            return (
                f"{ranks_in_words(awaited)} did not come to a collective: look on "
                f"{'its node' if len(awaited) == 1 else 'their nodes'} first. Here, rank {culprit.rank} "
                f"{_ending(culprit)} (pid {culprit.pid})."
            )
        if culprit.has_failed and not left_early:
            return f"rank {culprit.rank} {_ending(culprit)} (pid {culprit.pid})."
        if culprit.has_left or left_early:
            return (
                f"rank {culprit.rank} exited with code 0 (pid {culprit.pid}) while other ranks went on. All ranks must "
                "make the same collective calls: does each get the same number of batches?"
            )
        waited = "while the other ranks waited for it in a collective"
        if any(record.is_preempted for record in self._records):
            waited = "after other ranks had stopped at a signal, and saved"
        if culprit.state == "T":
            return f"rank {culprit.rank} was stopped (SIGSTOP, pid {culprit.pid}) {waited}."
        if not more:
            doing = _STATES.get(culprit.state, "")
            return f"rank {culprit.rank} was still running (pid {culprit.pid}{doing}) {waited}."
        ranks = ", ".join(str(record.rank) for record in self._culprits)
        return f"one of the ranks {ranks} did not come to a collective: they were still running when others gave up."


def seconds_to_await_cause(records: Sequence[RankRecord]) -> float:
    """Return for how many seconds after the first failure to wait for the rank that caused it to report or to end."""
    if not any(record.is_silent for record in records) or any(record.is_stopped for record in records):
        return 0.0
    failed = [record for record in records if record.has_failed]
    own = [record for record in failed if record.failed_itself]
    if any(record.own_status != -signal.SIGABRT for record in own):
        return 0.0
    if own:
        return 1.0  # an abort may be the answer to an error elsewhere
    return 2.0 if all(record.own_report and record.own_report.follows == "late" for record in failed) else 3.0


def _culprits(records: Sequence[RankRecord], whole_job: bool) -> list[RankRecord]:
    """Return the rank that caused the failures, or several if it is one of them; `records` are in order."""
    if own := [record for record in records if record.failed_itself]:
        # Ranks that go on notice that one has left, and may say so before it does itself.
        left = [record for record in records if record.ended_script] if _has_compared(own[0]) else []
        return (left or own)[:1]
    if stopped := [record for record in records if record.is_stopped]:
        return stopped[:1]
    failed = [record for record in records if record.has_failed]
    if failed and (left := [record for record in records if record.has_left]):
        return left[:1]  # a rank leaves its groups before its process ends, so the others may miss it before that
    if different := [record for record in failed if _has_compared(record)]:
        return different[:1]
    silent = [record for record in records if record.is_silent]
    suspects = failed if failed and not (silent and whole_job) else silent
    named = Counter(rank for record in failed if record.own_report for rank in record.own_report.failed_ranks)
    most = max((named[record.rank] for record in suspects), default=0)
    if most:
        return [record for record in suspects if named[record.rank] == most][:1]
    return suspects[:1] if suspects is failed else suspects or list(records[:1])


def _has_compared(record: RankRecord) -> bool:
    return record.own_report is not None and record.own_report.kind == CollectiveMismatchError.__name__


def _ending(record: RankRecord) -> str:
    if record.report is not None and record.report.kind != "SystemExit":
        return f"raised {record.report.kind}"
    if record.report is None and record.status is not None and record.status < 0:
        return f"was ended by {_signal_name(-record.status)}"
    return f"exited with code {record.exit_code}"


def _consequence(record: RankRecord) -> str:
    """Return what became of a rank after the failure of another, or "" if it just ended when it was told to."""
    words = []
    if record.has_failed:
        place = f" at {record.own_report.place}" if record.own_report is not None and record.own_report.place else ""
        words.append(_ending(record) + place)
    elif record.is_stopped:
        words.append("was stopped (SIGSTOP)")
    if record.was_killed:
        words.append("was killed by the launcher, because it did not end by itself")
    return f"rank {record.rank} {' and '.join(words)}" if words else ""


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
