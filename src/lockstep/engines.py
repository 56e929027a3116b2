"""Engines that adopt lockstep's default group: the one module that imports DeepSpeed and ColossalAI."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as torch_dist

from lockstep.errors import DistError

# Set by torch's compiler when it is first imported, possibly by an engine, DDP or FSDP.
SET_BY_TORCH = ("TORCHINDUCTOR_", "TRITON_")
INSTALL = {
    "deepspeed": "pip install 'lockstep-engine[deepspeed]'",
    "colossalai": "the recipe in docs/engines.md, because its own requirements exclude this torch",
}
# The last default group that was passed to DeepSpeed; only compared with the present one.
_adopted: weakref.ref[torch_dist.ProcessGroup] | None = None


def load_engine(name: str) -> Any:
    """Import an optional engine, ``"deepspeed"`` or ``"colossalai"``, or one of its modules.

    **Raises**: DistError if it is not installed or can't be imported; the message says how to install it.
    """
    package = name.partition(".")[0]
    no_device = package == "deepspeed" and not torch.accelerator.is_available()
    try:
        # DeepSpeed looks for a device when it is imported, and warns if it has to guess.
        with undisturbed({"DS_ACCELERATOR": "cpu"} if no_device else {}):
            return import_module(name)
    except ImportError as error:
        raise DistError(
            f"init_backend={package!r} needs the package {package}, but importing it failed: {error}. "
            f"Install it with {INSTALL[package]}"
        ) from error


def adopt_group(name: str, backend: str) -> None:
    """Pass the existing default group to the engine.

    **Collective**: every rank.

    **Source**: `deepspeed.init_distributed` (0.19) wraps an existing default group; `colossalai.launch` (0.5) is not
    called: it would make its own group, and otherwise only sets the device and the seed, which `init_dist` and the
    Runner do.
    """
    engine = load_engine(name)
    if name == "deepspeed":
        _forget_former_group()
        # Here DeepSpeed would compile its shared-memory collectives for the CPU, for 30 s or more, and use them instead
        # of gloo. This entry prevents that. The table is set up first: DeepSpeed makes it by running a compiler, and
        # leaves a file open.
        known = vars(load_engine("deepspeed.ops")).setdefault("__compatible_ops__", {})
        known["deepspeed_shm_comm"] = False
        engine.init_distributed(dist_backend=backend, dist_init_required=False)


@contextmanager
def undisturbed(variables: Mapping[str, str]) -> Iterator[None]:
    """Run an engine's code without side effects: restore the environment afterwards, ignore deprecation warnings.

    Args:
        variables: environment variables to set inside, if they are not set already.
    """
    before = dict(os.environ)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings():
            # Engines are often the first to import torch's compiler, which warns about torch's own code (2.13).
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        set_environment(before)


def set_environment(variables: Mapping[str, str]) -> None:
    """Make the environment equal to `variables`, except for variables set by torch's compiler."""
    for name in os.environ.keys() - variables.keys():
        if not name.startswith(SET_BY_TORCH):
            del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _forget_former_group() -> None:
    """Make DeepSpeed drop a default group that has ended, and the groups made from it, which it would keep forever.

    **Source**: `deepspeed.comm.destroy_process_group` (0.19) does this, but also destroys the group.
    """
    global _adopted
    group = torch_dist.group.WORLD
    if _adopted is not None and _adopted() is not group:
        load_engine("deepspeed.comm.comm").cdb = None
        load_engine("deepspeed.utils.groups")._release_process_group_references()
    _adopted = None if group is None else weakref.ref(group)
