"""Accelerators of this process, through `torch.accelerator` wherever it can do the job."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def get_device() -> str:
    """Return the type of device that new models belong on, such as ``"cuda"``, ``"npu"``, ``"mps"`` or ``"cpu"``."""
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
    """Return the peak memory that this process's tensors held on a CUDA device since the last call, in MiB.

    The peak is reset, so that the next call speaks of what came after this one. Without CUDA the answer is 0.

    Units: MiB (2**20 bytes), rounded down.
    """
    if not torch.cuda.is_available():
        return 0
    peak_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(peak_bytes) // 2**20


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory of one device at one moment, in bytes; on the CPU, that of this process."""

    device: str
    allocated_bytes: int
    peak_bytes: int
    total_bytes: int


def memory_stats(device: torch.device | str | int | None = None) -> MemoryStats:
    """Return what this process holds now, what it held at most, and what there is.

    On an accelerator these are the caching allocator's figures and the device's size; on the CPU the resident set of
    the process, its high-water mark and the machine's physical memory.

    Source: `torch.accelerator.memory_allocated`, `max_memory_allocated`, `get_memory_info` (torch 2.9); getrusage(2).
    """
    accelerator = _accelerator()
    if isinstance(device, str):
        device = torch.device(device)
    if accelerator is None or (isinstance(device, torch.device) and device.type == "cpu"):
        return _process_memory()
    index = device.index if isinstance(device, torch.device) else device
    if index is None:
        index = torch.accelerator.current_device_index()
    return MemoryStats(
        device=f"{accelerator.type}:{index}",
        allocated_bytes=torch.accelerator.memory_allocated(index),
        peak_bytes=torch.accelerator.max_memory_allocated(index),
        total_bytes=torch.accelerator.get_memory_info(index)[1],
    )


def peak_memory() -> int:
    """Return the most that this process held, in bytes: `memory_stats().peak_bytes` at a tenth of its price.

    Where the kernel has not looked for a while, it may lag behind the present size.
    """
    if _accelerator() is not None:
        return torch.accelerator.max_memory_allocated()
    return _peak_resident_bytes()


def _accelerator() -> torch.device | None:
    # check_available: a build with CUDA on a machine without a GPU has an accelerator type, but no device.
    return torch.accelerator.current_accelerator(check_available=True)


def _is_available(name: str) -> bool:
    # Third-party backends appear as a module of torch once their package is imported.
    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available())


def _process_memory() -> MemoryStats:
    import os

    page_bytes = os.sysconf("SC_PAGE_SIZE")
    peak_bytes = _peak_resident_bytes()
    try:
        with open("/proc/self/statm") as statm:
            allocated_bytes = int(statm.read().split()[1]) * page_bytes
    except OSError:
        allocated_bytes = peak_bytes
    # The high-water mark is updated lazily by the kernel and may lag behind the present size.
    return MemoryStats(
        device="cpu",
        allocated_bytes=allocated_bytes,
        peak_bytes=max(peak_bytes, allocated_bytes),
        total_bytes=os.sysconf("SC_PHYS_PAGES") * page_bytes,
    )


def _peak_resident_bytes() -> int:
    import resource  # which Windows has not
    import sys

    # It counts KiB on Linux and bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
