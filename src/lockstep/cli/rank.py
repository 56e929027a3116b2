"""The entry point of a rank that a command such as `lockstep train` has started: ``python -m lockstep.cli.rank``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_job(request: Mapping[str, Any]) -> None:
    """Run the job for which a command has started this rank."""
    from lockstep.cli.jobs import Predict, Test, Train, ignore_stop_signals

    sys.argv = request["argv"]  # the run records what the user typed
    options = request["options"]
    options |= {name: Path(options[name]) for name in ("config", "work_dir", "out") if options.get(name)}
    job = {"Train": Train, "Test": Test, "Predict": Predict}[request["job"]](**options)
    cfg = job.read()
    cfg.launcher = "pytorch"  # the ranks get torchrun's variables
    job.execute(cfg)
    ignore_stop_signals()


if __name__ == "__main__":
    asked = json.loads(Path(os.environ.pop("LOCKSTEP_PAYLOAD")).read_text(encoding="utf-8"))
    if asked["job"] == "Doctor":
        from lockstep.cli.doctor import look_as_rank

        look_as_rank(asked)
    else:
        run_job(asked)
