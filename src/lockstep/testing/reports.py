"""Reports on the ranks of a test: one for each rank that did not pass, causes before consequences."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Literal, TypeAlias

from lockstep.errors import ranks_in_words

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
        leaks: what it left behind, if it leaked.
    """

    rank: int
    kind: Kind
    summary: str
    detail: str = ""
    output: str = ""
    consequence: bool = False
    leaks: tuple[str, ...] = ()

    @classmethod
    def of_leaks(cls, rank: int, leaks: Sequence[str]) -> RankReport:
        """Return the report of a rank that left something behind."""
        return cls(rank, "leaked", leaks[0], "\n".join(f"- {leak}" for leak in leaks), leaks=tuple(leaks))


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
        """Return a failure with ordered reports: the first cause in the first line, then what each rank did.

        A leak is told once, with the ranks that left it.
        """
        ordered = sorted(reports, key=_by_cause)
        first = ordered[0]
        leaks = _leaks_told([report for report in ordered if report.kind == "leaked"])
        if first.kind == "leaked":
            headline = leaks.pop(0)
            others = [report for report in ordered if report.kind != "leaked"]
        else:
            headline, others = f"rank {first.rank} {first.kind}: {first.summary}", ordered[1:]
            if leaks:
                leaks[0] = f"\n--- {leaks[0]}"
        if others:
            headline += f" (and {', '.join(f'rank {r.rank} {r.kind}' for r in others)})"
        lines = [f"{title}: {headline}"]
        for report in ordered:
            if report.kind == "leaked":
                lines += leaks
                leaks = []
            else:
                lines += _what_happened(report)
            if report.output:
                lines += [f"--- rank {report.rank} wrote:", indent(report.output.rstrip(), "  ")]
        return cls("\n".join(lines), ordered)


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


def _leaks_told(reports: Sequence[RankReport]) -> list[str]:
    """Return which ranks leaked, with the leak if there is only one, else followed by one line for each."""
    ranks_by_leak: dict[str, list[int]] = {}
    for report in reports:
        for leak in report.leaks:
            ranks_by_leak.setdefault(leak, []).append(report.rank)
    if not reports:
        return []
    all_ranks = [report.rank for report in reports]
    if len(ranks_by_leak) == 1:
        return [f"{ranks_in_words(all_ranks)} leaked: {next(iter(ranks_by_leak))}"]
    lines = [f"- {leak} ({ranks_in_words(ranks)})" for leak, ranks in ranks_by_leak.items()]
    return [f"{ranks_in_words(all_ranks)} leaked", *lines]


def _what_happened(report: RankReport) -> list[str]:
    lines = ["", f"--- rank {report.rank} {report.kind}: {report.summary}"]
    return [*lines, report.detail.rstrip()] if report.detail else lines
