"""The default group's beginning and end: the only caller of `init_process_group` and `destroy_process_group`."""

from __future__ import annotations

import atexit
import gc
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import ref

import torch
import torch.distributed as torch_dist
from torch.distributed import HashStore, PrefixStore, Store

from lockstep.device import get_device
from lockstep.dist import groups
from lockstep.dist.engines import adopt_group, load_engine
from lockstep.dist.guard import check_collectives
from lockstep.dist.stores import loopback_interface, open_store, port_file, prefix_of
from lockstep.errors import CollectiveTimeoutError, DistError, TopologyError
from lockstep.topology import Topology, environ, read_topology

Launcher: TypeAlias = Literal["pytorch", "slurm", "mpi", "none"]

_THREADS_SETTLE_SECONDS = 0.1
_INIT_BACKENDS = ("torch", "deepspeed", "colossalai")
# Each backend's variable for the network interface it opens its own connections on.
_INTERFACE_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


@dataclass(slots=True)
class _World:
    """What `init_dist` set up and `destroy_dist` has to take down."""

    topology: Topology
    environment_set: list[str] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)


_world: _World | None = None
_generation = 0  # how many groups this process has joined; tells the meeting points of one job apart


def init_dist(
    launcher: Launcher | str | None = None,
    backend: str | None = None,
    init_backend: str = "torch",
    *,
    timeout: float | timedelta | None = None,
    port: int | None = None,
    store: Store | None = None,
    **kwargs: Any,
) -> None:
    """Join this process to the job's default group, and bind its accelerator.

    Reads who it is from the launcher's environment; arguments beat the environment. On a single node everything that
    is opened listens on the loopback interface only. The group is taken down by `destroy_dist`, at exit at the latest.

    Args:
        launcher: who started the ranks: ``"pytorch"`` (torchrun, lockstep launch), ``"slurm"``, ``"mpi"`` (OpenMPI,
            MPICH, Intel MPI, PMIx) or ``"none"`` (this process is a group of one). None asks the environment, as
            `infer_launcher` does.
        backend: any backend of torch.distributed, or a map such as ``"cpu:gloo,cuda:nccl"``. None takes that map where
            CUDA and NCCL are at hand, else gloo.
        init_backend: ``"torch"``, or the engine that adopts the group: ``"deepspeed"``, ``"colossalai"``.
        timeout: how long a collective waits for a missing rank, in seconds or as a timedelta. None takes torch's
            default.
        port: port of the store on rank 0. None takes ``MASTER_PORT``, else a free one (single node) or one derived
            from the job's identity (several nodes).
        store: a store to meet at, in place of address and port.
        **kwargs: passed on to `torch.distributed.init_process_group`.

    **Collective**: every rank of the job.

    **Raises**: `TopologyError` (a ValueError) where variables contradict each other or are missing, before any
    rendezvous; ValueError for an unknown launcher, backend, timeout or port; DistError if there is a default group
    already; CollectiveTimeoutError if not all ranks come in time.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce, get_world_size
        >>> data = torch.ones(2)
        >>> all_reduce(data)
        >>> data.tolist()
        [2.0, 2.0]

    **Source**: `torch.distributed.init_process_group` (2.13). TCPStore binds all addresses unless it is handed a
    socket.
    """
    if torch_dist.is_initialized():
        raise DistError(
            "`init_dist` must be called once, but there is a default group already. Call destroy_dist() first"
        )
    if init_backend not in _INIT_BACKENDS:
        raise ValueError(f"`init_backend` must be one of {', '.join(_INIT_BACKENDS)}, but is {init_backend!r}")
    destroy_dist()  # what a group that somebody ended by torch's own function has left set up
    topology = read_topology(os.environ, infer_launcher() if launcher is None else launcher)
    backend = _checked_backend(backend)
    duration = _checked_timeout(timeout)
    _check_port(port)
    _choose_checks()
    if init_backend != "torch":
        load_engine(init_backend)  # fails before the others wait
    device = _bind_device(topology, backend)
    world = _World(topology)
    if is_one_node(topology):
        _keep_on_loopback(backend, world)
    options: dict[str, Any] = {"backend": backend, "timeout": duration, **kwargs}
    if device is not None:
        options.setdefault("device_id", device)
    if options["timeout"] is None:
        del options["timeout"]
    _start(world, store, port, duration, options)
    if init_backend != "torch":
        adopt_group(init_backend, backend)


def destroy_dist() -> None:
    """Leave the default group and undo what `init_dist` set up. Does nothing where there is no group.

    Runs by itself when the process ends, because a process that ends while a gloo group is alive may abort with exit
    code -6 instead of 0 (torch 2.13).

    **Collective**: every rank, at about the same time; nothing is sent.
    """
    global _world
    world, _world = _world, None
    atexit.unregister(destroy_dist)
    groups.forget_groups()
    if torch_dist.is_initialized():
        _end_group()
    if world is not None:
        _clean_up(world)


def infer_launcher() -> str:
    """Return who started this process, by its environment: ``"pytorch"``, ``"slurm"``, ``"mpi"``, else ``"none"``."""
    return environ.infer_launcher(os.environ)


def is_distributed() -> bool:
    """Return whether there is a default group (of any size)."""
    return torch_dist.is_initialized()


def current_topology() -> Topology | None:
    """Return where this process stands among nodes; None where nothing says so.

    That is what `init_dist` read, or, where somebody else initialised the default group, what the environment says as
    long as it agrees with that group.
    """
    if _world is not None:
        return _world.topology
    try:
        topology = read_topology(os.environ, infer_launcher())
    except TopologyError:
        return None
    group = groups.resolve()
    return topology if (topology.rank, topology.world_size) == (group.rank, group.size) else None


def is_one_node(topology: Topology) -> bool:
    """Return whether all ranks are known to share one machine."""
    return topology.num_nodes == 1 and topology.local_size == topology.world_size


def _start(
    world: _World,
    store: Store | None,
    port: int | None,
    timeout: timedelta | None,
    options: dict[str, Any],
) -> None:
    global _world, _generation
    topology = world.topology
    try:
        if store is None:
            store = _open_store(world, port, timeout)
        else:
            store = PrefixStore(prefix_of(topology, _generation), store)
        torch_dist.init_process_group(store=store, rank=topology.rank, world_size=topology.world_size, **options)
    except BaseException as error:
        _clean_up(world)
        if isinstance(error, (torch_dist.DistStoreError, torch_dist.DistNetworkError)):
            raise _not_together(error, topology) from error
        raise
    _world = world
    if topology.world_size > 1:
        _generation += 1
    atexit.register(destroy_dist)


def _open_store(world: _World, port: int | None, timeout: timedelta | None) -> Store:
    topology = world.topology
    if topology.launcher == "none":
        return HashStore()
    loopback = is_one_node(topology)
    publishes = port is None and topology.master_port is None and topology.world_size > 1
    if loopback and topology.rank == 0 and publishes:
        world.leftovers.append(port_file(topology, _generation))
    return open_store(topology, port=port, timeout=timeout, loopback=loopback, generation=_generation)


def _checked_backend(backend: str | None) -> str:
    if backend is None:
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and torch_dist.is_nccl_available() else "gloo"
    known = torch_dist.Backend.backend_list
    for entry in backend.split(","):
        name = entry.rpartition(":")[2].lower()
        if name not in known or name == "undefined":
            raise ValueError(
                f"`backend` must name backends of torch.distributed ({', '.join(sorted(set(known) - {'undefined'}))}), "
                f"but is {backend!r}"
            )
        is_available = getattr(torch_dist, f"is_{name}_available", None)
        if is_available is not None and not is_available():
            raise ValueError(
                f"`backend` must be one that this build of torch has, but is {backend!r} and {name} is not there. "
                "Leave it out, or use 'gloo'"
            )
    return backend


def _checked_timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return None
    duration = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if duration <= timedelta(0):
        raise ValueError(f"`timeout` must be positive, but is {timeout!r}")
    return duration


def _check_port(port: int | None) -> None:
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 2**16):
        raise ValueError(f"`port` must be from 1 to 65535, or None for a free one, but is {port!r}")


def _choose_checks() -> None:
    mode = os.environ.get("LOCKSTEP_CHECK")
    if mode is None:
        return
    try:
        check_collectives(mode)
    except ValueError as error:
        raise ValueError(f"LOCKSTEP_CHECK is not understood: {error}") from None


def _bind_device(topology: Topology, backend: str) -> torch.device | None:
    """Make the accelerator of this local rank the current one; return it where the backend should bind to it."""
    kind = get_device()
    if kind in ("cpu", "mps"):
        return None
    count = torch.accelerator.device_count()
    owns_device = "nccl" in backend or "ccl" in backend
    if owns_device and topology.local_rank >= count:
        raise TopologyError(
            f"`local_rank` must be below the number of {kind} devices, {count}, but is {topology.local_rank} "
            f"(rank {topology.rank} of {topology.world_size}). Start at most {count} ranks on this node, or use "
            "backend='gloo' to share devices"
        )
    index = topology.local_rank % count
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index) if owns_device else None


def _keep_on_loopback(backend: str, world: _World) -> None:
    for name, variable in _INTERFACE_VARIABLES.items():
        if name in backend and variable not in os.environ:
            world.environment_set.append(variable)
            os.environ[variable] = loopback_interface()


def _not_together(error: Exception, topology: Topology) -> Exception:
    """Return what it means that the ranks did not find each other, in torch's words."""
    text = str(error)
    kind = CollectiveTimeoutError if "time" in text else DistError
    return kind(
        f"`init_dist` must meet all {topology.world_size} ranks, but at least one was not to be found "
        f"(rank {topology.rank} of {topology.world_size}). Did all start, with one MASTER_ADDR and MASTER_PORT? "
        f"torch says: {text}"
    )


def _end_group() -> None:
    held = ref(groups.resolve().pg)
    groups.forget_groups()
    torch_dist.destroy_process_group()
    if held() is not None:
        gc.collect()  # modules that are wrapped for several ranks refer to their group in cycles
    if held() is not None:
        # Somebody still refers to the group, so its threads live on. One of them may be about to free the tensors of
        # the last collective, for which it needs the interpreter; if that is ending, the process aborts (torch 2.13).
        time.sleep(_THREADS_SETTLE_SECONDS)


def _clean_up(world: _World) -> None:
    for variable in world.environment_set:
        os.environ.pop(variable, None)
    for path in world.leftovers:
        path.unlink(missing_ok=True)
