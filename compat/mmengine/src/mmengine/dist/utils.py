"""What a rank knows of its group, where MMEngine has it."""

from __future__ import annotations

import os
from typing import Any

import lockstep.dist
from lockstep.dist import (
    barrier,
    cast_data_device,
    get_backend,
    get_comm_device,
    get_data_device,
    get_default_group,
    get_dist_info,
    get_local_group,
    get_local_rank,
    get_local_size,
    get_rank,
    get_world_size,
    infer_launcher,
    init_local_group,
    is_distributed,
    is_main_process,
    master_only,
)

__all__ = [
    "barrier",
    "cast_data_device",
    "get_backend",
    "get_comm_device",
    "get_data_device",
    "get_default_group",
    "get_dist_info",
    "get_local_group",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "infer_launcher",
    "init_dist",
    "init_local_group",
    "is_distributed",
    "is_main_process",
    "master_only",
]

_LOCAL_RANKS = {
    "slurm": ("SLURM_LOCALID",),
    "mpi": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
}


def init_dist(launcher: Any = None, *args: Any, **kwargs: Any) -> None:
    """Join the ranks; see `lockstep.dist.init_dist`, whose arguments these are.

    What Slurm or MPI says of the local rank takes precedence over `LOCAL_RANK`, as in MMEngine, because the scripts of
    packages set that to 0 in every process.
    """
    prefer_launcher(launcher)
    lockstep.dist.init_dist(launcher, *args, **kwargs)


def prefer_launcher(launcher: str | None) -> None:
    """Give `LOCAL_RANK` the number that this launcher has set, if there is one."""
    said = next((os.environ[name] for name in _LOCAL_RANKS.get(launcher or "", ()) if name in os.environ), None)
    if said is not None:
        os.environ["LOCAL_RANK"] = said
