"""The entry point of a rank that a command such as `lockstep train` has started: ``python -m lockstep.cli.rank``."""

from __future__ import annotations

from lockstep.cli.jobs import run_as_rank

if __name__ == "__main__":
    run_as_rank()
