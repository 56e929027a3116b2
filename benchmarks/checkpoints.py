"""The price of a checkpoint: `python -m benchmarks.checkpoints [--mib 1024] [--repeats 5]`, on two ranks.

Saves the same state with lockstep, with lockstep without checksums, and with `torch.distributed.checkpoint.save`,
interleaved; then verifies and loads it. Prints the best and the median time, the CPU time of rank 0, and its peak of
memory beyond the state. Every save ends with data on the disk, but for torch's, which does not flush.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lockstep.checkpoint import load_state, saving, verify
from lockstep.dist import barrier, destroy_dist, get_rank, get_world_size, init_dist


class NoChecksums:
    """Counts the bytes only."""

    def __init__(self) -> None:
        self._length = 0

    def update(self, band: memoryview) -> None:
        self._length += len(band)

    def of_all(self) -> tuple[str, ...]:
        return ("00000000",) * -(-self._length // saving.BLOCK)


def peak() -> float:
    """Return the peak of resident memory in MiB since it was last reset (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(work: Callable[[], object]) -> tuple[float, float, float]:
    """Return seconds, seconds of CPU, and MiB."""
    barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, began = peak(), time.process_time(), time.perf_counter()
    work()
    cpu = time.process_time() - cpu
    barrier()
    return time.perf_counter() - began, cpu, peak() - before


def run(folder: Path, mib: int, repeats: int) -> None:
    import torch.distributed.checkpoint as dcp

    init_dist("pytorch")
    rank, world_size = get_rank(), get_world_size()
    tensors = mib // world_size // 16
    state: dict[str, Any] = {"model": {f"{rank}.{i}": torch.randn(4 << 20) for i in range(tensors)}}

    def save(checksums: Any = saving._Checksums) -> None:
        with patch.object(saving, "_Checksums", checksums):
            saving.save_state(folder / "saved", state, {})

    ways: dict[str, Callable[[], object]] = {
        "lockstep": save,
        "lockstep, without checksums": lambda: save(NoChecksums),
        "torch.distributed.checkpoint": lambda: dcp.save(dict(state), checkpoint_id=folder / "saved"),
    }
    results: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, work in ways.items():
            if rank == 0:
                shutil.rmtree(folder / "saved", ignore_errors=True)
            results[way].append(measured(work))
    if rank == 0:
        shutil.rmtree(folder / "saved")
    save()
    for _ in range(repeats):
        results.setdefault("verify", []).append(measured(lambda: verify(folder / "saved", rank, world_size)))
        results.setdefault("load", []).append(measured(lambda: load_state(folder / "saved", state)))
    if rank == 0:
        print(f"{mib} MiB on {world_size} ranks, {repeats} times")
        print(f"{'':30s}  best  median   CPU   MiB/s   peak")
        for way, rows in results.items():
            seconds = [row[0] for row in rows]
            cpu, most = statistics.median(row[1] for row in rows), max(row[2] for row in rows)
            print(
                f"{way:30s} {min(seconds):5.2f} {statistics.median(seconds):7.2f} {cpu:5.2f} "
                f"{mib / min(seconds):7.0f} {most:6.1f}"
            )
        with_them, without = (min(row[0] for row in results[way]) for way in list(ways)[:2])
        than_torch = min(row[0] for row in results["torch.distributed.checkpoint"])
        print(
            f"checksums: {with_them / without - 1:+.0%} of a save, {(with_them - without) / than_torch:+.0%} of torch's"
        )
    destroy_dist()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the whole state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # said by the process that starts the ranks
    options = parser.parse_args()
    if options.folder is not None:
        run(options.folder, options.mib, options.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = ["--mib", str(options.mib), "--repeats", str(options.repeats), "--folder", folder]
        job = ["launch", "--nproc", "2", "-m", "benchmarks.checkpoints", "--", *words]
        sys.exit(subprocess.run([sys.executable, "-m", "lockstep", *job], check=False).returncode)


if __name__ == "__main__":
    main()
