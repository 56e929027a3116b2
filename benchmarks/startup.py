"""CPU seconds that starting takes, in a process of its own each: python -m benchmarks.startup [ROUNDS].

Bytecode is cached, as it is of an installed package. The contenders take turns; the median counts.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
FIGURES = Path(__file__).with_name("startup.json")
_PYTHON = (sys.executable, "-c")
_COMMAND = (sys.executable, "-m", "lockstep")
CASES = {
    "import torch": (*_PYTHON, "import torch"),
    "import lockstep": (*_PYTHON, "import lockstep"),
    "from lockstep import Runner": (*_PYTHON, "from lockstep import Runner"),
    "lockstep --help": (*_COMMAND, "--help"),
    "lockstep config check examples/digits/config.py": (*_COMMAND, "config", "check", "examples/digits/config.py"),
    # The example imports torch and scikit-learn itself; this is what it costs without lockstep.
    "import examples/digits/digits.py": (*_PYTHON, "import sys; sys.path[:0] = ['examples/digits']; import digits"),
}


def main(rounds: int) -> None:
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": folder, "PYTHONPATH": str(ROOT / "src")}
        for number in range(-1, rounds):  # the first round writes the bytecode
            for case, words in CASES.items():
                spent = _cpu_seconds(words, environment)
                if number >= 0:
                    seconds[case].append(spent)
    torch = median(seconds["import torch"])
    rows = [
        {
            "case": case,
            "median_cpu_seconds": round(median(spent), 3),
            "best_cpu_seconds": round(min(spent), 3),
            "of_torch": round(median(spent) / torch, 3),
        }
        for case, spent in seconds.items()
    ]
    FIGURES.write_text(json.dumps({"rounds": rounds, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(
            "{median_cpu_seconds:7.3f} s (best {best_cpu_seconds:.3f}, {of_torch:.2f} of torch)  {case}".format(**row)
        )


def _cpu_seconds(words: tuple[str, ...], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
