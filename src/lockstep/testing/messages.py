"""Messages between the test process and a rank. They are plain values; nothing here imports torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lockstep.testing.bodies import Address
from lockstep.testing.reports import RankReport

# On this signal a rank writes its stack (as a Java VM does); training code hardly ever uses it.
STACK_SIGNAL = signal.SIGQUIT


@dataclass(frozen=True, slots=True)
class Seat:
    """The rank of a process, and what it shares with the other ranks.

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
        """The file to which this rank's stdout and stderr go."""
        return self.folder / f"rank{self.rank}.output"

    @property
    def stacks(self) -> Path:
        """The file to which this rank writes its stack, on request or when it crashes."""
        return self.folder / f"rank{self.rank}.stacks"


@dataclass(frozen=True, slots=True)
class Task:
    """One body to run, with the state of the test process at the time of the call.

    Attributes:
        address: the location of the body.
        arguments: ``(args, kwargs)``, pickled.
        environment: environment variables of the test process.
        folder: its current directory.
        import_path: its ``sys.path``.
        warnings: what a warning does, as an action of the `warnings` module.
    """

    address: Address
    arguments: bytes
    environment: dict[str, str]
    folder: str
    import_path: list[str]
    warnings: str


@dataclass(frozen=True, slots=True)
class Settle:
    """All ranks have passed: release what the body used, and report what it left behind.

    Attributes:
        regroup: some rank has made its own groups: leave all groups and join the default group again.
    """

    regroup: bool


@dataclass(frozen=True, slots=True)
class Passed:
    """A rank completed a request.

    Attributes:
        value: what the body returned, pickled.
        made_groups: whether process groups other than the default group exist.
    """

    value: bytes = b""
    made_groups: bool = False


Request: TypeAlias = Task | Settle
Answer: TypeAlias = Passed | RankReport
