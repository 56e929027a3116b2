"""The entry point of a rank that a command such as `lockstep train` has started: ``python -m lockstep.cli.rank``."""

from __future__ import annotations

import json
import os
from pathlib import Path

if __name__ == "__main__":
    asked = json.loads(Path(os.environ.pop("LOCKSTEP_PAYLOAD")).read_text(encoding="utf-8"))
    if asked["job"] == "Doctor":
        from lockstep.cli.doctor import look_as_rank

        look_as_rank(asked)
    else:
        from lockstep.cli.jobs import run_as_rank

        run_as_rank(asked)
