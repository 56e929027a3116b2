"""The device `sim` and the backend `simccl`, compiled at the first use, for this process.

SIM_DEVICES says how many devices a process sees, 4 by default, and SIM_UUID what each says of itself.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import sync_batch_norm
import torch
import torch.distributed as torch_dist
from torch.utils.cpp_extension import load

WAITS = ("reads", "copies", "waits")
SOURCES = ("streams.cpp", "accelerator.cpp", "operators.cpp", "backend.cpp")


@cache
def simulator() -> Any:
    """Compile and register the device, once per process, and return the module that counts what the host does to it."""
    sources = [str(Path(__file__).with_name(name)) for name in SOURCES]
    native = load("lockstep_sim", sources, extra_cflags=["-O0", "-g0", "-std=c++20", "-DUSE_C10D_GLOO"])
    native.use()
    torch.utils.rename_privateuse1_backend("sim")
    module: Any = ModuleType("torch.sim")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: int(os.environ.get("SIM_DEVICES", "4"))
    module.get_device_properties = lambda device=None: SimpleNamespace(uuid=os.environ.get("SIM_UUID"))
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(torch.device("sim", device).index)
    module.synchronize = torch.accelerator.synchronize
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream
    module._is_in_bad_fork = native.is_forked
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch_dist.Backend.register_backend("simccl", _group, devices=["sim"])
    sync_batch_norm.register()
    return native


def counts() -> Counter[str]:
    """Return what the host has done to the device so far, by name.

    `reads`, `copies` and `waits` are those for which it has waited; `collective NAME` is how often one was begun; and
    `bytes` is what this rank gave to them.
    """
    return Counter(simulator().counts())


def cost(before: Counter[str]) -> tuple[int, str]:
    """Return how often the host has waited for the device since then, and the collectives that were begun, in words."""
    since = counts() - before
    begun = {name.removeprefix("collective "): n for name, n in since.items() if name.startswith("collective ")}
    return sum(since[name] for name in WAITS), ", ".join(
        name if n == 1 else f"{n} {name}" for name, n in sorted(begun.items())
    )


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return simulator().Simccl(_gloo, store, rank, size, timeout // timedelta(milliseconds=1))


def _gloo(store: Any, rank: int, size: int) -> Any:
    # It waits for ever: like NCCL, simccl has its own watchdog.
    return torch_dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(days=1))


if __name__ == "__main__":
    simulator()  # compiled before ranks need it
