"""What the doctor has found, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from lockstep.masking import mask_text, mask_value

Status: TypeAlias = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about one thing.

    Attributes:
        name: the thing, the same in each version of lockstep.
        text: what was found, in words.
        status: "fault" if something contradicts itself or cannot work, "warning" if it may be slow or fail later.
        remedy: what to do, unless all is well.
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
        return {**plain, "text": mask_text(self.text)}


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several statuses; "ok" of none."""
    found = set(statuses)
    return "fault" if "fault" in found else "warning" if "warning" in found else "ok"


def joined(name: str, usual: str, others: Iterable[tuple[Status, str, str]], facts: Mapping[str, Any]) -> Finding:
    """Return one finding of what is usual and of what is not: statuses, texts and remedies."""
    found = list(others)
    return Finding(
        name,
        "\n".join(filter(None, [usual, *(text for _, text, _ in found)])),
        worst(status for status, _, _ in found),
        " ".join(dict.fromkeys(remedy for _, _, remedy in found if remedy)),
        facts,
    )


def examined(checks: Mapping[str, Callable[[], Finding]]) -> list[Finding]:
    """Return what the checks find; one that the system does not allow is a warning."""
    found = []
    for name, check in checks.items():
        try:
            found.append(check())
        except (AttributeError, OSError) as error:  # other systems lack some of it
            found.append(Finding(name, f"could not be found out: {error}", "warning"))
    return found


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words, neighbours as a range.

    Example:
        >>> ranks_in_words([3]), ranks_in_words([0, 1, 2, 5])
        ('rank 3', 'ranks 0-2, 5')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    shown = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
