"""Devices, as lockstep finds them."""

from __future__ import annotations

from lockstep.device import (
    get_device,
    get_max_cuda_memory,
    is_cuda_available,
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_npu_available,
)

__all__ = [
    "get_device",
    "get_max_cuda_memory",
    "is_cuda_available",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_npu_available",
]
