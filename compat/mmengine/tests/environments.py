"""Running a script in this environment or in that of the real MMEngine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mmengine.version

# Whether this is lockstep; the documented behaviour is also checked with MMEngine itself.
LOCKSTEP = hasattr(mmengine.version, "lockstep")

# Python of an environment with MMEngine 0.10.7 and the same torch; `make test-mmengine` creates it.
REFERENCE = os.environ.get("MMENGINE_REFERENCE", "")
_HEAD = """
import json, logging, warnings
warnings.simplefilter('ignore')
logging.disable(logging.CRITICAL)
import stubs
answers = {}
"""
_TAIL = "\nprint('\\n@@' + json.dumps(answers))\n"


def run(python: str, script: str, folder: Path) -> Any:
    """Return `answers` of a script that fills this dict, run by another Python in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [python, "-c", _HEAD + script + _TAIL]
    paths = [str(Path(__file__).parent)]  # for the stubs
    if python == sys.executable:
        paths += [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=500, env=environ)
    assert done.returncode == 0, f"{python}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return json.loads(done.stdout.rpartition("\n@@")[2])
