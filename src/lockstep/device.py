"""Accelerators of this process, their memory, and moving trees of tensors between devices."""

from __future__ import annotations

import os
import reprlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lockstep.tree import tree_items, tree_map

Moment: TypeAlias = float | torch.Event
"""A moment of a device: the host's time in seconds, or an event in the order of what an accelerator does."""


def get_device() -> str:
    """Return the device type on which to put new models, such as ``"cuda"``, ``"npu"``, ``"mps"`` or ``"cpu"``."""
    accelerator = _accelerator()
    return "cpu" if accelerator is None else accelerator.type


def is_cuda_available() -> bool:
    """Return whether a CUDA (or ROCm) device can be used."""
    return torch.cuda.is_available()


def is_npu_available() -> bool:
    """Return whether a Huawei Ascend NPU can be used (needs the package `torch_npu` to be imported)."""
    return _is_available("npu")


def is_mlu_available() -> bool:
    """Return whether a Cambricon MLU can be used (needs the package `torch_mlu` to be imported)."""
    return _is_available("mlu")


def is_mps_available() -> bool:
    """Return whether Apple's Metal backend can be used."""
    return torch.backends.mps.is_available()


def is_musa_available() -> bool:
    """Return whether a Moore Threads GPU can be used (needs the package `torch_musa` to be imported)."""
    return _is_available("musa")


def get_max_cuda_memory(device: torch.device | int | None = None) -> int:
    """Return the peak memory of this process's tensors on a CUDA device since the last call, in MiB.

    The peak is reset, so that the next call covers only the time after this one. Returns 0 without CUDA.

    Units: MiB (2**20 bytes), rounded down.
    """
    if not torch.cuda.is_available():
        return 0
    peak_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(peak_bytes) // 2**20


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory of one device at one time, in bytes; on the CPU, that of this process. `total_bytes`: None if unknown."""

    device: str
    allocated_bytes: int
    peak_bytes: int
    total_bytes: int | None


def memory_stats(device: torch.device | str | int | None = None) -> MemoryStats:
    """Return this process's present memory, its peak memory, and the total memory.

    On an accelerator these are the caching allocator's figures and the size of the device's memory; on the CPU, the
    resident set of the process, its high-water mark and the machine's physical memory. If an accelerator's allocator
    keeps no figures, those of the CPU are returned; `MemoryStats.device` is then ``"cpu"``.

    Args:
        device: the CPU or an accelerator of this process, or the index of one; by default the current one.

    Raises:
        ValueError: it is a device of another type, such as ``"meta"``.

    Source: `torch.accelerator.memory_allocated`, `max_memory_allocated`, `get_memory_info` (torch 2.9); proc(5) and
    getrusage(2).
    """
    kind = get_device()
    wanted = torch.device(kind, device) if isinstance(device, int) else torch.device(device or kind)
    if wanted.type not in ("cpu", kind):
        raise ValueError(
            f"`device` must be of type {' or '.join(dict.fromkeys((kind, 'cpu')))}, but is {str(wanted)!r}"
        )
    if wanted.type == "cpu" or not _counts_memory(kind):
        return _process_memory()
    index = torch.accelerator.current_device_index() if wanted.index is None else wanted.index
    return MemoryStats(
        device=f"{kind}:{index}",
        allocated_bytes=torch.accelerator.memory_allocated(index),
        peak_bytes=torch.accelerator.max_memory_allocated(index),
        total_bytes=_total_bytes(index),
    )


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes: `memory_stats().peak_bytes`, on an accelerator at less cost.

    It is None on an accelerator whose allocator keeps no figures.
    """
    accelerator = _accelerator()
    if accelerator is None:
        return _process_memory().peak_bytes
    return torch.accelerator.max_memory_allocated() if _counts_memory(accelerator.type) else None


def moment(device: torch.device) -> Moment:
    """Return the present moment: on the CPU the host's time; on an accelerator an event behind all work queued so far.

    The host does not wait for the event. While a CUDA graph is captured, the moment is NaN.

    **Cost**: on an accelerator, one event on its current stream.
    """
    if device.type == "cpu":
        return perf_counter()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return float("nan")
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def has_passed(when: Moment) -> bool:
    """Return whether a moment has come, without waiting for it."""
    return isinstance(when, float) or when.query()


def seconds_between(first: Moment, second: Moment) -> float:
    """Return the seconds from one moment of a device to another; both have passed.

    NaN if they are of different devices, or if the device measures no times.
    """
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    if isinstance(first, float) or isinstance(second, float):
        return float("nan")
    try:
        return first.elapsed_time(second) / 1e3
    except RuntimeError:  # a third-party device need not measure times
        return float("nan")


def identity_of(device: torch.device) -> str:
    """Return what tells an accelerator, by its number, from others of this host; "" if it is not known.

    A launcher may show each rank one device alone: without a UUID, all of these have the number 0.
    """
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    number = str(device.index) if torch.accelerator.device_count() > 1 else ""
    return str(getattr(properties, "uuid", None) or number)


def can_pin_memory() -> bool:
    """Return whether torch's loaders can put batches into pinned memory, from which an accelerator copies by itself."""
    accelerator = _accelerator()
    return accelerator is not None and accelerator.type != "mps"  # there torch's loader only warns (2.13)


def get_data_device(data: Any) -> torch.device:
    """Return the device on which all tensors in `data` live.

    Args:
        data: a tensor, or any tree of tensors and other leaves; other leaves are ignored.

    **Raises**: ValueError if tensors are on different devices, naming a tensor on each of two; TypeError if there is no
    tensor.

    **Example**::

        >>> get_data_device({"image": torch.zeros(2), "label": 3})
        device(type='cpu')
    """
    devices = [(path, leaf.device) for path, leaf in tree_items(data) if isinstance(leaf, Tensor)]
    if not devices:
        raise TypeError(f"`data` must hold a tensor, but holds none: {reprlib.repr(data)}")
    first_path, device = devices[0]
    for path, other in devices:
        if other != device:
            raise ValueError(
                f"`data` must live on one device, but `{first_path}` is on {device} and `{path}` on {other}. "
                "Move it with cast_data_device()"
            )
    return device


def cast_data_device(data: Any, device: torch.device | str, out: Any = None) -> Any:
    """Return `data` with its tensors on `device`; containers keep their types.

    Args:
        data: a tensor, or any tree of tensors and other leaves; other leaves are returned unchanged.
        device: the device to move to.
        out: a tree of the same structure as `data`, into whose tensors the values are copied; it is then returned.

    **Raises**: ValueError if `out` differs from `data` in its leaves or in the shape of a tensor, or if its tensors are
    not on `device` or of a dtype of a lesser kind, as integers for floats; nothing is copied then.
    """
    target = torch.device(device)
    if out is None:
        return tree_map(lambda x: x.to(target) if isinstance(x, Tensor) else x, data)
    sources, sinks = (sorted(tree_items(tree), key=itemgetter(0)) for tree in (data, out))
    paths, sink_paths = [path for path, _ in sources], [path for path, _ in sinks]
    if paths != sink_paths:
        raise ValueError(f"`out` must have the leaves of `data`, {paths}, but has {sink_paths}")
    pairs = [(path, x, sink) for (path, x), (_, sink) in zip(sources, sinks, strict=True) if isinstance(x, Tensor)]
    for path, source, sink in pairs:
        _check_sink(sink, source, path, target)
    for _, source, sink in pairs:
        copy_into(sink, source)
    return out


def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy `values`, of any shape with as many elements, into `target`, without recording it in the autograd graph."""
    # torch lets an inference tensor be changed under inference_mode alone.
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(values.reshape(target.shape))


def _accelerator() -> torch.device | None:
    # check_available: a build with CUDA on a machine without a GPU has an accelerator type, but no device.
    return torch.accelerator.current_accelerator(check_available=True)


@cache
def _counts_memory(accelerator: str) -> bool:
    # An allocator that is no `c10::DeviceAllocator`, as a third-party device may have, can't be asked (torch 2.13).
    try:
        torch.accelerator.max_memory_allocated()
    except (RuntimeError, AttributeError):
        return False
    return True


def _total_bytes(index: int) -> int | None:
    try:
        return torch.accelerator.get_memory_info(index)[1]
    except (RuntimeError, AttributeError):  # a third-party device need not support it
        return None


def _is_available(name: str) -> bool:
    # Third-party backends appear as a module of torch once their package is imported.
    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available())


def _process_memory() -> MemoryStats:
    sizes: dict[str, int] = {}
    with suppress(OSError), open("/proc/self/status") as status:  # Linux has it
        fields = (line.partition(":") for line in status)
        sizes = {name: int(size.split()[0]) * 1024 for name, _, size in fields if name in ("VmRSS", "VmHWM")}
    peak_bytes = sizes.get("VmHWM") or _peak_by_getrusage()
    return MemoryStats(
        device="cpu",
        allocated_bytes=sizes.get("VmRSS", peak_bytes),
        peak_bytes=peak_bytes,
        total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _peak_by_getrusage() -> int:
    # On Linux it may be the peak of the process that started this one, which survives fork and exec.
    import resource  # which Windows does not have

    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _check_sink(sink: Any, source: Tensor, path: str, target: torch.device) -> None:
    if not isinstance(sink, Tensor) or sink.shape != source.shape:
        got = tuple(sink.shape) if isinstance(sink, Tensor) else type(sink).__name__
        raise ValueError(f"`out` at `{path}` must be a tensor of shape {tuple(source.shape)}, but is {got}")
    if sink.device.type != target.type or (target.index is not None and sink.device.index != target.index):
        raise ValueError(f"`out` at `{path}` must live on {target}, but is on {sink.device}")
    if not torch.can_cast(source.dtype, sink.dtype):
        raise ValueError(
            f"`out` at `{path}` must have a dtype that {source.dtype} can be cast to, but has {sink.dtype}, in which "
            "values would be lost. Convert `data` before, or give `out` another dtype"
        )
