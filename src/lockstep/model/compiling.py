"""`torch.compile` in place, which keeps the names of parameters and classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import require_known
from lockstep.model.parts import leave_out_cache
from lockstep.tree import tree_map


def compile_in_place(model: nn.Module, parts: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile parts of a model; each is compiled when it is first called.

    Models of transformers whose parts are compiled keep no cache of keys and values, unless a call says `use_cache`. A
    copy of the model, as by deepcopy or pickle, is not compiled.

    Args:
        model: the model, not wrapped yet.
        parts: modules of the model, none inside another; or the model itself.
        options: arguments of `torch.compile`. On the CPU its default backend needs a C++ compiler.

    **Raises**: ConfigError if an option is no argument of `torch.compile`.

    **Cost**: seconds to minutes at the first call, and at the first call with other shapes; equal parts share it.
    """
    require_known("compile", options, list(signature(torch.compile).parameters)[1:])  # the first one is the model
    for part in parts:
        if part is model:
            model.compile(**options)
            return
        # Only `forward`: not the hooks that gather parameters, and inside activation checkpointing.
        part.forward = _CompiledForward(part.forward, options)
    leave_out_cache(model, of_packed=False)


class _CompiledForward:
    """A part's compiled `forward`; its copy is the `forward` of the part's copy, not compiled.

    torch's is a function, which deepcopy shares: the copy would compute with the weights of the original.
    """

    def __init__(self, forward: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._forward, self._compiled = forward, torch.compile(forward, **options)
        update_wrapper(self, self._compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _itself, (self._forward,)  # a method, which both bind to the copy


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile(model)`, compiled in place instead; or `model` itself.

    torch's wrapper hides the arguments of `forward`, and adds a prefix to every name.
    """
    dynamo = sys.modules.get("torch._dynamo")  # where it is not imported, nothing is compiled
    if dynamo is None or not isinstance(model, dynamo.OptimizedModule):
        return model
    # As `nn.Module.compile` does with options that only the wrapper knows (2.13).
    inner: nn.Module = model._orig_mod
    inner._compiled_call_impl = model.dynamo_ctx(inner._call_impl)
    return inner


def begin_compiled_step() -> None:
    """Tell torch that a step begins: outputs of CUDA graphs of earlier steps may be overwritten, those of this one not.

    Without it, torch counts each call of a compiled function without gradients as a step.
    """
    if _has_cuda_graphs():
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def kept_outputs(outputs: Any) -> Any:
    """Return what a model has predicted in memory that its next call does not overwrite, as CUDA graphs would.

    **Cost**: a copy of the outputs, where something is compiled with CUDA graphs (`mode="reduce-overhead"`).
    """
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs) if _has_cuda_graphs() else outputs


def _has_cuda_graphs() -> bool:
    # torch imports it where the first one is made, and has no public function that tells (2.13).
    return "torch._inductor.cudagraph_trees" in sys.modules
