"""Lines for the person who started a job, on stderr: stdout belongs to the scripts and to results."""

from __future__ import annotations

import sys

from lockstep.masking import printable


def say(text: str) -> None:
    """Print a line, marked as lockstep's."""
    print(f"lockstep: {printable(text)}", file=sys.stderr, flush=True)
