"""Gives every rank the simulated accelerator, before its script begins: for scripts that know nothing of it.

Where this folder is on PYTHONPATH, Python imports this module as it starts. A launcher is no rank.
"""

import os
import sys
from pathlib import Path

if "RANK" in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from sim import simulator

    sys.path.pop(0)
    simulator()
