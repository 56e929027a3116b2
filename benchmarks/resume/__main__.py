"""Stop runs and resume them on other ranks, with other batches or workers; write docs/resume-matrix.md."""

from __future__ import annotations

import argparse
import random
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
    parser.add_argument("--share", type=_share, default=(1, 1), metavar="K/N", help="every N-th case, from the K-th on")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "resume-matrix.md", help="where the page goes")
    parser.add_argument("--only", choices=("data", "strategies"), help="only one of the tables, which is printed")
    for engine in ("deepspeed", "colossalai"):
        parser.add_argument(f"--{engine}-python", default=sys.executable, help=f"a Python that has {engine}")
    arguments = parser.parse_args()
    part, parts = arguments.share
    tables: list[list[str]] = []
    faults: list[str] = []
    if arguments.only != "strategies":
        every = data.cases()
        # Shuffled, so that each share has something of everything.
        shares = random.Random(0).sample(range(len(every)), len(every))
        chosen, start = [every[index] for index in sorted(shares[part - 1 :: parts])], time.monotonic()
        found = data.run(chosen)
        faults += [fault for one in found.values() for fault in one.faults]
        tables.append(data.table(found))
        print(f"{len(chosen)} of {len(every)} cases in {time.monotonic() - start:.0f} s", flush=True)
    # In a share, each of so many strategies is resumed under each.
    rows = [row for index, row in enumerate(strategies.ROWS) if index % parts == part - 1]
    if arguments.only != "data":
        pythons: dict[Engine, str] = {
            "torch": sys.executable,
            "deepspeed": arguments.deepspeed_python,
            "colossalai": arguments.colossalai_python,
        }
        results = strategies.run(rows, pythons)
        faults += strategies.faults(rows, results)
        tables.append(strategies.table(rows, results))
    print("\n".join(chain.from_iterable([*tables, faults])) or "nothing to do")
    if parts == 1 and arguments.only is None:
        write_page(*tables, arguments.out)
        print(f"tables in {arguments.out}")
    sys.exit(bool(faults))


def _share(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"a share must be K/N with K from 1 to N, but is {text}")
    return part, parts


if __name__ == "__main__":
    main()
