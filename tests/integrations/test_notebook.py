"""`launch` takes functions that are defined in a notebook's cells."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .conftest import Start

HERE = Path(__file__).parent


def test_functions_of_cells_run_on_ranks_and_their_errors_are_raised_in_the_notebook(start: Start) -> None:
    done = start(sys.executable, str(HERE / "run_notebook.py"), str(HERE / "cells.py"))
    _, works, fails, trains, unpicklable, missing = json.loads(done.stdout.splitlines()[-1])
    assert works["error"] is None
    assert works["text"].count("found [0, 10]") == 2
    assert fails["error"].startswith("rank 1 raised ValueError")
    assert "in check\nValueError: bad luck" in fails["error"]
    assert trains["error"] is None
    assert "epoch 2/2  loss" in trains["text"]
    assert "\x1b[2K" not in trains["text"]  # no bar, which a notebook could not draw
    assert unpicklable["error"].startswith("`command` must be a function that can be pickled with the variables")
    assert missing["error"].endswith("pip install cloudpickle")
