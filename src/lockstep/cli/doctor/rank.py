"""The entry point of a rank that `lockstep doctor` has started: ``python -m lockstep.cli.doctor.rank``."""

from __future__ import annotations

from lockstep.cli.doctor import look_as_rank

if __name__ == "__main__":
    look_as_rank()
