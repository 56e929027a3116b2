"""What a `group` argument means: `None`, a `ProcessGroup` or a one-axis `DeviceMesh`, as one frozen `Group`."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.device import get_device

GroupLike: TypeAlias = ProcessGroup | DeviceMesh | None

# Which device types a backend moves by itself. torch also lists gloo for accelerators, but most of its collectives
# fail there, so that such data is staged through the CPU.
_NATIVE_DEVICES = {
    "gloo": "cpu",
    "mpi": "cpu",
    "nccl": "cuda",
    "xccl": "xpu",
    "hccl": "npu",
    "cncl": "mlu",
    "mccl": "musa",
}


# Reductions that a backend can't run, by lockstep's names. Of others than these two only the mean is in doubt.
_LACKING = {"gloo": frozenset[str](), "nccl": frozenset({"band", "bor", "bxor"})}
_KEPT_BYTES = 2**16
_MEAN_IN_DOUBT = frozenset({"mean"})


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A resolved group, as seen from this process.

    Attributes:
        reference: to torch's process group; None where no group exists (one process). Weak, so that a group that its
            owner destroys ends, with its threads and connections.
        rank: this process's rank within the group.
        size: number of ranks in the group.
        backend: torch's name of the backend, e.g. ``"gloo"``; None without a process group.
        devices: device types whose tensors the group moves without staging.
        comm_device: where everything else is staged to.
        lacks: reductions that the backend can't run.
        in_pairs: whether to talk pair by pair where that is possible, which is so on the CPU: gloo's sends and receives
            change no threads and copy nothing, so that an all_gather of 1 KiB takes half as long as gloo's own, and
            one of 16 MiB a third (2 and 4 ranks, torch 2.13). Accelerators order their messages; pairs could block.
        kept: what `keep` keeps.
    """

    reference: ReferenceType[ProcessGroup] | None
    rank: int
    size: int
    backend: str | None
    devices: frozenset[str]
    comm_device: torch.device
    lacks: frozenset[str] = frozenset()
    in_pairs: bool = False
    kept: deque[Tensor] = field(default_factory=lambda: deque(maxlen=8))

    def keep(self, sent: Tensor) -> None:
        """Keep a small tensor, which nobody else holds any more, until the backend's thread has let go of it.

        Otherwise that thread frees it, for which it has to get hold of the interpreter, and the next call waits for it:
        ten times as long as it takes itself (gloo, torch 2.13).
        """
        if sent.nbytes <= _KEPT_BYTES:
            self.kept.append(sent)

    @property
    def pg(self) -> ProcessGroup | None:
        """Torch's process group; None where no group exists."""
        return None if self.reference is None else self.reference()

    @property
    def bytes_device(self) -> torch.device:
        """Where bytes that are no tensor of the caller's travel: the CPU wherever the group serves it."""
        return torch.device("cpu") if "cpu" in self.devices or self.reference is None else self.comm_device

    @property
    def here(self) -> str:
        """Who speaks, for error messages."""
        return f"rank {self.rank} of {self.size}"


SOLO = Group(None, 0, 1, None, frozenset(), torch.device("cpu"))

_resolved: WeakKeyDictionary[ProcessGroup, Group] = WeakKeyDictionary()


def resolve(group: GroupLike = None) -> Group:
    """Resolve `group` to what the collectives need to know of it.

    Raises:
        ValueError: the calling process is not a member, or the mesh has several axes.
        TypeError: `group` is no group.
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


def process_group(group: GroupLike = None) -> ProcessGroup | None:
    """Return torch's process group behind `group`, or None where there is none."""
    return resolve(group).pg


def forget_groups() -> None:
    """Drop what is known of groups; their process groups are being destroyed."""
    _resolved.clear()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor keeps its plans by the ranks of a mesh, each with the names of groups that are gone (2.13). What
        # torch.distributed.tensor.debug does, which takes a second to import, as it brings the compiler.
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
        torch._C._clear_DTensor_sharding_propagator_cache()


def _process_group_of(group: object) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            remedy = f"Name one: mesh[{names[0]!r}]" if names else "Give it mesh_dim_names, and name one: mesh[name]"
            axes = ", ".join(names) if names else "without names"
            raise ValueError(f"`group` must be a mesh with one axis, but has {group.ndim} ({axes}). {remedy}")
        if group.get_coordinate() is None:
            raise ValueError(_not_a_member())
        return group.get_group()
    # torch.distributed.new_group hands this number to processes that are not in the group.
    if isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_not_a_member())
    raise TypeError(
        f"`group` must be None, a ProcessGroup or a one-axis DeviceMesh, but is {group!r} ({type(group).__name__})"
    )


def _not_a_member() -> str:
    world = f"rank {torch_dist.get_rank()} of {torch_dist.get_world_size()}"
    return (
        f"`group` must contain the calling process, but {world} is not in it. "
        "Call collectives of a group on its members only"
    )


def _describe(pg: ProcessGroup) -> Group:
    backends = [entry.split(":") for entry in str(torch_dist.get_backend_config(pg)).split(",")]
    # Some backends name every device type there is; those that are not there can't be talked on.
    present = {"cpu", get_device()}
    devices = {device for device, name in backends if _NATIVE_DEVICES.get(name, device) == device} & present
    accelerators = sorted(devices - {"cpu"})
    if accelerators:
        comm_device = torch.device(accelerators[0], torch.accelerator.current_device_index())
    else:
        comm_device = torch.device("cpu")
    lacks = frozenset[str]().union(*(_LACKING.get(name, _MEAN_IN_DOUBT) for _, name in backends))
    group = Group(
        ref(pg), pg.rank(), pg.size(), torch_dist.get_backend(pg), frozenset(devices), comm_device, lacks,
        in_pairs=comm_device.type == "cpu",
    )  # fmt: skip
    _resolved[pg] = group
    return group
