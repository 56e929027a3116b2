"""The price of a checkpoint: `python -m benchmarks.checkpoints [--mib 1024] [--repeats 5]`, on two ranks.

Saves the same state, a model and the two moments of Adam, replicated under DDP: with lockstep (also without checksums,
and asynchronously), with torch (`torch.save` on rank 0, `torch.distributed.checkpoint.save` and `async_save`), and with
accelerate and Lightning's Fabric where they are installed; all interleaved. Then verifies and loads it. Prints, for
each, the pause (how long the call keeps training from going on), the time until the checkpoint is complete, and the
most memory that a rank needs beyond the state. Lockstep's saves end with data on the disk; the others do not flush.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Adam

from lockstep.checkpoint import load_state, save_state, saving
from lockstep.checkpoint.background import BackgroundSaver
from lockstep.dist import all_gather_object, barrier, destroy_dist, get_rank, get_world_size, init_dist

Save = Callable[[Path], Callable[[], object]]
"""Begins to save into a folder, and returns what waits until it is complete."""


class NoChecksums(saving._Checksums):
    """Counts the bytes only."""

    def update(self, band: memoryview) -> None:
        self._length += len(band)

    def close(self) -> None:
        self._done += bytes(saving.CHECKSUM * -(-self._length // saving.BLOCK))
        self._length = 0


def at_once(save: Callable[[Path], object]) -> Save:
    """Return a synchronous save in the form of all."""

    def begin(folder: Path) -> Callable[[], object]:
        save(folder)
        return lambda: None

    return begin


def peak() -> float:
    """Return the peak of resident memory in MiB since it was last reset (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(save: Save, folder: Path) -> tuple[float, float, float]:
    """Return seconds of the pause, seconds until it is complete, and MiB: the most of all ranks."""
    barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = peak(), time.perf_counter()
    wait = save(folder)
    pause = time.perf_counter() - began
    wait()
    barrier()
    complete = time.perf_counter() - began
    rows = all_gather_object((pause, complete, peak() - before))
    return max(row[0] for row in rows), max(row[1] for row in rows), max(row[2] for row in rows)


def ways_to_save(model: nn.Module, optimizer: Adam, state: dict[str, Any]) -> dict[str, Save]:
    """Return each way by its name."""
    import torch.distributed.checkpoint as dcp

    rank, saver = get_rank(), BackgroundSaver()
    process_group = torch.distributed.new_group(backend="gloo")

    def without_checksums(folder: Path) -> None:
        with patch.object(saving, "_Checksums", NoChecksums):
            save_state(folder, state, {})

    def in_background(folder: Path) -> Callable[[], object]:
        saver.start(folder, state, {})
        return saver.wait

    def torch_save(folder: Path) -> None:
        if rank == 0:
            folder.mkdir()
            torch.save(state, folder / "all.pt")
        barrier()

    def dcp_async(folder: Path) -> Callable[[], object]:
        future: Any = dcp.async_save(dict(state), checkpoint_id=folder, process_group=process_group)
        return lambda: future.result()

    ways: dict[str, Save] = {
        "lockstep": at_once(lambda folder: save_state(folder, state, {})),
        "lockstep, without checksums": at_once(without_checksums),
        "lockstep, async_save": in_background,
        "torch.save on rank 0": at_once(torch_save),
        "torch.distributed.checkpoint": at_once(lambda folder: dcp.save(dict(state), checkpoint_id=folder)),
        "torch..., async_save": dcp_async,
    }
    if find_spec("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        ways["accelerate"] = at_once(lambda folder: (accelerator.save_state(str(folder)), barrier()))
    if find_spec("lightning"):
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=get_world_size(), strategy="ddp")
        fabric.launch()
        parts = dict(zip(("model", "optimizer"), fabric.setup(model, optimizer), strict=True))
        ways["Lightning Fabric"] = at_once(lambda folder: fabric.save(folder / "all.ckpt", parts))
    return ways


def run(folder: Path, mib: int, repeats: int, results_file: Path | None) -> None:
    """On each rank: save in all ways, `repeats` times."""
    init_dist("pytorch")
    rank, world_size = get_rank(), get_world_size()
    width = 2048  # 16 MiB for each weight, and as much for each of its moments
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(mib // 48)))
    optimizer = Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ways = ways_to_save(model, optimizer, state)
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, save in ways.items():
            found[way].append(measured(save, folder / "saved"))
            if rank == 0:
                shutil.rmtree(folder / "saved")
    save_state(folder / "saved", state, {})
    reading: dict[str, Save] = {
        "load": at_once(lambda saved: load_state(saved, {"model": state["model"], "optimizer": None})),
    }
    for _ in range(repeats):
        for way, read in reading.items():
            found.setdefault(way, []).append(measured(read, folder / "saved"))
    if rank == 0:
        report(found, mib // 48 * 48, world_size, results_file)
    destroy_dist()


def report(
    found: dict[str, list[tuple[float, float, float]]], mib: int, world_size: int, results_file: Path | None
) -> None:
    """Print a table, and what the checksums and the copy cost."""
    print(f"{mib} MiB on {world_size} ranks, {len(found['lockstep'])} times; seconds: best, median")
    print(f"{'':30s}  pause          complete       MiB/s  memory (MiB)")
    best = {way: [min(row[i] for row in rows) for i in range(2)] for way, rows in found.items()}
    for way, rows in found.items():
        median = [statistics.median(row[i] for row in rows) for i in range(2)]
        times = "  ".join(f"{best[way][i]:6.3f} {median[i]:6.3f}" for i in range(2))
        print(f"{way:30s} {times}  {mib / best[way][1]:6.0f}  {max(row[2] for row in rows):6.0f}")
    whole, bare = best["lockstep"][1], best["lockstep, without checksums"][1]
    pause = best["lockstep, async_save"][0]
    torchs = best["torch.distributed.checkpoint"][1]
    print(f"checksums: {whole / bare - 1:+.0%} of a save, {(whole - bare) / torchs:+.0%} of torch's")
    print(f"pause of an asynchronous save: {pause / whole:.0%} of a synchronous one, {pause / torchs:.0%} of torch's")
    memory = max(row[2] for row in found["lockstep, async_save"]) / (mib / world_size)
    print(f"memory of an asynchronous save: {memory:.2f} of a rank's own share, the first of them included")
    if results_file is not None:
        results_file.write_text(json.dumps({"mib": mib, "ranks": world_size, "seconds": found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the whole state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # said by the process that starts the ranks
    options = parser.parse_args()
    if options.folder is not None:
        run(options.folder, options.mib, options.repeats, options.json)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = ["--mib", str(options.mib), "--repeats", str(options.repeats), "--folder", folder]
        if options.json is not None:
            words += ["--json", str(options.json)]
        job = ["launch", "--nproc", "2", "-m", "benchmarks.checkpoints", "--", *words]
        sys.exit(subprocess.run([sys.executable, "-m", "lockstep", *job], check=False).returncode)


if __name__ == "__main__":
    main()
