"""What is written down about a run before it begins: where and on what it runs, and for whom."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config import Config
from lockstep.device import get_device
from lockstep.dist import gather_object, get_backend, main_process_first
from lockstep.runner.summary import describe_model
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner


def begin_records(runner: Runner) -> None:
    """Write `environment.json` into the run's folder, and open the visualizers.

    **Collective**: every rank; rank 0 writes and opens.

    Raises:
        Exception: whatever keeps a visualizer from opening; PeerError on the other ranks.
    """
    ranks = gather_object(_describe_rank())
    with main_process_first():
        if ranks is None:
            return
        file = runner.run_dir / "environment.json"
        first = not file.exists()
        if first:
            file.write_text(json.dumps(_describe_run(runner, ranks), indent=1) + "\n", encoding="utf-8")
        runner.visualizer.open(runner.run_dir)
        if first and isinstance(runner.cfg, Mapping):
            runner.visualizer.add_config(runner.cfg if isinstance(runner.cfg, Config) else Config(runner.cfg))


def _describe_run(runner: Runner, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    evaluator = vars(runner).get("val_evaluator") or vars(runner).get("test_evaluator")
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": _command(),
        "model": describe_model(runner.model, runner.strategy),
        "seed": runner.seed,
        "world_size": runner.world_size,
        "backend": get_backend() if runner.distributed else None,
        "lockstep": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "units": dict(evaluator.units) if evaluator is not None else {},
        "ranks": ranks,
    }


def _command() -> str:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def _describe_rank() -> dict[str, Any]:
    """Return what may differ from rank to rank."""
    kind = get_device()
    if kind == "cpu":
        device, name = "cpu", _processor()
    else:
        index = torch.accelerator.current_device_index()
        module = torch.get_device_module(kind)
        device, name = f"{kind}:{index}", str(getattr(module, "get_device_name", lambda _: kind)(index))
    return {"host": platform.node(), "device": device, "device_name": name, "threads": torch.get_num_threads()}


def _processor() -> str:
    """Return what Linux calls the processor; other systems tell Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
