"""Process groups: what a `group` argument means, and this process's rank in a group. Nothing here communicates."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeAlias, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import GroupMember, ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from lockstep.calls import Calls
from lockstep.device import get_device
from lockstep.errors import DistError, TopologyError, ranks_in_words
from lockstep.topology import Topology, infer_launcher, read_topology

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger(__name__)
GroupLike: TypeAlias = ProcessGroup | DeviceMesh | None

# Backends of the CPU. torch also lists gloo for accelerators, but most of its collectives fail there, so such data is
# staged through the CPU.
_BACKENDS_OF_CPU = ("gloo", "mpi")

# Reductions that a backend can't run, by lockstep's names. NCCL has no bitwise ones. A backend that is not listed may
# lack these and the mean, so lockstep computes them from other collectives.
BIT_OPS = frozenset({"band", "bor", "bxor"})
"""The bitwise reductions."""
_MISSING_OPS = {"gloo": frozenset[str](), "mpi": frozenset({"mean"}), "nccl": BIT_OPS}
_FOR_WATCH = timedelta(minutes=1)  # from lockstep's timeout to that of a device's backend
_SECONDS_FOR_THREADS = 0.005  # for gloo's to leave Python before a process is forked


@dataclass(frozen=True, slots=True, eq=False)
class Comm:
    """A communicator: one process group as seen from this rank.

    Attributes:
        reference: weak reference to torch's process group; None where no group exists (one process). Weak, so that
            destroying the group also ends its threads and connections.
        rank: this process's rank within the group.
        size: number of ranks in the group.
        backends: torch's name of the backend for each device type, e.g. ``{"cpu": "gloo"}``.
        devices: device types whose tensors the group communicates without staging.
        device_type: type of `comm_device`.
        missing_ops: reductions that the backend can't run.
        calls: what this rank has called in the group; None without a process group.
        ranks: the ranks of the group within the default group.
        group_name: torch's name of the group, the same on all of its ranks; "" where torch does not tell it, as of a
            backend that is written in Python (2.13), so that the watch leaves the group out.
    """

    reference: ReferenceType[ProcessGroup] | None
    rank: int
    size: int
    backends: Mapping[str, str]
    devices: frozenset[str]
    device_type: str
    missing_ops: frozenset[str] = frozenset()
    calls: Calls | None = None
    ranks: tuple[int, ...] = (0,)
    group_name: str = ""

    @property
    def pg(self) -> ProcessGroup | None:
        """Torch's process group; None where no group exists."""
        return None if self.reference is None else self.reference()

    @property
    def is_alone(self) -> bool:
        """Whether no other process is there to speak with: no group, or a fake one."""
        return self.calls is None or self.pg is None

    @property
    def comm_device(self) -> torch.device:
        """The current device of the type that the group communicates; tensors on other devices are staged there."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    @property
    def timeout(self) -> timedelta | None:
        """How long a collective waits for a missing rank, as `init_dist` has set it; None without it."""
        return None if GroupMember.WORLD is None else timeouts.get(GroupMember.WORLD)

    @property
    def backend_timeout(self) -> timedelta | None:
        """The timeout of torch's own group."""
        return None if self.timeout is None else backend_timeout(self.timeout, bool(self.devices - {"cpu"}))

    @property
    def this_rank(self) -> str:
        """This process in words, for error messages: ``rank 0 of 2``."""
        return f"rank {self.rank} of {self.size}"

    @property
    def name(self) -> str:
        """The group in words, for error messages: ``the default group (2)``, ``the group of ranks 1, 3``."""
        if self.pg is None or self.pg is GroupMember.WORLD:
            return f"the default group ({self.size})"
        return f"the group of {ranks_in_words(self.ranks)}"

    def carries(self, data: Tensor) -> bool:
        """Return whether the group communicates a tensor without staging it."""
        # The first test is cheap, and decides the usual case.
        return (data.is_cpu and "cpu" in self.devices) or data.device.type in self.devices

    def to_wire(self, data: Tensor) -> Tensor:
        """Return `data`, or a contiguous copy on a device that the group supports, detached from the autograd graph."""
        if data.requires_grad:
            data = data.detach()
        if data.is_conj() or data.is_neg():  # backends read raw memory, without the lazy conj or neg
            data = data.resolve_conj().resolve_neg()
        if self.reference is not None and not self.carries(data):
            data = data.to(self.comm_device)
        return data.contiguous()


SOLO = Comm(None, 0, 1, {}, frozenset(), "cpu")
_ROOM = ("lockstep.groups", "lockstep.dist", "contextlib")
_may_be_alone = False  # whether a process without a group needs no warning: it has had one, or its user has been told

# Weak keys, so that nothing here keeps a destroyed group alive.
_resolved: WeakKeyDictionary[ProcessGroup, Comm] = WeakKeyDictionary()
# For each default group: the group of the ranks on this node; the topology and the timeout of `init_dist`.
local_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
topologies: WeakKeyDictionary[ProcessGroup, Topology] = WeakKeyDictionary()
timeouts: WeakKeyDictionary[ProcessGroup, timedelta] = WeakKeyDictionary()
# For each group whose backend does not serve the CPU: the gloo group beside it, where that has been made.
control_groups: WeakKeyDictionary[ProcessGroup, ReferenceType[ProcessGroup]] = WeakKeyDictionary()


def backend_timeout(timeout: timedelta, is_of_device: bool) -> timedelta:
    """Return the timeout of torch's own group.

    NCCL and other backends of devices end the process at their timeout. It is longer than lockstep's, so that the watch
    can raise an error first: it counts from the last call that the host has queued, which may be seconds after the one
    that hangs, and it asks thousands of ranks in some twenty seconds.
    """
    return timeout + _FOR_WATCH if is_of_device else timeout


def resolve(group: GroupLike = None) -> Comm:
    """Return the communicator of `group`, which holds what collectives need to know about it.

    Raises:
        ValueError: the calling process is not a member, or the mesh has several axes.
        TypeError: `group` is not a group.
    """
    if group is None:
        if not torch_dist.is_initialized():
            return SOLO
        pg = GroupMember.WORLD
        assert pg is not None  # is_initialized() says so
    elif isinstance(group, ProcessGroup):
        pg = group
    else:
        pg = _process_group_of(group)
    known = _resolved.get(pg)
    return known if known is not None else _describe(pg)


def known_groups() -> list[Comm]:
    """Return the communicators of all groups that have been used. Any thread may call this."""
    while True:
        with suppress(RuntimeError):  # another thread adds one during the iteration
            return list(_resolved.values())


def recorded_groups() -> list[tuple[Comm, Calls]]:
    """Return the groups of several ranks that the watch knows, and the record of their calls, on any thread."""
    return [
        (x, x.calls) for x in known_groups() if x.calls is not None and x.group_name and x.pg is not None and x.size > 1
    ]


def failure_of_any() -> DistError | None:
    """Return the error that says why a group can't be used further, if one can't; on any thread."""
    return next((calls.failure for _, calls in recorded_groups() if calls.failure is not None), None)


def forget_groups() -> None:
    """Drop what is known about groups; their process groups are being destroyed."""
    global _may_be_alone
    _resolved.clear()
    _may_be_alone = True
    if "torch.distributed.tensor" in sys.modules:
        # DTensor caches its plans by the ranks of a mesh; each plan holds names of groups that are gone (2.13).
        # torch.distributed.tensor.debug clears them in this way, but it imports the compiler, which takes a second.
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
        torch._C._clear_DTensor_sharding_propagator_cache()


def get_backend(group: GroupLike = None) -> str | None:
    """Return the name of the group's backend, of several that of its `get_comm_device`; None where no group exists."""
    comm = resolve(group)
    return comm.backends.get(comm.device_type)


def get_rank(group: GroupLike = None) -> int:
    """Return this process's rank within the group; 0 where no group exists."""
    return _asked(group).rank


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in the group; 1 where no group exists."""
    return _asked(group).size


def get_dist_info(group: GroupLike = None) -> tuple[int, int]:
    """Return ``(rank, world_size)`` within the group; ``(0, 1)`` where no group exists."""
    comm = _asked(group)
    return comm.rank, comm.size


def _asked(group: GroupLike) -> Comm:
    """Return the communicator of `group` for a function that says this process's place in it."""
    comm = resolve(group)
    warn_of_early_call(comm, "asks for this process's rank or world size, which are 0 and 1")
    return comm


def warn_of_early_call(comm: Comm, does: str) -> None:
    """Warn, once, if code of the user's own calls a function of this room before there is a group.

    Args:
        comm: the communicator of the call.
        does: what the code does, and what comes of it, "until there is a group".
    """
    global _may_be_alone
    if comm is not SOLO or _may_be_alone:
        return
    asking: FrameType | None = sys._getframe(1)
    while asking is not None and asking.f_globals.get("__name__", "").startswith(_ROOM):
        asking = asking.f_back
    if asking is None or asking.f_globals.get("__name__", "").partition(".")[0] in ("lockstep", "mmengine"):
        return
    _may_be_alone = True
    from torch.utils.data import get_worker_info  # not when this is imported, which takes time

    with suppress(TopologyError):
        topology = read_topology(os.environ, infer_launcher())
        if topology.world_size > 1:
            remedy = "Call lockstep.dist.init_dist() before"
            if get_worker_info() is not None:
                remedy = (
                    "A worker of a data loader that is not forked has no group: ask where the dataset is made, and "
                    "keep the answer in it"
                )
            _logger.warning(
                "%s:%d %s until there is a group, but it was started as rank %d of %d: what comes of it differs from "
                "what is meant. %s",
                asking.f_code.co_filename, asking.f_lineno, does, topology.rank, topology.world_size, remedy,
            )  # fmt: skip


def this_rank() -> str:
    """Return this process in words, for error messages: ``rank 0 of 2``."""
    return resolve().this_rank


def is_main_process(group: GroupLike = None) -> bool:
    """Return whether this process is rank 0 of the group."""
    return _asked(group).rank == 0


def get_default_group() -> ProcessGroup | None:
    """Return the default process group, or None where there is none."""
    return resolve().pg


def get_comm_device(group: GroupLike = None) -> torch.device:
    """Return the device on which the group communicates; data on other devices is staged through it.

    This is the accelerator bound to this process if the backend supports it (nccl: ``cuda``), else the CPU.
    """
    return resolve(group).comm_device


def inherit_timeout(made: Iterable[ProcessGroup]) -> None:
    """Give groups that others have made, of a mesh or an engine, the timeout of `init_dist`, in place of torch's."""
    timeout = resolve().backend_timeout
    if timeout is not None:
        for group in made:
            group.set_timeout(timeout)


def get_local_rank() -> int:
    """Return this process's rank among those on the same node; 0 where no group exists.

    **Raises**: DistError if the default group was not made by `init_dist` and the environment does not describe its
    nodes.
    """
    comm = _asked(None)
    local = _initialised_local_group(comm)
    return _known_topology("local rank", comm).local_rank if local is None else get_rank(local)


def get_local_size() -> int:
    """Return the number of ranks on this node; 1 where no group exists. Raises as `get_local_rank`."""
    comm = _asked(None)
    local = _initialised_local_group(comm)
    return _known_topology("local size", comm).local_size if local is None else get_world_size(local)


def get_node_rank() -> int:
    """Return the number of this node, counted from 0; 0 where no group exists. Raises as `get_local_rank`."""
    return _known_topology("node rank", _asked(None)).node_rank


def get_num_nodes() -> int:
    """Return the number of nodes; 1 where no group exists. Raises as `get_local_rank`."""
    return _known_topology("number of nodes", _asked(None)).num_nodes


def get_local_group() -> ProcessGroup | None:
    """Return the group of the ranks on this node, or None where no group exists.

    On a single node this is the default group itself, unless `init_local_group` made smaller groups.

    **Raises**: DistError on several nodes, if `init_local_group` has not been called.
    """
    local = _initialised_local_group(resolve())
    if local is not None:
        return local
    if get_num_nodes() == 1:
        return get_default_group()
    raise DistError(
        f"`get_local_group` on several nodes needs init_local_group() first, called on every rank ({this_rank()})"
    )


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Let only rank 0 of the default group run `func`; the others get None at once.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, master_only
        >>> @master_only
        ... def greet() -> str:
        ...     return "hello"
        >>> greet() == ("hello" if get_rank() == 0 else None)
        True
    """

    @wraps(func)
    def on_main_process(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if _asked(None).rank == 0 else None

    return on_main_process


def _process_group_of(group: object) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            remedy = f"Name one: mesh[{names[0]!r}]" if names else "Give it mesh_dim_names, and name one: mesh[name]"
            axes = ", ".join(names) if names else "without names"
            raise ValueError(f"`group` must be a mesh with one axis, but has {group.ndim} ({axes}). {remedy}")
        if group.get_coordinate() is not None:
            return group.get_group()
    # torch.distributed.new_group hands this number to processes that are not in the group.
    elif not (isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            f"`group` must be None, a ProcessGroup or a one-axis DeviceMesh, but is {group!r} ({type(group).__name__})"
        )
    world = f"rank {torch_dist.get_rank()} of {torch_dist.get_world_size()}"
    raise ValueError(
        f"`group` must contain the calling process, but {world} is not in it. "
        "Call collectives of a group on its members only"
    )


def _ranks_of(pg: ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group within the default group.

    Raises:
        ValueError: torch does not know them, as of torchft's groups, whose ranks change. Without them no object can be
            gathered, and no error can name who is absent.
    """
    why = "torch.distributed does not know it. Make it by torch.distributed.new_group or a mesh"
    with suppress(KeyError):
        ranks = tuple(torch_dist.get_process_group_ranks(pg))
        if len(ranks) == pg.size():
            return ranks
        why = f"it has {pg.size()} ranks, of which torch.distributed knows {len(ranks)}"
    raise ValueError(
        f"`group` must be one whose ranks torch.distributed knows, but is a {type(pg).__name__}: {why}. Or call the "
        "functions of torch.distributed with it, which lockstep neither checks nor watches"
    )


def _describe(pg: ProcessGroup) -> Comm:
    ranks = _ranks_of(pg)
    backends = dict(entry.split(":", 1) for entry in str(torch_dist.get_backend_config(pg)).split(","))
    # Some backends list every device type that exists; only those present on this machine can be used.
    present = {"cpu", get_device()}
    devices = {x for x, name in backends.items() if x == "cpu" or name not in _BACKENDS_OF_CPU} & present
    device_type = min(devices - {"cpu"}, default="cpu")
    missing = frozenset[str]().union(*(_MISSING_OPS.get(name, BIT_OPS | {"mean"}) for name in backends.values()))
    calls = None if "fake" in backends.values() else Calls()  # its ranks are not there
    if calls is not None and _is_forked:
        if pg.size() == 1:
            return SOLO
        calls.failure = _forked_error(f"rank {pg.rank()} of {pg.size()}")
    group_name = ""
    with suppress(RuntimeError):
        group_name = pg.group_name  # a group that has been destroyed has none any longer
    comm = _resolved[pg] = Comm(
        reference=ref(pg),
        rank=pg.rank(),
        size=pg.size(),
        backends=backends,
        devices=frozenset(devices),
        device_type=device_type,
        missing_ops=missing,
        calls=calls,
        ranks=ranks,
        group_name=group_name,
    )
    return comm


def _forked_error(rank: str) -> DistError:
    """Return why a group can't be used in a process that was forked from a rank, such as a data loader's worker.

    Its connections and threads are the rank's: torch would abort the process, or take messages that are the rank's.
    """
    return DistError(
        f"collectives must be called by the rank itself, but this process was forked from {rank}, as workers of a "
        "data loader are. Let the worker return what it has, and call the collective where the loader is iterated"
    )


_is_forked = False  # from a rank that had groups


def _leave_groups_to_parent() -> None:
    """Let collectives raise an error in a process that was forked from a rank; one rank alone needs no group."""
    global _is_forked
    _is_forked = torch_dist.is_initialized()
    for pg in list(distributed_c10d._world.pg_map):
        # One reference more than are dropped when the process ends: a group's destructor would wait for its threads,
        # which the fork has not copied.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))
    for pg in [pg for pg, comm in _resolved.items() if comm.size == 1]:
        _resolved[pg] = SOLO
    for comm in known_groups():
        if comm.calls is not None:
            comm.calls.failure = _forked_error(comm.this_rank)


def is_forked() -> bool:
    """Return whether this process was forked from a rank that had groups."""
    return _is_forked


def _let_threads_leave_python() -> None:
    """Give gloo's threads time to free the tensors of the last collective, for which they enter Python.

    A process that is forked while a thread enters or leaves Python 3.11 waits for ever for a lock that the thread held
    (`PyOS_AfterFork_Child`, 3.11.7), as a data loader's worker would that is started right after a collective.
    """
    if not _is_forked and any(comm.pg is not None and comm.size > 1 for comm in known_groups()):
        time.sleep(_SECONDS_FOR_THREADS)


os.register_at_fork(before=_let_threads_leave_python, after_in_child=_leave_groups_to_parent)


def _initialised_local_group(comm: Comm) -> ProcessGroup | None:
    return None if comm.pg is None else local_groups.get(comm.pg)


def _known_topology(what: str, comm: Comm) -> Topology:
    """Return the topology of the job; `comm`: of the default group.

    This is the topology that `init_dist` read. If the default group was initialised by other means, it is what the
    environment says, provided that it agrees with that group.
    """
    if comm.pg is None:
        return Topology("none")
    known = topologies.get(comm.pg)
    if known is not None:
        return known
    with suppress(TopologyError):
        read = read_topology(os.environ, infer_launcher())
        if (read.rank, read.world_size) == (comm.rank, comm.size):
            return read
    raise DistError(
        f"the {what} is unknown, because the default group was not made by init_dist and the environment "
        f"does not describe it ({comm.this_rank}). Start with init_dist, or set LOCAL_RANK and LOCAL_WORLD_SIZE"
    )
