"""Count what lockstep and torch send on 2 to 32 ranks, fit how it grows, and write docs/scale.md: make bench-scale.

Ends with 1 if something grows with the square of the number of ranks that need not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.sockets import preloaded

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"
SIZES = (2, 4, 8, 12, 16, 24, 32)
PLANS = ((512, 700), (1024, 10_000))  # ranks and tensors of checkpoints
TIMEOUT = 10.0  # seconds of a collective that a failing rank never joins
_COUNTING = "LOCKSTEP_SCALE_COUNTING"  # set where sends are counted


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--nproc", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument("--json", type=Path, default=Path("work_dirs/scale.json"), help="where the counts go")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    arguments = parser.parse_args()
    if _COUNTING not in os.environ:
        os.environ |= {_COUNTING: "1", "OMP_NUM_THREADS": "1"}
        sys.exit(preloaded([sys.executable, "-m", "benchmarks.scale", *sys.argv[1:]]))
    from benchmarks.scale import report

    figures = _count(arguments.nproc)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    arguments.page.write_text(report.page(figures))
    wrong = report.wrong(figures)
    print("\n".join(wrong) or f"nothing grows with the square but what must: {arguments.page}")
    sys.exit(bool(wrong))


def _count(sizes: list[int]) -> dict[str, Any]:
    from benchmarks.scale import jobs, ranks
    from benchmarks.scale.checkpoints import measure
    from benchmarks.scale.report import figures_of

    rows: list[dict[str, Any]] = []
    for size in sizes:
        for name in ("lockstep", "torch", *ranks.FAULTS, *ranks.QUICK_FAULTS * 2):  # of three, the median counts
            began = time.monotonic()
            outcome = jobs.run(name, size, TIMEOUT if name in ranks.FAULTS else 600.0)
            rows += figures_of(name, outcome)
            print(f"{name}, {size} ranks: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    plans = [vars(measure(*scale)) for scale in PLANS] if len(sizes) > 1 else []
    return {"timeout": TIMEOUT, "rows": rows, "plans": plans}


if __name__ == "__main__":
    main()
