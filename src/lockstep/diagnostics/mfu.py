"""A hook that records model FLOPs utilization: the FLOPs of a step, as it runs, and the peak of its device."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, Self, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

from lockstep.device import get_device
from lockstep.errors import ConfigError, require_number
from lockstep.model import unwrap_model
from lockstep.model.autograd_graph import backward_pass
from lockstep.model.shards import is_dtensor
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun
from lockstep.tree import tree_leaves

_Shapes: TypeAlias = tuple[torch.Size, ...]
_MOST_SHAPES = 16  # of batches that are counted; a further one costs in proportion to its number of elements
_aten = torch.ops.aten
_FLASH = flop_registry[_aten._scaled_dot_product_flash_attention]
_FLASH_BACKWARD = flop_registry[_aten._scaled_dot_product_flash_attention_backward]


def _product_flops(*args: Any, at: int = 0, **kwargs: Any) -> float:
    """Return the FLOPs of a product, by groups or not, whose factors are the arguments `at` and `at + 1`."""
    left, right = args[at : at + 2]
    # If only the right one is in groups of columns, each belongs to one matrix of the left one.
    used = left.shape[1:].numel() if left.dim() > right.dim() > 1 else left.numel()
    return float(2 * used * (right.shape[-1] if right.dim() > 1 else 1))


# Operators that torch's counter does not know (2.13). The first pair of attention kernels is the CPU's.
_EXTRA_FORMULAS: dict[Any, Callable[..., float]] = {
    **dict.fromkeys((_aten.mv, _aten._int_mm), _product_flops),
    **dict.fromkeys((_aten._grouped_mm, _aten._scaled_mm_v2), _product_flops),
    **dict.fromkeys((_aten.addmv, _aten.addmv_, _aten.addmm_, _aten._addmm_activation), partial(_product_flops, at=1)),
    **dict.fromkeys((_aten.baddbmm_, _aten.addbmm, _aten.addbmm_), partial(_product_flops, at=1)),
    _aten._scaled_dot_product_flash_attention_for_cpu: _FLASH,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _FLASH_BACKWARD,
    _aten._scaled_dot_product_fused_attention_overrideable: _FLASH,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _FLASH_BACKWARD,
}
_ATTENTION_BACKWARD = {
    packet
    for packet in (*flop_registry, *_EXTRA_FORMULAS)
    if re.fullmatch(r"aten\..*_attention_.*backward", str(packet))
}
# Operators of torch that multiply matrices, but have no formula; these are told. All other operators of these libraries
# are taken to multiply none.
_WITHOUT_FORMULA = {
    *("_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_foreach_mm", "_trilinear", "_sparse_mm", "_sparse_addmm"),
    *("_sparse_semi_structured_mm", "_sparse_semi_structured_addmm", "_sparse_semi_structured_linear"),
    *("_sparse_sparse_matmul", "_sparse_mm_reduce_impl", "_sparse_mm_reduce_impl_backward", "sparse_sampled_addmm"),
    *("_cudnn_attention_forward", "_cudnn_attention_backward", "_flash_attention_forward_no_dropout_inplace"),
    *("_weight_int4pack_mm", "_weight_int8pack_mm", "_mixed_dtypes_linear", "conv_tbc"),
    *("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
}
_KNOWN_LIBRARIES = {"aten", "prim", "prims", "rngprims", "c10d", "_c10d_functional", "fsdp", "_dtensor", "profiler"}


@HOOKS.register_module()
class MFUHook(Hook):
    """Record how much of the devices' peak FLOP/s training uses: model FLOPs utilization (MFU).

    Records get `flops_per_second`, the model FLOPs of all ranks per second, and `mfu`: that divided by the sum of the
    ranks' peaks, a fraction of 1. Where a peak is not known, they only get the former, and a warning says so. The time
    is that of whole iterations, with the wait for data and the update.

    The FLOPs of a step are counted while it runs, the first time that a batch has these shapes; see `StepFlops` for
    what counts. They depend on the model and the batch alone, not on activation checkpointing, compilation,
    accumulation or the strategy. All steps with batches of the same shapes are taken to be alike; give `flops_of` if
    they are not. Where batches have more than 16 shapes, a further one takes the FLOPs of the counted one that is
    nearest in its number of elements, in proportion to that number. After a change of what requires a gradient,
    counting begins anew with the next epoch.

    Args:
        peak_flops: peak FLOP/s of one rank's device in the dtype of the training. By default that of the device's data
            sheet, in the dtype of most FLOPs (TF32 for float32 that torch may round to it); that of a CPU, of a part of
            a GPU and of many GPUs is not known.
        flops_of: a function that returns the model FLOPs of one batch, forward and backward, instead of counting:
            where ranks split products (tensor and pipeline parallelism), or a kernel has no formula. `peak_flops` must
            then be a number.

    **Cost**: a counted step runs each operator through Python, uncompiled, which takes about 30 us more for each. Any
    other step takes some microseconds more.

    Raises:
        ConfigError: ranks compute on the same samples together, and `flops_of` is not given; or arguments contradict
            each other.

    **Source**: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.
    """

    priority = "ABOVE_NORMAL"  # ends the count before other hooks act, and is inside the timer's iteration

    def __init__(
        self,
        peak_flops: float | None = None,
        flops_of: Callable[[Any], float] | None = None,
    ) -> None:
        if peak_flops is not None:
            require_number("peak_flops", peak_flops, above=0)
        if flops_of is not None and not callable(flops_of):
            raise ConfigError(f"`flops_of` must be a function of a batch or None, but is {flops_of!r}")
        if flops_of is not None and peak_flops is None:
            raise ConfigError(
                f"`peak_flops` must be a number of FLOP/s where `flops_of` is given, but is {peak_flops!r}: without "
                "counting, the dtype of the products is not known"
            )
        self._flops_of = flops_of
        self._peak = None if peak_flops is None else (peak_flops, "given")
        self._warned_of: set[str] = set()  # warnings that are given once
        self._counting: StepFlops | None = None
        self._began = 0.0
        self._shapes: _Shapes = ()
        self._counted: dict[_Shapes, float] = {}
        self._trained: list[bool] = []
        self._unseen: set[str] = set()

    def before_train(self, runner: TrainRun) -> None:
        """Check that FLOPs can be counted."""
        if self._flops_of is None and runner.data_shard.size < runner.world_size:
            raise ConfigError(
                f"`flops_of` of MFUHook must be given where several ranks compute on the same samples: there are "
                f"{runner.world_size} ranks and {runner.data_shard.size} data shards, and none of them runs a whole "
                "step that could be counted. It returns the FLOPs of a batch, for instance 6 per parameter and token"
            )

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Forget the counts if other parameters require a gradient than before."""
        trained = [parameter.requires_grad for parameter in unwrap_model(runner.model).parameters()]
        if trained != self._trained:
            self._trained, self._counted = trained, {}

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Begin to count, if the batch has new shapes."""
        if self._flops_of is not None:
            return
        self._shapes = _shapes_of(data_batch)
        if self._shapes not in self._counted and len(self._counted) < _MOST_SHAPES:
            self._began = perf_counter()
            self._counting = StepFlops()
            self._counting.__enter__()

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Record the FLOPs of the iteration."""
        if self._counting is not None:
            counted = self._counting
            self.close()
            self._note_count(counted, runner)
        if self._flops_of is not None:
            flops = float(self._flops_of(data_batch))
        else:
            is_counted = self._shapes in self._counted
            flops = self._counted[self._shapes] if is_counted else self._estimated_flops(runner)
        hub = runner.message_hub
        # A batch that counts for nothing repeats the last one, while other ranks have more.
        hub.update_scalar("amounts/flops", flops if runner.train_loop.samples else 0.0)
        if self._peak is not None:
            hub.update_info("peak_flops", self._peak[0])

    def before_val(self, runner: Run) -> None:
        """Count nothing in an evaluation, which a loop by hand may make within an iteration."""
        if self._counting is not None:
            self._counting.is_paused = True

    def after_val(self, runner: Run) -> None:
        """Count again."""
        if self._counting is not None:
            self._counting.is_paused = False

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Drop the count of a step that a loop has left early."""
        self.close()

    def close(self) -> None:
        """Stop counting, also where a step has failed."""
        if self._counting is not None:
            counting, self._counting = self._counting, None
            counting.__exit__(None, None, None)
            if (error := sys.exception()) is not None:
                error.add_note(
                    "while MFUHook counted the FLOPs of this step. If the step succeeds without the hook, give its "
                    "FLOPs by MFUHook(flops_of=...)"
                )

    def _note_count(self, counted: StepFlops, runner: TrainRun) -> None:
        """Keep what a step took, and tell once what it left out, and the peak that it is compared with."""
        seconds = perf_counter() - self._began
        is_first = not self._counted
        self._counted[self._shapes] = counted.total
        if new := counted.unseen - self._unseen:
            self._unseen |= new
            runner.logger.warning(
                "no FLOPs are counted for %s: if these multiply matrices, MFU is higher than recorded. Register "
                "formulas with torch.utils.flop_counter.register_flop_formula, or use MFUHook(flops_of=...)",
                ", ".join(sorted(new)),
            )
        if self._peak is None and counted.by_dtype:
            dtype = max(counted.by_dtype, key=counted.by_dtype.__getitem__)
            may_round = dtype == torch.float32 and counted.rounded > counted.by_dtype[dtype] / 2
            name = _device_name()
            value = from_data_sheet(name, dtype, may_round=may_round)
            source = f"data sheet of {name}, {'TF32' if may_round else _dtype_name(dtype)}"
            self._peak = None if value is None else (value, source)
            if self._peak is None and "peak" not in self._warned_of:
                self._warned_of.add("peak")
                runner.logger.warning(
                    "the peak FLOP/s of %s in %s is not known, so records have flops_per_second, but no mfu. Give it "
                    "by MFUHook(peak_flops=...)", name, _dtype_name(dtype),
                )  # fmt: skip
        if is_first:
            peak = "unknown" if self._peak is None else f"{self._peak[0] / 1e12:.4g} TFLOP/s ({self._peak[1]})"
            runner.logger.info(
                "a step of each rank takes %.4g GFLOP, counted in %.2f s; peak of its device: %s",
                counted.total / 1e9, seconds, peak,
            )  # fmt: skip

    def _estimated_flops(self, runner: TrainRun) -> float:
        """Return the FLOPs of shapes that are not counted, from those that are."""
        if "shapes" not in self._warned_of:
            self._warned_of.add("shapes")
            runner.logger.info(
                "batches have more than %d shapes: the FLOPs of further ones follow from their number of elements",
                _MOST_SHAPES,
            )
        elements = _elements(self._shapes)
        nearest = min(self._counted, key=lambda shapes: abs(_elements(shapes) - elements))
        return self._counted[nearest] * elements / (_elements(nearest) or 1)


def _shapes_of(batch: Any) -> _Shapes:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    # A nested tensor has no shape that could be compared: one dim of it is a symbol, which no other has.
    return tuple(torch.Size([leaf.numel()]) if leaf.is_nested else leaf.shape for leaf in tensors)


def _elements(shapes: _Shapes) -> int:
    return sum(shape.numel() for shape in shapes)


class StepFlops(FlopCounterMode):
    """Counts the model FLOPs of the training step that runs inside, forward and backward, on this rank.

    A multiplication and an addition are two operations. Matrix products, convolutions and attention are counted, from
    the shapes that this rank computes with; everything else is left out. So is what only an implementation needs:
    activations that `torch.utils.checkpoint` recomputes, attention scores that a fused backward pass recomputes, and
    the optimizer's update. Attention with a causal mask counts as attention without one.

    Inside, compiled code runs uncompiled, because only operators that torch dispatches are seen.

    Attributes:
        by_dtype: FLOPs by the dtype of the factors.
        rounded: those of float32 that torch may round to TF32 on CUDA devices.
        unseen: names of operators that may multiply matrices, but have no formula.
        is_paused: whether nothing is counted; it is set during an optimizer's update.

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
        self.rounded = 0.0
        self.unseen: set[str] = set()
        self.is_paused = False
        self._updating: Any = None  # the outermost optimizer that makes an update
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
        if begins and closure is None and not self.is_paused:
            self.is_paused, self._updating = True, optimizer
        elif not begins and optimizer is self._updating:
            self.is_paused, self._updating = False, None

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        """Count an operator that has run; torch's mode calls this for each."""
        if self.is_paused:
            return out
        formula = self.flop_registry.get(func_packet) or _EXTRA_FORMULAS.get(func_packet)
        if formula is None:
            library, _, name = str(func_packet).partition(".")
            if library not in _KNOWN_LIBRARIES or name in _WITHOUT_FORMULA:
                self.unseen.add(f"{library}::{name}")
        elif not _is_recomputed():
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            if any(tensor.layout is not torch.strided for tensor in tensors):  # formulas take it for a dense one
                self.unseen.add(f"{func_packet} of sparse tensors".replace(".", "::", 1))
                return out
            if any(map(is_dtensor, tensors)):
                raise ConfigError(
                    f"FLOPs can't be counted where ranks split a product, but `{func_packet}` has a DTensor: some "
                    "operators would show the shapes of all ranks, others those of one. Use "
                    "MFUHook(flops_of=function of the batch, peak_flops=...), for instance with 6 FLOPs per parameter "
                    "and token"
                )
            flops = _flops(formula, func_packet, out, args, kwargs)
            self.by_dtype[tensors[0].dtype] += flops
            if tensors[0].dtype == torch.float32 and _may_round(func_packet):
                self.rounded += flops
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


def _may_round(packet: Any) -> bool:
    """Return whether torch may round the factors to TF32: of convolutions by default, of other products on demand."""
    if "convolution" in str(packet):
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        return torch.version.hip is None and bool(precision == "tf32")
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _is_recomputed() -> bool:
    """Return whether `torch.utils.checkpoint` is running a forward pass again, within a backward pass."""
    if backward_pass() == -1 or not torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class _Device(NamedTuple):
    """Peak TFLOP/s of dense products by data sheet; None where the device has no such unit.

    Attributes:
        name: a pattern for the whole name of the device, without the vendor's.
        half: float16 and bfloat16, on tensor cores.
        tf32: float32 that may be rounded to TF32.
        fp32: float32.
        fp8: float8.
        has_bf16: whether `half` also holds for bfloat16.
    """

    name: str
    half: float
    tf32: float | None
    fp32: float
    fp8: float | None = None
    has_bf16: bool = True


# Sources: the vendors' data sheets (NVIDIA V100, T4, A10, A30, A40, A100, L4, L40, L40S, H100, H200, HGX B200; AMD
# MI300X). Where NVIDIA's sheet states the value with sparsity, this is half of it.
_DEVICES = (
    _Device(r"V100-SXM2-\d+GB", 125, None, 15.7, has_bf16=False),
    _Device(r"V100-PCIE-\d+GB", 112, None, 14, has_bf16=False),
    _Device(r"T4", 65, None, 8.1, has_bf16=False),
    _Device(r"A10", 125, 62.5, 31.2),
    _Device(r"A30", 165, 82, 10.3),
    _Device(r"A40", 149.7, 74.8, 37.4),
    _Device(r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe", 312, 156, 19.5),
    _Device(r"L4", 121, 60, 30.3, 242.5),
    _Device(r"L40", 181, 90.5, 90.5, 362),
    _Device(r"L40S", 362, 183, 91.6, 733),
    _Device(r"H100 PCIe", 756.5, 378, 51, 1513),
    _Device(r"H100 NVL|H200 NVL", 835.5, 417.5, 60, 1670.5),
    _Device(r"H100 80GB HBM3|H200|GH200 480GB", 989.5, 494.5, 67, 1979),
    _Device(r"B200", 2250, 1125, 75, 4500),
    _Device(r"Instinct MI300X", 1307.4, 653.7, 163.4, 2614.9),
)


def from_data_sheet(name: str, dtype: torch.dtype, *, may_round: bool = False) -> float | None:
    """Return the peak FLOP/s of a device for matrix products, by its name, or None if it is not known.

    Args:
        name: as `torch.cuda.get_device_name` returns it.
        dtype: that of the factors.
        may_round: whether those of float32 may be rounded to TF32.

    Example:
        >>> from_data_sheet("NVIDIA A100-SXM4-40GB", torch.bfloat16)
        312000000000000.0
        >>> from_data_sheet("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16)  # a part of it
    """
    bare = re.sub(r"^(NVIDIA|Tesla|AMD) ", "", name)
    device = next((device for device in _DEVICES if re.fullmatch(device.name, bare)), None)
    if device is None:
        return None
    tflops = {
        torch.float16: device.half,
        torch.bfloat16: device.half if device.has_bf16 else None,
        torch.float32: device.tf32 if may_round and device.tf32 else device.fp32,
        **dict.fromkeys(_FP8, device.fp8),
    }.get(dtype)
    return None if tflops is None else tflops * 1e12


def _device_name() -> str:
    return torch.cuda.get_device_name() if get_device() == "cuda" else get_device()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
