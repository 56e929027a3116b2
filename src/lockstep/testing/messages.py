"""What the test process and a rank say to each other. Plain values; nothing here imports torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lockstep.testing.bodies import Address
from lockstep.testing.reports import RankReport

# At this signal a rank writes its stack (as a Java machine does); training code hardly ever uses it itself.
STACK_SIGNAL = signal.SIGQUIT


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank a process is, and what it shares with the others.

    Attributes:
        rank: its rank.
        size: number of ranks in the pool.
        folder: the pool's private folder: stores, captured output and stacks.
        join: whether it joins the default group before the first body.
    """

    rank: int
    size: int
    folder: Path
    join: bool

    @property
    def output(self) -> Path:
        """What this rank writes to stdout and stderr."""
        return self.folder / f"rank{self.rank}.output"

    @property
    def stacks(self) -> Path:
        """Where this rank writes its stack when asked for it or when it crashes."""
        return self.folder / f"rank{self.rank}.stacks"


@dataclass(frozen=True, slots=True)
class Task:
    """One body to run, as seen from the test process at the moment of the call.

    Attributes:
        address: where the body lives.
        arguments: ``(args, kwargs)``, pickled.
        environment: variables of the test process.
        folder: its current directory.
        import_path: its ``sys.path``.
        warnings: what a warning does: an action of the `warnings` module.
    """

    address: Address
    arguments: bytes
    environment: dict[str, str]
    folder: str
    import_path: list[str]
    warnings: str


@dataclass(frozen=True, slots=True)
class Settle:
    """All ranks have passed: let go of what the body used, and say what it left behind.

    Attributes:
        regroup: some rank has made groups of its own: leave all groups and join the default one anew.
    """

    regroup: bool


@dataclass(frozen=True, slots=True)
class Passed:
    """A rank did what it was asked.

    Attributes:
        value: what the body returned, pickled.
        made_groups: whether there are process groups that were not there before.
    """

    value: bytes = b""
    made_groups: bool = False


Request: TypeAlias = Task | Settle
Answer: TypeAlias = Passed | RankReport
