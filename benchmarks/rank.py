"""What one rank of the benchmark runs; rank 0 writes the rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks import measure, nested, objects, peers, results, tensors, training
from lockstep import dist

PARTS = {
    "tensors": tensors,
    "nested": nested,
    "objects": objects,
    "results": results,
    "training": training,
    "peers": peers,
}


def main(path: Path, most_rounds: int, parts: list[str]) -> None:
    torch.set_num_threads(1)
    if most_rounds:
        measure.limit_rounds(most_rounds)
    dist.init_dist("pytorch")
    rows = []
    for part in parts:
        for row in PARTS[part].rows():
            if dist.is_main_process():
                print(f"  {row.group}: {row.case}: {row.ratio:.2f}", file=sys.stderr, flush=True)
            rows.append(row.as_dict())
    if dist.is_main_process():
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
