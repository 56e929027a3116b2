"""What a forward pass of a model costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mmengine.analysis.print_helper import _format_size

__all__ = ["activation_count", "flop_count", "get_model_complexity_info", "parameter_count"]

_ACTIVE = (nn.Linear, nn.modules.conv._ConvNd)


def parameter_count(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each module, by name; `""` is the model."""
    return {name: sum(one.numel() for one in module.parameters()) for name, module in model.named_modules()}


def flop_count(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, int]:
    """Return the multiplications with additions of a forward pass in each module, by name; `""` is the model.

    Convolutions, matrix products and attention count, as `torch.utils.flop_counter` counts them: the rest is little.
    """
    counter = FlopCounterMode(display=False)
    with _evaluating(model), counter:
        model(*inputs)
    # The counter names a module after its class, then its name, and counts a multiplication and an addition as two.
    root = type(model).__name__
    names = {f"{root}.{name}" if name else root: name for name, _ in model.named_modules()}
    found = dict.fromkeys(names.values(), 0)
    found.update(
        {names[own]: sum(by_op.values()) // 2 for own, by_op in counter.get_flop_counts().items() if own in names}
    )
    found[""] = counter.get_total_flops() // 2
    return found


def activation_count(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, int]:
    """Return how many numbers convolutions and linear layers in each module give out in a forward pass, by name."""
    own = dict.fromkeys((name for name, _ in model.named_modules()), 0)

    def watch(name: str) -> Any:
        def add(module: nn.Module, args: Any, output: Any) -> None:
            own[name] += output.numel() if isinstance(output, Tensor) else 0

        return add

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, _ACTIVE)
    ]
    try:
        with _evaluating(model):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: sum(own[one] for one in own if one == name or not name or one.startswith(f"{name}.")) for name in own}


def get_model_complexity_info(
    model: nn.Module,
    input_shape: Any = None,
    inputs: Any = None,
    show_table: bool = True,
    show_arch: bool = True,
) -> dict[str, Any]:
    """Return what a forward pass of a model costs.

    Args:
        model: the model.
        input_shape: the shape of one input without the batch, or a tuple of shapes; random inputs of one sample.
        inputs: the input, or a tuple of inputs, in place of `input_shape`.
        show_table: also give a table of all modules.
        show_arch: also give the model as text, with these numbers.

    Returns:
        `flops`, `activations` and `params` as numbers, and with `_str` as text; `out_table` and `out_arch`.

    Raises:
        ValueError: not exactly one of `input_shape` and `inputs` is given.
    """
    if (input_shape is None) == (inputs is None):
        raise ValueError("one of `input_shape` and `inputs` must be given, and not both")
    if inputs is None:
        shapes = [input_shape] if isinstance(input_shape[0], int) else input_shape
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        inputs = tuple(torch.randn(1, *shape, device=device) for shape in shapes)
    elif isinstance(inputs, Tensor) or not isinstance(inputs, tuple | list):
        inputs = (inputs,)
    inputs = tuple(inputs)
    flops, active, params = flop_count(model, inputs), activation_count(model, inputs), parameter_count(model)
    found = {"flops": flops[""], "activations": active[""], "params": params[""]}
    return {
        **found,
        **{f"{name}_str": _format_size(value) for name, value in found.items()},
        "out_table": _table(flops, active, params) if show_table else "",
        "out_arch": _arch(model, flops, active, params) if show_arch else "",
    }


def _table(*counts: dict[str, int]) -> str:
    table = Table("module", "#parameters or shape", "#flops", "#activations")
    flops, active, params = counts
    for name in params:
        shown: Sequence[int] = (params[name], flops[name], active[name])
        table.add_row(name or "model", *(_format_size(value) for value in shown))
    console = Console(width=140, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return "\n" + capture.get()


def _arch(model: nn.Module, *counts: dict[str, int]) -> str:
    flops, active, params = counts
    lines = []
    for name, module in model.named_modules():
        inner = "" if list(module.children()) else f"({module.extra_repr()})"
        told = (f"#params: {_format_size(params[name])}", f"#flops: {_format_size(flops[name])}",
                f"#acts: {_format_size(active[name])}")  # fmt: skip
        lines.append(f"{'  ' * (name.count('.') + bool(name))}{name} {type(module).__name__}{inner} {', '.join(told)}")
    return "\n".join(lines)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Let a model evaluate without gradients inside the context."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
