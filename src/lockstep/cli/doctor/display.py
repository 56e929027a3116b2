"""Showing findings: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.cli.doctor.finding import Finding, ranks_in_words, worst
from lockstep.version import __version__

FORMAT = 1  # changes when a key of the JSON is renamed or goes
_STYLES = {"ok": None, "warning": "yellow", "fault": "bold red"}


def print_table(title: str, findings: Sequence[Finding], ranks: int = 1) -> None:
    """Print findings, each with its remedy.

    Args:
        title: the title.
        findings: what to print.
        ranks: number of ranks that have looked; a finding of all of them is printed without their names.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", min_width=len("accelerators"))
    table.add_column(overflow="fold")
    for finding in findings:
        where = "" if len(finding.ranks) in (0, ranks) else f"{ranks_in_words(finding.ranks)}: "
        text = f"{where}{finding.text}" + (f"\n{finding.remedy}" if finding.remedy else "")
        table.add_row(finding.name.removesuffix(" over ranks"), escape(text), style=_STYLES[finding.status])
    Console().print(table)


def as_json(findings: Sequence[Finding], world_size: int) -> str:
    """Return findings as JSON, whose keys stay: format, lockstep, status, world_size and findings."""
    found = {
        "format": FORMAT,
        "lockstep": __version__,
        "status": worst(finding.status for finding in findings),
        "world_size": world_size,
        "findings": [finding.as_plain() for finding in findings],
    }
    return json.dumps(found, indent=1)
