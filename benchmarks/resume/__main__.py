"""Stop runs and resume them on other ranks, with other batches or workers; write docs/resume-matrix.md."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import chain
from pathlib import Path

from benchmarks.parity.rows import Engine
from benchmarks.resume import data, strategies
from benchmarks.resume.report import write_page

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--loops", nargs="*", choices=data.LOOPS, default=list(data.LOOPS), help="default: all")
    parser.add_argument(
        "--ranks", nargs="*", type=int, default=list(data.RANKS), help="of the loops' runs; default: all"
    )
    names = [row.name for row in strategies.ROWS]
    parser.add_argument("--rows", nargs="*", choices=names, default=names, help="strategies; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "resume-matrix.md", help="where the page goes")
    parser.add_argument("--only", choices=("data", "strategies"), help="only one of the tables, which is printed")
    for engine in ("deepspeed", "colossalai"):
        parser.add_argument(f"--{engine}-python", default=sys.executable, help=f"a Python that has {engine}")
    arguments = parser.parse_args()
    tables: list[list[str]] = []
    whole = True
    faults: list[str] = []
    if arguments.only != "strategies":
        every, start = data.cases(), time.monotonic()
        chosen = [
            case
            for case in every
            if case.loop in arguments.loops and {case.saved.ranks, case.resumed.ranks} <= set(arguments.ranks)
        ]
        whole = len(chosen) == len(every)
        found = data.run(chosen)
        faults += [fault for one in found.values() for fault in one.faults]
        tables.append(data.table(found))
        print(f"{len(chosen)} of {len(every)} cases in {time.monotonic() - start:.0f} s", flush=True)
    if arguments.only != "data":
        pythons: dict[Engine, str] = {
            "torch": sys.executable,
            "deepspeed": arguments.deepspeed_python,
            "colossalai": arguments.colossalai_python,
        }
        rows = [row for row in strategies.ROWS if row.name in arguments.rows]
        whole = whole and len(rows) == len(names)
        results = strategies.run(rows, pythons)
        faults += strategies.faults(rows, results)
        tables.append(strategies.table(rows, results))
    print("\n".join(chain.from_iterable([*tables, faults])) or "nothing to do")
    if whole and arguments.only is None:
        write_page(*tables, arguments.out)
        print(f"tables in {arguments.out}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
