"""Count how scripts end that never leave their process group: python tests/launch/soak_exits.py --runs 100 [--bare].

Each run starts two ranks that join, talk, train and simply end. With lockstep all must exit with code 0. With --bare
they do the same by torch.distributed alone, to show the difference: some abort while the interpreter ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter

from lockstep.testing.pool import free_port

SIZE = 2
PATIENCE_SECONDS = 120

LOCKSTEP = """
import torch, torch.distributed as dist
from lockstep.dist import all_gather_object, all_reduce, barrier, infer_launcher, init_dist
init_dist(infer_launcher())
pair = dist.new_group([0, 1])
data = torch.ones(1000)
for _ in range(10):
    all_reduce(data)
    all_reduce(data, group=pair)
all_gather_object({"some": "object"})
barrier()
"""
BARE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
data = torch.ones(1000)
for _ in range(10):
    dist.all_reduce(data)
    dist.all_reduce(data, group=pair)
dist.all_gather_object([None] * dist.get_world_size(), {"some": "object"})
dist.barrier()
"""
TRAIN = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--bare", action="store_true", help="torch.distributed without lockstep")
    options = parser.parse_args()
    script = (BARE if options.bare else LOCKSTEP) + TRAIN
    began = time.monotonic()
    runs: Counter[tuple[int, ...]] = Counter()
    for number in range(options.runs):
        codes = run_once(script)
        runs[codes] += 1
        if any(codes) and sys.stderr.isatty():
            print(f"run {number}: exit codes {codes}", file=sys.stderr)
    print_table(runs, "torch.distributed" if options.bare else "lockstep", time.monotonic() - began)
    return 0 if set(runs) == {(0,) * SIZE} else 1


def run_once(script: str) -> tuple[int, ...]:
    """Run a script on all ranks; return their exit codes."""
    port = free_port()
    shared = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=os.environ | shared | {"RANK": str(rank)}, stderr=subprocess.DEVNULL
        )
        for rank in range(SIZE)
    ]
    try:
        return tuple(rank.wait(PATIENCE_SECONDS) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def print_table(runs: Counter[tuple[int, ...]], what: str, seconds: float) -> None:
    total = sum(runs.values())
    good = runs[(0,) * SIZE]
    print(f"{what}: {good} of {total} runs of {SIZE} ranks exited with code 0 everywhere, in {seconds:.0f} s\n")
    print(f"{'exit codes by rank':<20} {'runs':>5}")
    for codes, count in runs.most_common():
        print(f"{', '.join(map(str, codes)):<20} {count:>5}")


if __name__ == "__main__":
    sys.exit(main())
