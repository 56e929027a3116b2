"""What the soaks of this folder share: cases by their seeds, one after the other, and a line on each fault."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path


def main(doc: str | None, differences: Callable[[int, Path], Iterator[str]]) -> int:
    """Run the cases that the command line asks for; return 1 if one of them has faults.

    Args:
        doc: describes the command.
        differences: yields the faults of the case of a seed, which runs in the given folder.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faults = 0
    for seed in range(options.seed, options.seed + options.cases):
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            found = [*differences(seed, Path(folder))]
        faults += bool(found)
        print(*(f"FAULT {seed}: {one}" for one in found), sep="\n", end="\n" * bool(found), flush=True)
    print(f"{options.cases} cases, {faults} of them with faults")
    return faults > 0
