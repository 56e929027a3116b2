"""Peak FLOP/s of devices: of well-known ones by their data sheets, of any other by a measurement."""

from __future__ import annotations

import re
from time import perf_counter
from typing import NamedTuple

import torch

from lockstep.device import get_device
from lockstep.errors import ConfigError

_MEASURED_SECONDS = 0.3
_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class PeakFlops(NamedTuple):
    """The peak FLOP/s of one device, and where the number comes from."""

    value: float
    source: str


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


def peak_flops(dtype: torch.dtype, *, measure: bool = False) -> PeakFlops:
    """Return the peak FLOP/s of this rank's device for matrix products of a dtype.

    Args:
        dtype: that of the factors. Products of float32 count as TF32 where torch may round them.
        measure: measure also where the data sheet is known.

    **Cost**: of a measurement, about half a second, or some seconds in a dtype that the device is slow in, such as
    float16 on a CPU; and two matrices of 1024 x 1024 elements on the CPU, or of 4096 x 4096 on an accelerator.

    Raises:
        ConfigError: the device must be measured, but can't multiply matrices of that dtype.
    """
    name = torch.cuda.get_device_name() if get_device() == "cuda" else ""
    may_round = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    known = None if measure else from_data_sheet(name, dtype, may_round=may_round)
    if known is not None:
        return PeakFlops(known, f"data sheet of {name}, {'TF32' if may_round else _short(dtype)}")
    return PeakFlops(_measured(dtype), f"measured on {name or get_device()}, {_short(dtype)}")


def from_data_sheet(name: str, dtype: torch.dtype, *, may_round: bool = False) -> float | None:
    """Return the peak FLOP/s of a device by its name, as `torch.cuda.get_device_name` returns it, or None.

    Example:
        >>> from_data_sheet("NVIDIA A100-SXM4-40GB", torch.bfloat16)
        312000000000000.0
        >>> from_data_sheet("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16)  # a part of it
    """
    bare = re.sub(r"^(NVIDIA|Tesla|AMD) ", "", name)
    for device in _DEVICES:
        if re.fullmatch(device.name, bare):
            value = _value(device, dtype, may_round)
            return None if value is None else value * 1e12
    return None


def _value(device: _Device, dtype: torch.dtype, may_round: bool) -> float | None:
    if dtype in _HALF:
        return device.half if device.has_bf16 or dtype == torch.float16 else None
    if dtype in _FP8:
        return device.fp8
    if dtype == torch.float32:
        return device.tf32 if may_round and device.tf32 else device.fp32
    return None


def _measured(dtype: torch.dtype) -> float:
    """Return the best rate of a large product in a few tenths of a second; random numbers of training do not change."""
    kind = get_device()
    size, calls = (1024, 1) if kind == "cpu" else (4096, 10)
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            factor = torch.randn(size, size, generator=generator).to(kind).to(dtype)
            product = factor @ factor
            best, end = float("inf"), perf_counter() + _MEASURED_SECONDS
            while best == float("inf") or perf_counter() < end:
                _wait(kind)
                start = perf_counter()
                for _ in range(calls):
                    torch.mm(factor, factor, out=product)
                _wait(kind)
                best = min(best, perf_counter() - start)
    except RuntimeError as error:
        raise ConfigError(
            f"`peak_flops` must be given, in FLOP/s, because {kind} can't be measured with {_short(dtype)}: {error}"
        ) from error
    return calls * 2.0 * size**3 / best


def _wait(kind: str) -> None:
    if kind != "cpu":
        torch.accelerator.synchronize()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
