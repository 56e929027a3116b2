"""Reports on the ranks of a test: one for each rank that did not pass, causes before consequences."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import indent
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["died", "raised", "leaked", "hung"]

# A rank that died makes its peers fail, and one that raised leaves them waiting: so causes come first.
_CAUSES_FIRST: tuple[Kind, ...] = ("died", "raised", "leaked", "hung")


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank that did not pass.

    Attributes:
        rank: its rank.
        kind: ``"died"``, ``"raised"``, ``"leaked"`` or ``"hung"``.
        summary: what happened, in one line.
        detail: the traceback, the live stack or the list of leaks.
        output: what the rank wrote to stdout and stderr.
        consequence: whether it failed only because another rank had failed.
    """

    rank: int
    kind: Kind
    summary: str
    detail: str = ""
    output: str = ""
    consequence: bool = False


class RankFailure(AssertionError):  # noqa: N818 - reads as what it is; not every failure of a test is an error
    """A test body did not pass on all of its ranks.

    Attributes:
        reports: one for each rank that failed, in the order: died, raised, leaked, hung.
    """

    def __init__(self, message: str, reports: Iterable[RankReport] = ()) -> None:
        super().__init__(message)
        self.reports = tuple(reports)

    @classmethod
    def of(cls, title: str, reports: Iterable[RankReport]) -> RankFailure:
        """Return a failure with ordered reports: the first cause in the first line, then one paragraph per rank."""
        first, *others = ordered = sorted(reports, key=_by_cause)
        headline = f"{title}: rank {first.rank} {first.kind}: {first.summary}"
        if others:
            headline += f" (and {', '.join(f'rank {r.rank} {r.kind}' for r in others)})"
        return cls("\n".join([headline, *(_paragraph(r) for r in ordered)]), ordered)


# The module from which users import it, so that pytest prints that name.
RankFailure.__module__ = "lockstep.testing"


def describe_exit(exitcode: int | None) -> str:
    """Return text that says how a process ended, given its exit code as `multiprocessing` reports it."""
    if exitcode is None:
        return "its process is gone"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


def _by_cause(report: RankReport) -> tuple[int, bool, int]:
    return _CAUSES_FIRST.index(report.kind), report.consequence, report.rank


def _paragraph(report: RankReport) -> str:
    lines = ["", f"--- rank {report.rank} {report.kind}: {report.summary}"]
    if report.detail:
        lines.append(report.detail.rstrip())
    if report.output:
        lines += [f"--- rank {report.rank} wrote:", indent(report.output.rstrip(), "  ")]
    return "\n".join(lines)
