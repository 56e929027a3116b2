"""Starting and ending the default group: the only caller of `init_process_group` and `destroy_process_group`."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import resource
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, Literal, cast, overload
from weakref import ref

import torch
import torch.distributed as torch_dist
from torch.distributed import Store

from lockstep import groups
from lockstep.device import get_device, identity_of
from lockstep.dist.consistency import CheckMode, check_collectives, check_mode
from lockstep.dist.rendezvous import await_all, is_one_node, meet
from lockstep.dist.validate import NOT_GIVEN, either, is_int
from lockstep.engines import adopt_group, load_engine
from lockstep.errors import DistError, PeerError, TopologyError, counted
from lockstep.topology import LauncherName, Topology, infer_launcher, read_topology
from lockstep.watch.ending import end_watch, raised_error
from lockstep.watch.interrupt import end_process, groups_in_error, leave_process
from lockstep.watch.watch import heartbeat_seconds, start_watch

_SECONDS_FOR_THREADS = 0.1  # in which threads of an ended group free their tensors
_STORE_TIMEOUT = timedelta(minutes=5)
_TIMEOUT = timedelta(minutes=10)  # torch's own is 10 minutes with NCCL, and 30 with gloo
_OPEN_FILES = 2**16  # for connections to all ranks, each for several groups; shells often allow 1,024
_INIT_BACKENDS = ("torch", "deepspeed", "colossalai")
# Each backend's variable for the network interface of its own connections.
_INTERFACE_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}

_logger = logging.getLogger("lockstep.dist")
_undo = ExitStack()  # undoes what `init_dist` has set up; `destroy_dist` closes it
# Whether the group can't be ended: torch's watchdog sleeps for a minute after an error, and torch waits for it (2.11).
_is_stuck = False
# How many groups this process has joined at each address: separates those that use one store. Processes of a pool that
# outlives jobs, each at a port of its own, may have joined differently many before.
_generations: Counter[tuple[str | None, int | None]] = Counter()


def init_dist(
    launcher: LauncherName | None = None,
    backend: str | None = None,
    init_backend: Literal["torch", "deepspeed", "colossalai"] = "torch",
    *,
    timeout: float | timedelta | None = None,
    port: int | None = None,
    store: Store | None = None,
    **kwargs: Any,
) -> None:
    """Join this process to the job's default group, and bind its accelerator.

    The rank and the topology come from the launcher's environment; arguments take precedence over it. On a single node,
    every socket listens on the loopback interface only. `destroy_dist` ends the group, at exit at the latest.

    Args:
        launcher: what started the ranks: ``"pytorch"`` (torchrun, lockstep launch), ``"slurm"``, ``"mpi"`` (OpenMPI,
            MPICH, Intel MPI, PMIx) or ``"none"`` (this process is a group of one). None asks the environment, as
            `infer_launcher` does.
        backend: any backend of torch.distributed, or a map such as ``"cpu:gloo,cuda:nccl"``. None takes gloo for
            the CPU, and beside it the backend that torch has for this machine's accelerator. A backend that can't serve
            the CPU, such as ``"nccl"``, gets gloo beside it, too; ``"cuda:nccl"`` does not.
        init_backend: ``"torch"``, or the engine that adopts the group: ``"deepspeed"``, ``"colossalai"``.
        timeout: how long a collective waits for a missing rank, in seconds or as a timedelta; None is 10 minutes, with
            every backend. At the start, the ranks wait as long for each other; None is 5 minutes there. A warning says
            after 30 seconds for whom a rank waits, and what that one does, then at doubling intervals; the environment
            variable ``LOCKSTEP_HEARTBEAT`` sets the first.
        port: port of the store on rank 0. None takes ``MASTER_PORT``, else one derived from the job's identity.
        store: a store at which the ranks meet, in place of an address and port.
        **kwargs: passed on to `torch.distributed.init_process_group`; a `device_id` becomes the current device, in
            place of that of the local rank.

    **Collective**: every rank of the job.

    **Raises**: `TopologyError` (a ValueError) if variables contradict each other or are missing, before any rendezvous;
    and at it, if the port is taken, or two ranks have one number or device, or another world size; ValueError for an
    unknown launcher or backend, or an invalid timeout, port or variable; DistError if there is a default group already,
    or no such engine; CollectiveTimeoutError if not all ranks arrive in time; PeerError if rank 0 ends meanwhile.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce, get_world_size
        >>> data = torch.ones(2)
        >>> all_reduce(data)
        >>> data.tolist()
        [2.0, 2.0]

    **Source**: `torch.distributed.init_process_group` (2.13). TCPStore binds all addresses unless it is handed a
    socket.
    """
    global _undo
    if _is_stuck:
        raise DistError(
            "`init_dist` must be called in a new process, because the backend of a device has lost a rank of the group "
            "before, which torch can't end. Start the ranks again"
        )
    if torch_dist.is_initialized():
        raise DistError(
            "`init_dist` must be called once, but there is a default group already. Call destroy_dist() first"
        )
    if init_backend not in _INIT_BACKENDS:
        raise ValueError(f"`init_backend` must be one of {', '.join(_INIT_BACKENDS)}, but is {init_backend!r}")
    destroy_dist()  # cleans up after a group that was ended by torch's own function
    topology = read_topology(os.environ, infer_launcher() if launcher is None else launcher)
    backend = _checked_backend(backend)
    duration = _checked_timeout(timeout)
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 2**16):
        raise ValueError(f"`port` must be from 1 to 65535, or None for MASTER_PORT, but is {port!r}")
    _read_check_mode()
    heartbeat_seconds()  # raises if the variable is wrong
    if init_backend != "torch":
        load_engine(init_backend)  # fails before the others wait
    address = (topology.master_addr, port or topology.master_port)
    device = _bind_device(topology, backend, kwargs.get("device_id"))
    if device is not None and not _generations:
        # Not for a second group: torch splits a group with a device for each axis of a DeviceMesh, and that ends the
        # process by SIGSEGV unless the group is the first of its process (torch 2.11, 2.13; pytorch/pytorch#192106).
        kwargs.setdefault("device_id", device)
    with ExitStack() as undo:
        if is_one_node(topology):
            _keep_on_loopback(backend, undo)
        allow_files(_OPEN_FILES)
        shared_store = meet(topology, store, port, duration or _STORE_TIMEOUT, _generations[address])
        _tell_device(device, topology, shared_store)
        if topology.world_size > 1:
            await_all(shared_store, topology, duration or _STORE_TIMEOUT)
        _refuse_shared(device, topology, shared_store)
        torch_dist.init_process_group(
            backend,
            timeout=groups.backend_timeout(duration or _TIMEOUT, device is not None),
            store=shared_store,
            rank=topology.rank,
            world_size=topology.world_size,
            **kwargs,
        )
        _undo = undo.pop_all()
    pg = groups.get_default_group()
    assert pg is not None  # made a moment ago
    groups.topologies[pg] = topology
    groups.timeouts[pg] = duration or _TIMEOUT
    _generations[address] += 1
    if topology.world_size > 1:
        start_watch()
    atexit.register(_destroy_at_exit)
    if init_backend != "torch":
        adopt_group(init_backend, backend)


def destroy_dist() -> None:
    """Leave the default group and undo what `init_dist` set up. Does nothing if there is no group.

    It also runs automatically at exit, because a process that ends while a gloo group is alive may abort with exit code
    -6 instead of 0 (torch 2.13).

    **Collective**: every rank, at about the same time. It waits for up to three seconds for the others, rank 0 for up
    to five, to compare the calls of all ranks for the last time; after an error, rank 0 alone for up to two.

    **Raises**: CollectiveMismatchError if the ranks have made different calls, and the error of a call that failed
    without having raised it; the group is gone all the same, unless the backend of a device has lost a rank: then this
    process can't join another group, and ends with exit code 1. At exit, the error goes to `sys.excepthook`, and the
    exit code is 1.
    """
    global _is_stuck
    _is_stuck = False
    if groups.is_forked():  # the connections are those of the rank that has forked
        atexit.unregister(_destroy_at_exit)
        return
    difference = end_watch()
    _is_stuck = torch_dist.is_initialized() and bool(groups_in_error())
    has_raised = raised_error() is not None or any(calls.has_failed for _, calls in groups.recorded_groups())
    if _is_stuck and difference is None and not has_raised:
        text = "the backend of a device has met an error, and what it has computed since is wrong"
        difference = PeerError(f"{text} ({groups.resolve().this_rank})", rank=None, cause="")
    with _undo:
        if not _is_stuck:
            atexit.unregister(_destroy_at_exit)
            groups.forget_groups()
            if torch_dist.is_initialized():
                _end_group()
    if difference is not None:
        raise difference


@overload
def init_local_group(group_size: int) -> None: ...
@overload
def init_local_group(node_rank: int, num_gpus_per_node: int) -> None: ...
def init_local_group(  # type: ignore[misc]  # the overloads share places, not names
    node_rank: int = NOT_GIVEN, num_gpus_per_node: int | None = None, *, group_size: int = NOT_GIVEN
) -> None:
    """Make one group for each block of consecutive ranks, normally those of a node.

    Call it as ``init_local_group(node_rank, num_gpus_per_node)`` or ``init_local_group(group_size)``. `get_local_rank`
    and `get_local_size` work without it; `get_local_group` needs it on several nodes.

    **Collective**: every rank of the default group. **Raises**: ValueError if the size does not divide the world size,
    or if `node_rank` is not the node of this rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_local_rank, get_local_size, init_local_group
        >>> init_local_group(1)
        >>> get_local_rank(), get_local_size()
        (0, 1)
    """
    comm = groups.resolve()
    if num_gpus_per_node is not None and group_size is not NOT_GIVEN:
        raise TypeError("init_local_group() takes `node_rank` and `num_gpus_per_node`, or `group_size` alone")
    first = either("node_rank", node_rank, "group_size", group_size)
    size = first if num_gpus_per_node is None else num_gpus_per_node
    if not is_int(size):
        raise TypeError(f"the size of a local group must be an int, but is {size!r} ({comm.this_rank})")
    if size < 1 or comm.size % size:
        raise ValueError(
            f"the size of a local group must divide the world size, {comm.size}, but is {size} ({comm.this_rank})"
        )
    node = comm.rank // size
    if num_gpus_per_node is not None and node_rank != node:
        raise ValueError(
            f"`node_rank` must be {node} for {counted(size, 'rank')} per node, but is {node_rank} ({comm.this_rank})"
        )
    if comm.pg is None:
        return
    # Every rank takes part in making every group, as torch requires.
    made = [
        torch_dist.new_group(list(range(first, first + size)), timeout=comm.backend_timeout)
        for first in range(0, comm.size, size)
    ]
    groups.local_groups[comm.pg] = made[node]


def is_distributed() -> bool:
    """Return whether there is a default group (of any size)."""
    return torch_dist.is_initialized()


def _checked_backend(backend: str | None) -> str:
    if backend is None:
        return _default_backend()
    backend = backend.lower()
    known = torch_dist.Backend.backend_list
    for entry in backend.split(","):
        name = entry.rpartition(":")[2]
        if name not in known or name == "undefined":
            raise ValueError(
                f"`backend` must name backends of torch.distributed ({', '.join(sorted(set(known) - {'undefined'}))}), "
                f"but is {backend!r}"
            )
    devices = torch_dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" not in devices and torch_dist.is_gloo_available():
        return ",".join(["cpu:gloo", *(f"{device}:{backend}" for device in devices)])
    return backend


def _default_backend() -> str:
    """Return gloo for the CPU, and beside it what torch has for the accelerator of this machine."""
    kind = get_device()
    try:
        name = torch_dist.get_default_backend_for_device(kind)
    except ValueError:  # the accelerator's package has registered none
        return "gloo"
    is_available = getattr(torch_dist, f"is_{name}_available", lambda: True)
    return "gloo" if name == "gloo" or not is_available() else f"cpu:gloo,{kind}:{name}"


def _checked_timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not 0 < seconds < 1e9:  # torch counts nanoseconds in 64 bits
        raise ValueError(f"`timeout` must be positive, and below 1e9 seconds, but is {timeout!r}")
    return timedelta(seconds=seconds)


def _read_check_mode() -> None:
    """Set the mode of `check_collectives` to what the variable LOCKSTEP_CHECK says, if it is set."""
    try:
        check_collectives(cast(CheckMode, os.environ.get("LOCKSTEP_CHECK") or check_mode()))
    except ValueError as error:
        raise ValueError(f"LOCKSTEP_CHECK is not understood: {error}") from None


def _bind_device(topology: Topology, backend: str, chosen: torch.device | int | None) -> torch.device | None:
    """Make an accelerator the current one; return it if the backend should bind to it.

    Args:
        topology: rank and place of this process.
        backend: the backends of the group.
        chosen: the caller's; None takes that of this local rank.
    """
    kind = get_device()
    if kind in ("cpu", "mps"):
        return None
    index = chosen.index if isinstance(chosen, torch.device) else chosen
    if index is None:  # a launcher may show each rank one device alone, as srun --gpus-per-task=1 does
        index = topology.local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index) if "ccl" in backend else None


def _tell_device(device: torch.device | None, topology: Topology, store: Store) -> None:
    """Say in the store which device this rank has; there is no other way to know whether ranks share one."""
    if device is not None and (which := identity_of(device)):
        host = os.environ.get("NCCL_HOSTID", "")  # NCCL compares hosts, too, which its variable renames
        store.set(f"device/{topology.node_rank}/{topology.local_rank}", f"{which} {host}")


def _refuse_shared(device: torch.device | None, topology: Topology, store: Store) -> None:
    """Refuse devices that several ranks of this node have, unless they are ranks of several hosts to NCCL.

    It waits for no rank: all have told their devices before they came. **Cost**: two requests for each rank of the
    node, where there are devices.

    Raises:
        TopologyError: on all ranks of the node, if two of them share a device.
    """
    if device is None:
        return
    keys = [f"device/{topology.node_rank}/{local_rank}" for local_rank in range(topology.local_size)]
    found = [store.get(key).decode() if store.check([key]) else "" for key in keys]
    sharing = [str(local_rank) for local_rank, one in enumerate(found) if one and found.count(one) > 1]
    if sharing:
        raise TopologyError(
            f"each rank must have a device of its own, but the local ranks {', '.join(sharing)} share one with another "
            f"(rank {topology.rank} of {topology.world_size}, on {device}). Start one rank for each device, or use "
            "backend='gloo' to share them"
        )


def _keep_on_loopback(backend: str, undo: ExitStack) -> None:
    """Let backends connect over the loopback interface, unless a variable names another one."""
    for name, variable in _INTERFACE_VARIABLES.items():
        if (name == "gloo" or name in backend) and variable not in os.environ:
            undo.callback(os.environ.pop, variable, None)
            os.environ[variable] = "lo0" if sys.platform == "darwin" else "lo"


def allow_files(count: int) -> None:
    """Let this process have `count` files open at a time, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError):  # macOS may say that there is no limit, and has one, kern.maxfilesperproc
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _destroy_at_exit() -> None:
    """End the group at exit; Python ignores what a function raises there."""
    try:
        destroy_dist()
    except DistError as error:
        end_process(error)
    # There is an exception only if `launch.worker.end_soon` calls this. It ends the process by `os._exit` afterwards.
    if _is_stuck and sys.exception() is None:
        _logger.warning("the backend of the device has lost a rank, so this process ends without waiting for torch")
        leave_process()


def _end_group() -> None:
    held = ref(torch_dist.GroupMember.WORLD)
    torch_dist.destroy_process_group()
    if held() is not None:
        gc.collect()  # wrapped modules refer to their group in reference cycles
    if held() is not None:
        # Something still refers to the group, so its threads live on. One of them may be about to free the tensors of
        # the last collective, for which it needs the GIL; if the interpreter is shutting down, the process aborts
        # (torch 2.13).
        time.sleep(_SECONDS_FOR_THREADS)
