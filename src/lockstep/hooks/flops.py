"""The floating-point operations of one training step, counted by torch's formulas as the step runs."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

from lockstep.errors import ConfigError
from lockstep.model.autograd_graph import backward_pass
from lockstep.model.shards import is_dtensor
from lockstep.tree import tree_leaves

_aten = torch.ops.aten
_FLASH = flop_registry[_aten._scaled_dot_product_flash_attention]
_FLASH_BACKWARD = flop_registry[_aten._scaled_dot_product_flash_attention_backward]
# Attention kernels that torch's counter does not know (2.13); the first pair is the CPU's.
_MORE: dict[Any, Callable[..., float]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _FLASH,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _FLASH_BACKWARD,
    _aten._scaled_dot_product_fused_attention_overrideable: _FLASH,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _FLASH_BACKWARD,
}
_ATTENTION_BACKWARD = {
    packet for packet in (*flop_registry, *_MORE) if re.fullmatch(r"aten\..*_attention_.*backward", str(packet))
}
# Operators of torch that multiply matrices, but have no formula. All other operators of these libraries multiply none.
_UNKNOWN = {
    *("_grouped_mm", "_scaled_grouped_mm", "_trilinear", "_sparse_mm", "_int_mm"),
    *("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
}
_KNOWN_LIBRARIES = {"aten", "prim", "prims", "rngprims", "c10d", "_c10d_functional", "fsdp", "_dtensor", "profiler"}


class StepFlops(FlopCounterMode):
    """Counts the model FLOPs of the training step that runs inside, forward and backward, on this rank.

    A multiplication and an addition are two operations. Matrix products, convolutions and attention are counted, from
    the shapes that this rank computes with; everything else is left out. So is what only an implementation needs:
    activations that `torch.utils.checkpoint` recomputes, attention scores that a fused backward pass recomputes, and
    the optimizer's update. Attention with a causal mask counts as attention without one.

    Inside, compiled code runs uncompiled, because only operators that torch dispatches are seen.

    Attributes:
        by_dtype: FLOPs by the dtype of the factors.
        unseen: names of operators that may multiply matrices, but have no formula.

    **Source**: `torch.utils.flop_counter.FlopCounterMode` and its formulas (2.13). Chowdhery et al., PaLM, 2022,
    appendix B: what counts as model FLOPs.

    Example:
        >>> with StepFlops() as counted:
        ...     torch.nn.Linear(8, 4)(torch.ones(5, 8)).sum().backward()
        >>> counted.total == 2 * (2 * 5 * 8 * 4)  # the outputs, and the gradient of the weight
        True

    Raises:
        ConfigError: the step multiplies DTensors, as in tensor parallelism.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()
        self.by_dtype: defaultdict[torch.dtype, float] = defaultdict(float)
        self.unseen: set[str] = set()
        self._is_updating = False
        self._open = ExitStack()

    @property
    def total(self) -> float:
        """FLOPs of all dtypes."""
        return sum(self.by_dtype.values())

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        for handle in (
            register_optimizer_step_pre_hook(partial(self._mark_update, True)),
            register_optimizer_step_post_hook(partial(self._mark_update, False)),
        ):
            self._open.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        finally:
            self._open.close()

    def _mark_update(self, begins: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count nothing within an optimizer's update, unless that evaluates the loss itself."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer again
        self._is_updating = begins and closure is None

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        """Count an operator that has run; torch's mode calls this for each."""
        if self._is_updating:
            return out
        formula = self.flop_registry.get(func_packet) or _MORE.get(func_packet)
        if formula is None:
            library, _, name = str(func_packet).partition(".")
            if library not in _KNOWN_LIBRARIES or name in _UNKNOWN:
                self.unseen.add(f"{library}::{name}")
        elif not _is_recomputed():
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            _refuse_split(tensors, func_packet)
            self.by_dtype[tensors[0].dtype] += _flops(formula, func_packet, out, args, kwargs)
        return out


class _NoModules(ModuleTracker):
    """Follows no modules: counts by module are not needed, and torch's hooks for them break `autograd.grad` (2.13)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


def _flops(formula: Callable[..., float], packet: Any, out: Any, args: Any, kwargs: Any) -> float:
    """Return what torch's formula says, except where that is not the number of model FLOPs."""
    if packet is _aten.convolution_backward:
        # The formula takes every input channel for an input of every output channel, also with groups (2.13).
        *head, groups, (for_input, for_weight, _) = args
        of_input, of_weight = (
            formula(*head, groups, mask, out_val=out)
            for mask in ([for_input, False, False], [False, for_weight, False])
        )
        return float(of_input + of_weight / groups)
    flops = formula(*args, **kwargs, out_val=out)
    if packet in _ATTENTION_BACKWARD:
        # Of the five products, the first recomputes the scores, with the head dim of the queries.
        query_dim, value_dim = args[1].shape[-1], args[3].shape[-1]
        return float(flops * (2 * query_dim + 2 * value_dim) / (3 * query_dim + 2 * value_dim))
    return flops


def _is_recomputed() -> bool:
    """Return whether `torch.utils.checkpoint` is running a forward pass again, within a backward pass."""
    if backward_pass() == -1 or not torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _refuse_split(tensors: list[Tensor], packet: Any) -> None:
    if any(map(is_dtensor, tensors)):
        raise ConfigError(
            f"FLOPs can't be counted where ranks split a product, but `{packet}` has a DTensor: some operators would "
            "show the shapes of all ranks, others those of one. Use "
            "MFUHook(flops_of=function of the batch, peak_flops=...), for instance with 6 FLOPs per parameter and token"
        )
