"""What a run says at its beginning and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from torch import nn

from lockstep.dist import get_backend
from lockstep.hooks.progress import format_metrics
from lockstep.model import ModelWrapper, unwrap_model
from lockstep.strategy import Strategy

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner


def describe_model(model: nn.Module, strategy: Strategy) -> str:
    """Return one line on the model and how it is laid out."""
    core = unwrap_model(model)
    is_ours = isinstance(model, ModelWrapper)
    count = model.num_parameters if is_ours else sum(parameter.numel() for parameter in core.parameters())
    return f"{type(core).__name__}, {count:,} parameters, {type(strategy).__name__}"


def describe_ranks(world_size: int, device: str) -> str:
    """Return one line on the processes."""
    if world_size == 1:
        return f"1 rank on {device}"
    return f"{world_size} ranks on {device} over {get_backend()}"


def describe_place(runner: Runner) -> str:
    """Return one line on where a run is, for an error that ends it."""
    file = getattr(runner.cfg, "filename", None)
    config = "" if file is None else f", config {file}"
    return f"(rank {runner.rank} of {runner.world_size}, after {runner.iter} iterations{config})"


def print_summary(runner: Runner, what: str, seconds: float) -> None:
    """Print how a run has ended: what it reached, and where everything about it is."""
    console = runner.console
    loop = runner.last_evaluation
    console.rule(f"[bold]{what}[/] in {seconds:.1f} s", style="dim", align="left")
    if loop is not None and loop.metrics:
        result = format_metrics(loop.metrics, loop.evaluator.units)
        console.print(Text.assemble("result  ", (result, "bold green")))
    # Never wrapped, so that it can be copied.
    console.print(Text.assemble("run     ", (str(runner.run_dir), "bold")), soft_wrap=True)
