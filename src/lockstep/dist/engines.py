"""Engines that adopt lockstep's default group: the one module that imports DeepSpeed and ColossalAI."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from lockstep.errors import DistError


def load_engine(name: str) -> ModuleType:
    """Import an optional engine, ``"deepspeed"`` or ``"colossalai"``.

    **Raises**: DistError where it is not installed or can't be imported, with the way to get it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise DistError(
            f"init_backend={name!r} needs the package {name}, but importing it failed: {error}. "
            f"Install it with: pip install 'lockstep-engine[{name}]'"
        ) from error


def adopt_group(name: str, backend: str) -> None:
    """Hand the default group, which exists already, to the engine.

    **Collective**: every rank.

    **Source**: `deepspeed.init_distributed` (0.19) wraps an existing default group; `colossalai.launch` (0.5) would
    make
    one of its own, and what it does besides is to set the device and the seed, which `init_dist` and the Runner do.
    """
    engine = load_engine(name)
    if name == "deepspeed":
        # Its shared-memory collectives for the CPU are compiled at this moment, for 30 s and more, and replace gloo.
        import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        engine.init_distributed(dist_backend=backend, dist_init_required=False)
