"""The device `sim` and the backend `simccl` of accelerator.cpp, compiled at the first use, for this process.

SIM_DEVICES says how many devices a process sees, 4 by default, and SIM_UUID what each says of itself.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.utils.cpp_extension import load


@cache
def simulator() -> Any:
    """Compile and register the device, once per process, and return the module that counts its host reads."""
    source = Path(__file__).with_name("accelerator.cpp")
    native = load("lockstep_sim", [str(source)], extra_cflags=["-O0", "-g0", "-std=c++20", "-DUSE_C10D_GLOO"])
    native.register()
    torch.utils.rename_privateuse1_backend("sim")
    module: Any = ModuleType("torch.sim")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: int(os.environ.get("SIM_DEVICES", "4"))
    module.get_device_properties = lambda device=None: SimpleNamespace(uuid=os.environ.get("SIM_UUID"))
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(torch.device("sim", device).index)
    module.synchronize = lambda device=None: native.synchronize()
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch_dist.Backend.register_backend("simccl", _group, devices=["sim"])
    return native


def _group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return simulator().simccl(torch_dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


if __name__ == "__main__":
    simulator()  # compiled before ranks need it
