"""The arguments of torch's older FSDP class, translated for `fully_shard`; and the mesh over which it shards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from lockstep import dist
from lockstep.device import get_device
from lockstep.dist import is_main_process
from lockstep.errors import ConfigError, DistError, did_you_mean, listed, require_known, wrong_type
from lockstep.groups import inherit_timeout
from lockstep.model.tensor_parallel_plan import PlanRequest

_logger = logging.getLogger("lockstep.model.fsdp")

Precision: TypeAlias = MixedPrecision | MixedPrecisionPolicy | Mapping[str, Any] | str | torch.dtype
Offload: TypeAlias = bool | CPUOffload | OffloadPolicy
_Kind = TypeVar("_Kind", bound=Enum)

_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
}  # fmt: skip


# Arguments of `MixedPrecision` that `fully_shard` does not have, and what it does in any case.
_NO_MEANING = {
    "buffer_dtype": "buffers keep the dtype they have",
    "keep_low_precision_grads": "gradients have the parameters' dtype",
}


class Sharding(NamedTuple):
    """What a sharding strategy means.

    Attributes:
        hybrid: shard over one axis of a mesh and replicate over the other; None if the mesh decides.
        replicated: keep all parameters on every rank.
        reshard_after_forward: as for `fully_shard`; None frees all units but the outermost.
    """

    hybrid: bool | None
    replicated: bool
    reshard_after_forward: bool | int | None


_SHARDINGS = {
    ShardingStrategy.FULL_SHARD: Sharding(False, False, None),
    ShardingStrategy.SHARD_GRAD_OP: Sharding(False, False, False),
    ShardingStrategy.NO_SHARD: Sharding(None, True, False),
    ShardingStrategy.HYBRID_SHARD: Sharding(True, False, None),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Sharding(True, False, False),  # its only name, which configs give
}


def read_sharding(strategy: Any, reshard_after_forward: bool | int | None) -> Sharding:
    """Return what `sharding_strategy` (an enum, its name, or None) and `reshard_after_forward` mean."""
    if strategy is None:
        return Sharding(None, False, reshard_after_forward)
    if reshard_after_forward is not None:
        raise ValueError(
            "`sharding_strategy` and `reshard_after_forward` must not be given both, but are "
            f"{strategy!r} and {reshard_after_forward!r}: the first implies the second"
        )
    return _SHARDINGS[_member("sharding_strategy", strategy, ShardingStrategy, "a ShardingStrategy, its name or None")]


def read_precision(precision: Precision | None) -> MixedPrecisionPolicy:
    """Return the policy for a policy, an older `MixedPrecision`, a dict of their arguments, or one dtype.

    One dtype is used for parameters and activations; gradients are then reduced in float32. The others mean what they
    mean to torch, which reduces gradients in `param_dtype` unless a `reduce_dtype` is given.
    """
    if precision is None:
        return MixedPrecisionPolicy()
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if isinstance(precision, str | torch.dtype):
        return MixedPrecisionPolicy(param_dtype=_dtype("mixed_precision", precision), reduce_dtype=torch.float32)
    if isinstance(precision, MixedPrecision):
        # Its only name, by which users give it.
        if (ignored := precision._module_classes_to_ignore) != MixedPrecision()._module_classes_to_ignore:
            instead = "BatchNorm layers, and no others, keep their precision"
            _warn_of_no_meaning("mixed_precision._module_classes_to_ignore", ignored, instead)
        precision = {name: value for name, value in vars(precision).items() if not name.startswith("_")}
    if not isinstance(precision, Mapping):
        raise wrong_type(
            "mixed_precision", "a MixedPrecisionPolicy, a MixedPrecision, a dict, a dtype or None", precision
        )
    options: dict[str, Any] = {key: value for key, value in precision.items() if key != "type"}
    known = {own.name for kind in (MixedPrecisionPolicy, MixedPrecision) for own in fields(kind) if own.name[0] != "_"}
    require_known("mixed_precision", options, known)
    for key, value in options.items():
        if key.endswith("_dtype") and value is not None:
            options[key] = _dtype(f"mixed_precision[{key!r}]", value)
    for name, instead in _NO_MEANING.items():
        if value := options.pop(name, None):
            _warn_of_no_meaning(f"mixed_precision.{name}", value, instead)
    if "cast_root_forward_inputs" in options:
        casts_root = options.pop("cast_root_forward_inputs")
        options["cast_forward_inputs"] = options.get("cast_forward_inputs", False) or casts_root
    return MixedPrecisionPolicy(**options)


def read_offload(offload: Offload | None, device_type: str) -> OffloadPolicy:
    """Return the policy for a policy, an older `CPUOffload`, or a bool."""
    if isinstance(offload, CPUOffload):
        offload = offload.offload_params
    if isinstance(offload, bool) or offload is None:
        offload = CPUOffloadPolicy() if offload else OffloadPolicy()
    if not isinstance(offload, OffloadPolicy):
        raise wrong_type("cpu_offload", "a bool, a CPUOffload, an OffloadPolicy or None", offload)
    if isinstance(offload, CPUOffloadPolicy) and device_type == "cpu":
        # Without an accelerator memory can't be pinned; torch would raise.
        return CPUOffloadPolicy(pin_memory=False)
    return offload


def check_meaningless(backward_prefetch: Any, limit_all_gathers: bool, use_orig_params: bool) -> None:
    """Check the arguments that have no effect on `fully_shard`, and warn about values that it can't follow.

    Raises:
        TypeError: `backward_prefetch` has an unknown type.
        ValueError: `backward_prefetch` is an unknown name.
    """
    if backward_prefetch is not None:
        kinds = "'pre', 'post', a BackwardPrefetch or None"
        given = _member("backward_prefetch", backward_prefetch, BackwardPrefetch, kinds, "backward_")
        if given is BackwardPrefetch.BACKWARD_POST:
            instead = "the next part is gathered before the present one's gradients"
            _warn_of_no_meaning("backward_prefetch", "post", instead)
    if not limit_all_gathers:
        _warn_of_no_meaning("limit_all_gathers", False, "the memory of gathered parameters is always limited")
    if not use_orig_params:
        _warn_of_no_meaning("use_orig_params", False, "parameters always keep their names and shapes")


def read_device(device_id: Any, module: nn.Module) -> torch.device:
    """Return the device to train on: `device_id` if given, else that of the module's parameters."""
    if device_id is None:
        first = next(module.parameters(), None)
        return torch.device(get_device()) if first is None or first.is_meta else torch.device(first.device.type)
    if isinstance(device_id, bool) or not isinstance(device_id, int | str | torch.device):
        raise wrong_type("device_id", "an int, a torch.device or None", device_id)
    if isinstance(device_id, int):
        # As DDP's device_ids: a script for accelerators also runs without one.
        device_id = torch.device(get_device(), device_id) if torch.accelerator.is_available() else "cpu"
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        raise ValueError(f"`device_id` must be a device that torch knows, but is {device_id!r}") from error
    if device.type == "cpu":
        return device
    here = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    if device.type != get_device() or device.index not in (None, here):
        current = get_device() if here is None else f"{get_device()}:{here}"
        raise ValueError(
            f"`device_id` must be this process's current device, {current}, but is {device}. init_dist makes each "
            "rank's own device the current one"
        )
    return device


def read_ignored(modules: Any, model: nn.Module) -> set[nn.Module]:
    """Return the modules that FSDP must ignore, with all modules inside them."""
    if modules is None:
        return set()
    if isinstance(modules, str | nn.Module) or not isinstance(modules, Iterable):
        raise wrong_type("ignored_modules", "a list of modules or None", modules)
    ignored, inside = list(modules), list(model.modules())[1:]
    for module in ignored:
        if module not in inside:
            raise ValueError(
                f"`ignored_modules` must hold modules inside {type(model).__name__}, but holds a "
                f"{type(module).__name__} that is not inside it"
            )
    return {part for module in ignored for part in module.modules()}


def _member(name: str, value: Any, kind: type[_Kind], allowed: str, prefix: str = "") -> _Kind:
    """Return a member of an enum, which may be given by its name, without the prefix that all its names have."""
    if isinstance(value, str):
        members = {member.name.strip("_").lower().removeprefix(prefix): member for member in kind}
        found = members.get(value.strip("_").lower().removeprefix(prefix))
        if found is None:
            raise ValueError(f"`{name}` must be {allowed}, but is {value!r}{did_you_mean(value, kind.__members__)}")
        return found
    if not isinstance(value, kind):
        raise wrong_type(name, allowed, value)
    return value


def _warn_of_no_meaning(name: str, value: object, instead: str) -> None:
    """Warn, on rank 0, that an argument no longer has an effect."""
    if is_main_process():
        _logger.warning("`%s` is %r, which has no meaning any more: %s", name, value, instead)


def _dtype(name: str, value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise wrong_type(name, "a torch.dtype or the name of one", value)
    key = value.removeprefix("torch.")
    if key not in _DTYPES:
        raise ValueError(f"`{name}` must name a floating dtype, but is {value!r}" + did_you_mean(key, _DTYPES))
    return _DTYPES[key]


MeshLike: TypeAlias = DeviceMesh | Sequence[int]
GroupsLike: TypeAlias = ProcessGroup | DeviceMesh

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
    request: PlanRequest | None,
    process_group: GroupsLike | None,
    device_mesh: MeshLike | None,
) -> Meshes:
    """Return the meshes: with the axis `dp_shard`, or `dp_replicate` and `dp_shard`; and with `tp` last if requested.

    Args:
        device_type: where parameters live during a step.
        sharding: whether the mesh has two axes, or no shards.
        request: what `tensor_parallel` asks for: neighbouring ranks compute together, because they communicate most.
        process_group: the ranks to shard over, as a group or a one-axis mesh.
        device_mesh: the mesh itself, or its shape (replicas, shards).

    Without a mesh or groups, parameters are sharded over all ranks, or within each node if hybrid. Without a default
    group, this process becomes a group of one.

    **Collective**: every rank.

    Raises:
        TypeError: they are something else.
        ValueError: they contradict each other, or do not fit the number of ranks; on every rank.
    """
    if not dist.is_distributed():
        dist.init_dist("none")
    if device_mesh is not None and process_group is not None:
        raise ValueError("`process_group` and `device_mesh` must not be given both: they say the same thing")
    if not isinstance(process_group, ProcessGroup | DeviceMesh | None):
        raise wrong_type("process_group", "a ProcessGroup, a mesh with one axis or None", process_group)
    if request is not None and process_group is not None:
        raise ConfigError(
            "`process_group` must not be given with `tensor_parallel`. Give device_mesh=(replicas, shards), or a mesh "
            f"whose last axis is called {TENSOR_AXIS!r}"
        )
    given = process_group if device_mesh is None else device_mesh
    if sharding.replicated and given is not None:
        instead = "" if request else ". Use MMDistributedDataParallel with that group"
        raise ValueError(
            f"`sharding_strategy` must shard where a process_group or device_mesh is given, but is NO_SHARD{instead}"
        )
    whole = _whole_mesh(device_type, sharding, request, given)
    data, tensor = whole, None
    if request is not None:
        assert whole.mesh_dim_names is not None
        data, tensor = whole[whole.mesh_dim_names[:-1]], whole[TENSOR_AXIS]
    if sharding.hybrid not in (None, data.ndim == 2):
        wanted = "two axes (replicas, shards)" if sharding.hybrid else "one axis"
        raise ValueError(
            f"`sharding_strategy` must fit the mesh, but it wants {wanted} for the data and the mesh has {data.ndim}. "
            "Leave one out"
        )
    return Meshes(data, tensor, whole)


def _whole_mesh(device_type: str, sharding: Sharding, request: PlanRequest | None, given: Any) -> DeviceMesh:
    if isinstance(given, DeviceMesh):
        return _checked(device_type, given, request)
    if request is None:
        if given is None and sharding.hybrid:
            return _grid(device_type, _by_node(), DATA_AXES)
        if given is None and not sharding.replicated:
            given = dist.get_default_group()
        if isinstance(given, ProcessGroup):
            return DeviceMesh.from_group(given, device_type, mesh_dim_names=DATA_AXES[1:])
        return _grid(device_type, _by_number(DATA_AXES[1], *_shape(given, sharding)), DATA_AXES)
    if request.degree is None:
        raise ConfigError(
            "`tensor_parallel` must have the key 'degree', the number of ranks that compute together, or `device_mesh` "
            f"must be a mesh with an axis called {TENSOR_AXIS!r}"
        )
    shape = _shape(given, sharding, request.degree)
    ranks = _by_number(TENSOR_AXIS, *shape, request.degree)
    return _grid(device_type, ranks, (*DATA_AXES[-len(shape) :], TENSOR_AXIS))


def _shape(given: Any, sharding: Sharding, degree: int = 1) -> tuple[int, ...]:
    """Return the lengths of the axes for the data, of groups of `degree` ranks: one axis, or replicas and shards."""
    world_size = dist.get_world_size()
    ranks = world_size // degree
    if world_size % degree:
        raise ConfigError(
            f"the degree of `tensor_parallel` must divide the number of ranks, but is {degree} of {world_size}. Start "
            f"{max(1, ranks) * degree} ranks, or choose another degree"
        )
    if given is None:
        if sharding.hybrid:
            raise ConfigError(
                "`device_mesh` must be given as (replicas, shards) for a hybrid `sharding_strategy` with "
                f"`tensor_parallel`, so that replicas * shards is {ranks}, but is None"
            )
        return (ranks, 1) if sharding.replicated else (ranks,)
    if not isinstance(given, Sequence) or len(given) != 2 or not all(isinstance(length, int) for length in given):
        raise TypeError(f"`device_mesh` must be a DeviceMesh, its shape (replicas, shards) or None, but is {given!r}")
    if min(given) < 1 or given[0] * given[1] != ranks:
        wanted = f"{ranks} groups of {degree} ranks each" if degree > 1 else f"{ranks} ranks"
        raise ConfigError(
            f"`device_mesh` must be a shape for {wanted}, but is {tuple(given)} "
            f"(rank {dist.get_rank()} of {world_size})"
        )
    return tuple(given)


def _checked(device_type: str, mesh: DeviceMesh, request: PlanRequest | None) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    data_axes = mesh.ndim if request is None else mesh.ndim - 1
    has_last = request is None or names[-1:] == (TENSOR_AXIS,)
    if mesh.device_type != device_type or data_axes not in (1, 2) or not has_last:
        last = "" if request is None else f" and a last one called {TENSOR_AXIS!r}"
        raise ConfigError(
            f"`device_mesh` must be a mesh of {device_type} devices with one or two axes for the data{last}, but has "
            f"{', '.join(names) or f'{mesh.ndim} without names'} on {mesh.device_type}. Take a part, "
            f"mesh[names], or make one: init_device_mesh({device_type!r}, shape, mesh_dim_names=...)"
        )
    if request is not None and request.degree not in (None, length := mesh[TENSOR_AXIS].size()):
        raise ConfigError(
            f"the degree of `tensor_parallel` must be the length of the mesh's axis {TENSOR_AXIS!r}, {length}, but is "
            f"{request.degree}. Leave one out"
        )
    return mesh


def _by_node() -> Tensor:
    """Return all ranks, with a row for each node."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(dist.all_gather_object(dist.get_node_rank())):
        nodes.setdefault(node, []).append(rank)
    rows = list(nodes.values())
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            "`sharding_strategy` 'HYBRID_SHARD' must find equally many ranks on every node, but finds "
            f"{[len(row) for row in rows]}. Give the mesh's shape as device_mesh=(replicas, shards)"
        )
    return torch.tensor(rows, device="cpu")


def _by_number(axis: str, *shape: int) -> Tensor:
    """Return all ranks, neighbours along the last axis; warn where that puts ranks of several nodes into one group."""
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(shape)
    try:
        own = dist.get_node_rank()
    except DistError:  # whoever has started the ranks does not say
        own = None
    nodes, length = dist.all_gather_object(own), shape[-1]
    spans = any(len({nodes[rank] for rank in group}) > 1 for group in ranks.view(-1, length).tolist())
    if spans and None not in nodes and min(Counter(nodes).values()) % length == 0 and is_main_process():
        _logger.warning(
            "groups of the axis %s have ranks of several nodes, although each node has room for whole groups of %d: "
            "ranks are numbered across nodes (nodes of ranks 0, 1, ...: %s). Number them node by node, as mpirun "
            "--map-by slot does, or give a DeviceMesh; sharding_strategy='HYBRID_SHARD' alone shards within each node",
            axis, length, listed(nodes, most=8),
        )  # fmt: skip
    return ranks


def _grid(device_type: str, ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    inherit_timeout(mesh.get_all_groups())
    return mesh
