"""The mesh over which FSDP shards, from any of the arguments that may specify it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep import dist
from lockstep.errors import ConfigError
from lockstep.groups import inherit_timeout
from lockstep.model.fsdp_arguments import Sharding
from lockstep.model.tensor_parallel_plan import Request

MeshLike: TypeAlias = DeviceMesh | Sequence[int]
GroupsLike: TypeAlias = ProcessGroup | DeviceMesh | Sequence[ProcessGroup]

REPLICATE, SHARD = "replicate", "shard"
DATA_AXES, TENSOR_AXIS = ("dp_replicate", "dp_shard"), "tp"


class Meshes(NamedTuple):
    """The meshes of a sharded model.

    Attributes:
        data: the ranks over which samples and parameters are sharded; one axis or two.
        tensor: the ranks that compute on the same samples together; None without tensor parallelism.
        whole: all ranks in one mesh.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None
    whole: DeviceMesh


def make_meshes(
    device_type: str,
    sharding: Sharding,
    request: Request | None,
    process_group: GroupsLike | None,
    device_mesh: MeshLike | None,
) -> Meshes:
    """Return the meshes: with the axis `shard`, or the axes `replicate` and `shard`; and with `tp` last if requested.

    Args:
        device_type: where parameters live during a step.
        sharding: whether the mesh has two axes, or no shards.
        request: what `tensor_parallel` asks for. The axes are then `dp_shard` and `tp`, or `dp_replicate`, `dp_shard`
            and `tp`: neighbouring ranks compute together, because they communicate most.
        process_group: the ranks to shard over; a pair (to shard over, to replicate over); or a one-axis mesh.
        device_mesh: the mesh itself, or its shape (replicas, shards).

    Without a mesh or groups, parameters are sharded over all ranks, or within each node if hybrid. Without a default
    group, this process becomes a group of one.

    **Collective**: every rank.

    Raises:
        ValueError: the arguments contradict each other, or do not fit the number of ranks.
        ConfigError: the same for `tensor_parallel`, on every rank.
    """
    if not dist.is_distributed():
        dist.init_dist("none")
    if request is None:
        mesh = _data_mesh(device_type, sharding, process_group, device_mesh)
        return Meshes(mesh, None, mesh)
    if process_group is not None:
        raise ConfigError(
            "`process_group` must not be given with `tensor_parallel`. Give device_mesh=(replicas, shards), or a mesh "
            f"whose last axis is called {TENSOR_AXIS!r}"
        )
    if isinstance(device_mesh, DeviceMesh):
        whole = _checked(device_type, device_mesh, request.degree)
    elif request.degree is None:
        raise ConfigError(
            "`tensor_parallel` must have the key 'degree', the number of ranks that compute together, or `device_mesh` "
            f"must be a mesh with an axis called {TENSOR_AXIS!r}"
        )
    else:
        shape = _data_shape(request.degree, device_mesh, sharding)
        names = (*DATA_AXES[-len(shape) :], TENSOR_AXIS)
        whole = init_device_mesh(device_type, (*shape, request.degree), mesh_dim_names=names)
        inherit_timeout(whole)
    assert whole.mesh_dim_names is not None
    return Meshes(whole[whole.mesh_dim_names[:-1]], whole[TENSOR_AXIS], whole)


def _data_mesh(
    device_type: str, sharding: Sharding, process_group: GroupsLike | None, device_mesh: MeshLike | None
) -> DeviceMesh:
    if device_mesh is not None and process_group is not None:
        raise ValueError("`process_group` and `device_mesh` must not be given both: they say the same thing")
    given = device_mesh if device_mesh is not None else process_group
    if sharding.replicated:
        if given is not None:
            raise ValueError(
                "`sharding_strategy` must shard where a process_group or device_mesh is given, but is NO_SHARD. "
                "Use MMDistributedDataParallel with that group"
            )
        return _grid(device_type, torch.arange(dist.get_world_size()).view(-1, 1))
    mesh = _whole(device_type, hybrid=bool(sharding.hybrid)) if given is None else _given(device_type, given)
    if sharding.hybrid not in (None, mesh.ndim == 2):
        wanted = "two axes (replicas, shards)" if sharding.hybrid else "one axis"
        raise ValueError(
            f"`sharding_strategy` must fit the mesh, but it wants {wanted} and the mesh has {mesh.ndim}. Leave one out"
        )
    return mesh


def _data_shape(degree: int, shape: Any, sharding: Sharding) -> tuple[int, ...]:
    """Return the lengths of the axes before `tp`: one axis, or replicas and shards."""
    world_size = dist.get_world_size()
    if world_size % degree:
        raise ConfigError(
            f"the degree of `tensor_parallel` must divide the number of ranks, but is {degree} of {world_size}. Start "
            f"{max(1, world_size // degree) * degree} ranks, or choose another degree"
        )
    ranks = world_size // degree
    if shape is None:
        if sharding.hybrid:
            raise ConfigError(
                "`device_mesh` must be given as (replicas, shards) for a hybrid `sharding_strategy` with "
                f"`tensor_parallel`, so that replicas * shards is {ranks}, but is None"
            )
        return (ranks, 1) if sharding.replicated else (ranks,)
    return _checked_shape(shape, degree)


def _checked_shape(shape: Any, degree: int = 1) -> tuple[int, int]:
    """Return the shape (replicas, shards) of all ranks, or of all groups of `degree` ranks."""
    if len(shape) != 2 or not all(isinstance(length, int) and length > 0 for length in shape):
        raise ConfigError(f"`device_mesh` must be a mesh or a shape (replicas, shards), but is {shape!r}")
    world_size = dist.get_world_size()
    if shape[0] * shape[1] * degree != world_size:
        wanted = f"{world_size // degree} groups of {degree} ranks each" if degree > 1 else f"{world_size} ranks"
        raise ConfigError(
            f"`device_mesh` must be a shape for {wanted}, but is {tuple(shape)} "
            f"(rank {dist.get_rank()} of {world_size})"
        )
    return shape[0], shape[1]


def _checked(device_type: str, mesh: DeviceMesh, degree: int | None) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if mesh.device_type != device_type or mesh.ndim not in (2, 3) or not names or names[-1] != TENSOR_AXIS:
        raise ConfigError(
            f"`device_mesh` must be a mesh of {device_type} devices with one or two axes for the data and a last one "
            f"called {TENSOR_AXIS!r}, but has {', '.join(names) or 'no names'} on {mesh.device_type}. For example "
            f"init_device_mesh({device_type!r}, (2, 2), mesh_dim_names={(DATA_AXES[1], TENSOR_AXIS)})"
        )
    length = mesh[TENSOR_AXIS].size()
    if degree not in (None, length):
        raise ConfigError(
            f"the degree of `tensor_parallel` must be the length of the mesh's axis {TENSOR_AXIS!r}, {length}, but is "
            f"{degree}. Leave one out"
        )
    return mesh


def _whole(device_type: str, *, hybrid: bool) -> DeviceMesh:
    """Return a mesh of all ranks, in one row, or with a row for each node."""
    group = dist.get_default_group()
    assert group is not None
    if not hybrid:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(SHARD,))
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(dist.all_gather_object(dist.get_node_rank())):
        nodes.setdefault(node, []).append(rank)
    rows = list(nodes.values())
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            "`sharding_strategy` 'HYBRID_SHARD' must find equally many ranks on every node, but finds "
            f"{[len(row) for row in rows]}. Give the mesh's shape as device_mesh=(replicas, shards)"
        )
    return _grid(device_type, torch.tensor(rows))


def _given(device_type: str, given: Any) -> DeviceMesh:
    if isinstance(given, ProcessGroup):
        return DeviceMesh.from_group(given, device_type, mesh_dim_names=(SHARD,))
    if isinstance(given, Sequence) and len(given) == 2:
        if all(isinstance(item, ProcessGroup) for item in given):
            shard, replicate = given
            ranks = torch.tensor(dist.all_gather_object(get_process_group_ranks(shard), group=replicate))
            return DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))
        if all(isinstance(item, int) for item in given):
            return _grid(device_type, torch.arange(dist.get_world_size()).view(_checked_shape(given)))
    if not isinstance(given, DeviceMesh):
        raise TypeError(
            "`process_group` must be a ProcessGroup, a pair of them (to shard over, to replicate over) or None, and "
            f"`device_mesh` a DeviceMesh or its shape (replicas, shards), but there is {given!r}"
        )
    if given.device_type != device_type:
        raise ValueError(
            f"`device_mesh` must be one of {device_type} devices, but is one of {given.device_type} devices"
        )
    if given.ndim > 2:
        raise ValueError(
            f"`device_mesh` must have one or two axes (replicas, shards), but has {given.ndim}: "
            f"{given.mesh_dim_names}. Take a part of it: mesh[name]"
        )
    return given


def _grid(device_type: str, ranks: Tensor) -> DeviceMesh:
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=(REPLICATE, SHARD))
    inherit_timeout(mesh)
    return mesh
