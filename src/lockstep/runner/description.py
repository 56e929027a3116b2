"""What a run tells of itself: its config, ranks and model, its result, and how far it was when it failed."""

from __future__ import annotations

import inspect
import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from rich.text import Text
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.calls import short_path
from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.device import get_device
from lockstep.dist import gather_object, get_backend, run_on_main
from lockstep.errors import error_in_words, place_of
from lockstep.evaluator import format_metrics
from lockstep.location import writing_into
from lockstep.logging.loggers import broken_between_values
from lockstep.masking import mask_text, mask_value, mask_words, printable, secrets_in
from lockstep.model import ModelWrapper, unwrap_model
from lockstep.runner.arguments import RunnerArguments
from lockstep.runner.run import Run, TrainRun, Workspace
from lockstep.strategy import Strategy
from lockstep.version import __version__

_logger = logging.getLogger(__name__)
_MOST_ENTRIES = 100  # of a dict or a list of options; more are data
_MOST_LETTERS = 4000
_LONGEST_ERROR = 2000  # characters of it in the records
_JOB = (  # variables by which a scheduler's records, and the logs of a cluster, find the job of a run
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST"),
    *("PBS_JOBID", "LSB_JOBID"),
)


def save_config(cfg: Any, run_dir: Path) -> None:
    """Write the config, if there is one, into the run's folder, its secrets masked."""
    file = run_dir / "config.py"
    with writing_into(run_dir):
        if isinstance(cfg, Config):
            cfg.masked().dump(file)
        elif cfg is not None and hasattr(cfg, "dump"):  # that of another library
            cfg.dump(file)
            file.write_text(mask_text(file.read_text(encoding="utf-8")), encoding="utf-8")


def write_environment(run: Run) -> None:
    """Write `environment.json` into the run's folder, if it is not there yet.

    **Collective**: every rank; rank 0 writes.
    """
    ranks = gather_object(_describe_rank()) or []

    def write() -> None:
        file = run.run_dir / "environment.json"
        if not file.exists():
            text = json.dumps(_describe_run(run, ranks), indent=1) + "\n"
            with writing_into(run.run_dir):
                file.write_text(text, encoding="utf-8")

    run_on_main(write)


def begin_records(run: Run) -> None:
    """Open the visualizers, and hand them the config, its secrets masked.

    **Collective**: every rank; rank 0 opens.

    Raises:
        Exception: a visualizer cannot be opened, for whatever reason; PeerError on the other ranks.
    """

    def begin() -> None:
        run.visualizer.open(run.run_dir)
        cfg = run.cfg if isinstance(run.cfg, Mapping) else _described(run.args)
        run.visualizer.add_config((cfg if isinstance(cfg, Config) else Config(cfg)).masked())

    run_on_main(begin)


def describe_model(model: nn.Module, strategy: Strategy) -> str:
    """Return one line on the model and its strategy."""
    core = unwrap_model(model)
    numel = model.full_numel if isinstance(model, ModelWrapper) else nn.Parameter.numel
    sizes = [(numel(parameter), parameter.requires_grad) for parameter in core.parameters()]
    count, trainable = sum(size for size, _ in sizes), sum(size for size, requires_grad in sizes if requires_grad)
    part = "" if trainable == count else f" ({trainable:,} trainable)"
    return f"{type(core).__name__}, {count:,} parameters{part}, {type(strategy).__name__}"


def note_failure(error: Exception, run: Run | Workspace) -> None:
    """Add to an error that ends a run how far that was; log it, and record it on rank 0.

    The terminal has it from Python, or from the launcher. The file of this rank's log is what remains of it.
    """
    done = run.iter if isinstance(run, Run) else 0
    if isinstance(run, Run) and isinstance(run.model, ModelWrapper):
        run.model.note_failure(error)
    file = getattr(run.cfg, "filename", None)
    config = "" if file is None else f", config {file}"
    error.add_note(f"(rank {run.rank} of {run.world_size}, after {done} iterations{config})")
    _logger.log(logging.DEBUG if run.rank == 0 else logging.WARNING, "the run has failed:", exc_info=error)
    if run.rank == 0 and isinstance(run, Run):
        place = {"mode": "failed", "epoch": run.epoch + 1, "iter": done}
        says = mask_text(error_in_words(error), secrets_in(run.cfg))
        run.records.write({**place, "error": printable(says[:_LONGEST_ERROR]), "at": place_of(error.__traceback__)})


def print_summary(run: Run, what: str, seconds: float) -> None:
    """Print the result of a run and the path of its folder."""
    console = run.console
    loop = run.last_evaluation
    console.rule(f"[bold]{what}[/] in {seconds:.1f} s", style="dim", align="left")
    if loop is not None and loop.metrics:
        # `loss` alone is that of the training, as in its log.
        mode = getattr(loop, "mode", "val")
        named = {f"{mode}/loss" if name == "loss" else name: value for name, value in loop.metrics.items()}
        result = f"result  {format_metrics(named, loop.units)}"
        if console.is_terminal:
            result = broken_between_values(result, console.width)
        console.print(Text.assemble(result[:8], (result[8:], "bold green")))
    # Never wrapped, so that it can be copied.
    console.print(Text.assemble("run     ", (short_path(run.run_dir), "bold")), soft_wrap=True)


def _describe_run(run: Run, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    loop = run.val_loop or run.test_loop
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": _command(),
        "job": _describe_job(),
        "model": describe_model(run.model, run.strategy),
        "arguments": {} if run.cfg is not None else mask_value(_described(run.args)),
        "seed": run.seed,
        "world_size": run.world_size,
        "backend": get_backend() if run.distributed else None,
        "lockstep": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "units": {} if loop is None else dict(loop.units),
        "counted_in": run.train_loop.unit if isinstance(run, TrainRun) else None,
        "ranks": ranks,
    }


def _described(args: RunnerArguments) -> dict[str, Any]:
    """Return what a run without a config was given, in JSON values: options, and names of classes; not the model."""
    given = {each.name: getattr(args, each.name) for each in fields(args) if each.name not in ("cfg", "model")}
    return {name: plain_data(_without_data(value)) for name, value in given.items() if value is not None}


def _without_data(value: Any) -> Any:
    """Return an argument with the names of classes in the place of what may hold data, such as a list of samples."""
    if isinstance(value, DataLoader):
        return {
            "dataset": type(value.dataset).__name__,
            "batch_size": value.batch_size,
            "num_workers": value.num_workers,
        }
    if isinstance(value, Optimizer):
        return repr(value)[:_MOST_LETTERS]  # with its options
    if isinstance(value, Mapping) and len(value) <= _MOST_ENTRIES:
        config = isinstance(value.get("dataset"), Mapping)
        return {k: _without_data(v) if k != "dataset" or config else type(v).__name__ for k, v in value.items()}
    if isinstance(value, list | tuple) and len(value) <= _MOST_ENTRIES:
        return [_without_data(item) for item in value]
    is_plain = value is None or isinstance(value, str | int | float | PurePath | torch.dtype | Enum)
    return value if is_plain or inspect.isclass(value) or inspect.isroutine(value) else type(value).__name__


def _command() -> str:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *mask_words(sys.argv[1:])])


def _describe_job() -> dict[str, str]:
    """Return what the scheduler calls this job, by variable; empty where there is none."""
    pod = ("POD_NAME", "HOSTNAME") if "KUBERNETES_SERVICE_HOST" in os.environ else ()
    return {name: os.environ[name] for name in (*_JOB, *pod) if name in os.environ}


def _describe_rank() -> dict[str, Any]:
    """Return what may differ from rank to rank."""
    kind = get_device()
    if kind == "cpu":
        device, name = "cpu", platform.processor() or platform.machine()
    else:
        index = torch.accelerator.current_device_index()
        module = torch.get_device_module(kind)
        device, name = f"{kind}:{index}", str(getattr(module, "get_device_name", lambda _: kind)(index))
    return {"host": platform.node(), "device": device, "device_name": name, "threads": torch.get_num_threads()}
