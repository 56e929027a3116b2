"""Train a GPT and a ResNet on GPUs by hand and with several frameworks, and time calls; on one GPU, and on all."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import section
from benchmarks.page import SPEED, write_section
from lockstep.device import get_device
from lockstep.launch import JobSpec, launch

ROOT = Path(__file__).parents[2]
NO_GPU = (
    "make bench-gpu needs a GPU, but torch finds none here; `python -m benchmarks.gpu --device cpu --small` tries its "
    "code on the CPU"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: only to try the code")
    parser.add_argument("--small", action="store_true", help="tiny models and few steps: only to try the code")
    parser.add_argument("--rounds", type=int, help="how often each training is timed; default: 3, or 1 with --small")
    parser.add_argument("--nproc", type=int, nargs="+", help="numbers of ranks; default: 1, and one for each GPU")
    parser.add_argument("--json", type=Path, help="where the figures go; default on GPUs: benchmarks/gpu.json")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif get_device() == "cpu":
        sys.exit(NO_GPU)
    count = 2 if arguments.device == "cpu" else torch.accelerator.device_count()
    rounds = arguments.rounds or (1 if arguments.small else 3)
    figures = _measured(arguments.nproc or sorted({1, count}), arguments.small, rounds)
    print(section(figures))
    is_real = arguments.device == "gpu" and not arguments.small
    path = arguments.json or (ROOT / "benchmarks" / "gpu.json" if is_real else None)
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"figures in {path}")
    if is_real:
        write_section(SPEED, "bench-gpu", section(figures))


def _measured(sizes: Sequence[int], small: bool, rounds: int) -> dict[str, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, Any] = {
        "device": _name(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": torch.__version__,
        "rounds": rounds,
        "trainings": [],
        "calls": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder, f"{size}.json")
            words = (str(path), "small" if small else "whole", str(rounds))
            launch(["-m", "benchmarks.gpu.rank", *words], JobSpec(size))
            for kind, rows in json.loads(path.read_text()).items():
                figures[kind] += rows
    return figures


def _name() -> str:
    kind = get_device()
    if kind == "cpu":
        return f"{os.cpu_count()} CPU cores"
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda: kind)()
    return f"{torch.accelerator.device_count()} x {name}"


if __name__ == "__main__":
    main()
