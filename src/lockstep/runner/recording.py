"""Descriptions of a run: `environment.json`, written at its beginning, and its messages on the console."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import nn

from lockstep.config import Config
from lockstep.device import get_device
from lockstep.dist import gather_object, get_backend, run_on_main
from lockstep.evaluator import format_metrics
from lockstep.masking import mask_words
from lockstep.model import ModelWrapper, unwrap_model
from lockstep.runner.run import Run, Workspace
from lockstep.strategy import Strategy
from lockstep.version import __version__


def write_environment(run: Run) -> None:
    """Write `environment.json` into the run's folder, if it is not there yet.

    **Collective**: every rank; rank 0 writes.
    """
    ranks = gather_object(_describe_rank()) or []
    run_on_main(lambda: _write_environment(run, ranks))


def begin_records(run: Run, *, adds_config: bool) -> None:
    """Open the visualizers, and hand them the config if asked to, its secrets masked.

    **Collective**: every rank; rank 0 opens.

    Raises:
        Exception: a visualizer cannot be opened, for whatever reason; PeerError on the other ranks.
    """
    run_on_main(lambda: _begin(run, adds_config))


def _write_environment(run: Run, ranks: list[dict[str, Any]]) -> None:
    file = run.run_dir / "environment.json"
    if not file.exists():
        file.write_text(json.dumps(_describe_run(run, ranks), indent=1) + "\n", encoding="utf-8")


def _begin(run: Run, adds_config: bool) -> None:
    run.visualizer.open(run.run_dir)
    if adds_config and isinstance(run.cfg, Mapping):
        run.visualizer.add_config((run.cfg if isinstance(run.cfg, Config) else Config(run.cfg)).masked())


def describe_model(model: nn.Module, strategy: Strategy) -> str:
    """Return one line on the model and its strategy."""
    core = unwrap_model(model)
    sizes = (parameter.numel() for parameter in core.parameters())
    count = model.num_parameters if isinstance(model, ModelWrapper) else sum(sizes)
    return f"{type(core).__name__}, {count:,} parameters, {type(strategy).__name__}"


def describe_ranks(world_size: int, device: str) -> str:
    """Return one line on the processes."""
    if world_size == 1:
        return f"1 rank on {device}"
    return f"{world_size} ranks on {device} over {get_backend()}"


def describe_position(run: Run | Workspace) -> str:
    """Return one line on how far a run is, for an error that ends it."""
    done = run.iter if isinstance(run, Run) else 0
    file = getattr(run.cfg, "filename", None)
    config = "" if file is None else f", config {file}"
    return f"(rank {run.rank} of {run.world_size}, after {done} iterations{config})"


def print_summary(run: Run, what: str, seconds: float) -> None:
    """Print the result of a run and the path of its folder."""
    console = run.console
    loop = run.last_evaluation
    console.rule(f"[bold]{what}[/] in {seconds:.1f} s", style="dim", align="left")
    if loop is not None and loop.metrics:
        result = format_metrics(loop.metrics, loop.evaluator.units)
        console.print(Text.assemble("result  ", (result, "bold green")))
    # Never wrapped, so that it can be copied.
    console.print(Text.assemble("run     ", (str(run.run_dir), "bold")), soft_wrap=True)


def _describe_run(run: Run, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    loop = run.val_loop or run.test_loop
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": _command(),
        "model": describe_model(run.model, run.strategy),
        "seed": run.seed,
        "world_size": run.world_size,
        "backend": get_backend() if run.distributed else None,
        "lockstep": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "units": {} if loop is None else dict(loop.evaluator.units),
        "ranks": ranks,
    }


def _command() -> str:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *mask_words(sys.argv[1:])])


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
    """Return the processor's name: from /proc/cpuinfo on Linux, else from Python."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
