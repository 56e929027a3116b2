"""What the doctor has found: shown in tables to people, and as JSON to programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from lockstep.errors import message_of, ranks_in_words
from lockstep.masking import mask_text, mask_value, printable
from lockstep.version import __version__

FORMAT = 1  # changes when a key of the JSON is renamed or goes
Status: TypeAlias = Literal["ok", "warning", "fault"]
_STYLES: dict[Status, str | None] = {"ok": None, "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about one thing.

    Attributes:
        name: the thing, the same in each version of lockstep.
        text: what was found, in words.
        status: "fault" if something contradicts itself or cannot work, "warning" if it may be slow or fail later.
        remedy: what to do; empty if the status is "ok".
        facts: the numbers and names behind it, plain values for JSON.
        ranks: the ranks on which it was found; empty if it is about this process alone, or about the whole job.
    """

    name: str
    text: str
    status: Status = "ok"
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Finding:
        """Return the finding that `as_plain` has described."""
        return cls(**{**found, "ranks": tuple(found["ranks"])})

    def as_plain(self) -> dict[str, Any]:
        """Return it for JSON, without secrets: variables and command lines may have some."""
        plain: dict[str, Any] = mask_value({**asdict(self), "ranks": list(self.ranks)})
        return plain


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several statuses; "ok" of none."""
    return max(statuses, key=[*_STYLES].index, default="ok")


def summarise(name: str, usual: str, others: Iterable[tuple[Status, str, str]], facts: Mapping[str, Any]) -> Finding:
    """Return one finding for a subject that several checks looked at.

    Args:
        name: the subject.
        usual: text on what is as it should be; may be empty.
        others: status, text and remedy of everything else; the worst status is the finding's.
        facts: numbers and names for JSON.
    """
    found = list(others)
    return Finding(
        name,
        "\n".join(filter(None, [usual, *(text for _, text, _ in found)])),
        worst(status for status, _, _ in found),
        " ".join(dict.fromkeys(remedy for _, _, remedy in found if remedy)),
        facts,
    )


def run_check(check: Callable[[Mapping[str, str]], Finding], env: Mapping[str, str]) -> Finding:
    """Return what a check finds in an environment; if the system does not allow it, a warning."""
    try:
        return check(env)
    except Exception as error:  # other systems lack some of it; a GPU may be ill, a command of the driver hang
        return Finding(check.__name__.replace("_", " "), f"could not be found out: {message_of(error)}", "warning")


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
        text = printable(mask_text(where + finding.text + (f"\n{finding.remedy}" if finding.remedy else "")))
        table.add_row(finding.name.removesuffix(" over ranks"), escape(text), style=_STYLES[finding.status])
    Console().print(table)


def as_json(findings: Sequence[Finding], world_size: int) -> str:
    """Return findings as JSON. Its keys are a promise: format, lockstep, status, world_size and findings."""
    found = {
        "format": FORMAT,
        "lockstep": __version__,
        "status": worst(finding.status for finding in findings),
        "world_size": world_size,
        "findings": [finding.as_plain() for finding in findings],
    }
    return json.dumps(found, indent=1)
