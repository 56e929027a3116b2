"""What one rank of the benchmark runs; rank 0 writes the results as they come."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.gpu.calls import calls
from benchmarks.gpu.models import workloads
from benchmarks.gpu.trainings import STRATEGIES, quiet, results
from lockstep import dist
from lockstep.device import get_device


def main(path: Path, small: bool, rounds: int) -> None:
    torch.set_num_threads(1)
    quiet()
    dist.init_dist("pytorch")
    found: dict[str, list[dict[str, object]]] = {"calls": [], "trainings": []}

    def note(kind: str, row: dict[str, object]) -> None:
        found[kind].append(row)
        if dist.is_main_process():
            print(f"  {row}", file=sys.stderr, flush=True)
            path.write_text(json.dumps(found))

    for call in calls(2 if small else 50):
        note("calls", call.as_dict())
    if get_device() != "cpu":
        torch.backends.cudnn.benchmark = True  # for all alike: the sizes stay the same
    for workload in workloads(small):
        for strategy in STRATEGIES:
            for result in results(workload, strategy, rounds, small):
                note("trainings", result.as_dict())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "small", int(sys.argv[3]))
