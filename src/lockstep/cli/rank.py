"""One rank of `lockstep train` or `lockstep test`, started by that command: ``python -m lockstep.cli.rank REQUEST``."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.cli.jobs import run_as_rank

if __name__ == "__main__":
    run_as_rank(Path(sys.argv[1]))
