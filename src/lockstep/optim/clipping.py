"""Clipping of gradients, whole or sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lockstep.dist import all_reduce
from lockstep.model.shards import is_dtensor

# A gradient's mesh, and the axes of it over which the gradient is sharded.
Sharding = tuple[DeviceMesh, tuple[int, ...]]


@torch.no_grad()
def clip_by_norm(
    params: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients down to a total norm of at most `max_norm`, and return the norm before clipping.

    The norm is that of all gradients together. It is the same on every rank if whole gradients are, which FSDP does not
    see to for its `ignored_modules`. For sharded gradients, torch's own function returns the norm only as a `DTensor`,
    refuses a mixture of sharded and whole gradients, and for `norm_type=inf` hangs if a rank holds no element of a
    parameter (torch 2.13).

    Args:
        params: parameters; those without a gradient are skipped.
        max_norm: as for `torch.nn.utils.clip_grad_norm_`, like the other arguments.
        norm_type: the p of the p-norm, above 0; may be infinite.
        error_if_nonfinite: raise an error if the norm is not finite.
        foreach: use torch's faster implementation; by default where there is one.

    **Collective**: every rank of the meshes over which gradients are sharded. **Cost**: an all_reduce of one number for
    each mesh and set of its axes over which gradients are sharded, by each of these axes; with `error_if_nonfinite`,
    the host waits for the device.

    Raises:
        RuntimeError: on every rank, with `error_if_nonfinite`, if the norm is not finite.
    """
    params, norm_type = list(params), float(norm_type)
    total = gradient_norm([param.grad for param in params if param.grad is not None], norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of the gradients must be finite, but is {total.item()}. Look for the loss that is not finite, "
            "or set error_if_nonfinite=False"
        )
    for alike in _by_mesh(params):
        clip_grads_with_norm_(alike, max_norm, total, foreach)
    return total


@torch.no_grad()
def clip_by_value(params: Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamp every element of the gradients to between `-clip_value` and `clip_value`.

    **Cost**: nothing is sent, but for gradients that tensor parallelism has left as parts of a sum, which are added up.
    """
    params = [param for param in params if param.grad is not None]
    for param in params:
        param.grad = _summed(param.grad)
    for alike in _by_mesh(params):
        clip_grad_value_(alike, clip_value, foreach)


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor], norm_type: float = 2.0, foreach: bool | None = None) -> Tensor:
    """Return the norm of all gradients together, whole or sharded, as a plain tensor.

    **Collective**: every rank of the meshes over which gradients are sharded. **Cost**: as of `clip_by_norm`.

    Raises:
        ValueError: `norm_type` is not above 0.
    """
    norm_type = float(norm_type)  # torch takes "inf", too
    if not norm_type > 0:
        raise ValueError(f"`norm_type` must be above 0, but is {norm_type!r}")
    parts: dict[Sharding | None, list[Tensor]] = {}
    for gradient in gradients:
        sharding, own = _own_part(gradient)
        parts.setdefault(sharding, []).append(own)
    norms = [_norm(own, sharding, norm_type, foreach) for sharding, own in parts.items()]
    return norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type)


def _norm(parts: list[Tensor], sharding: Sharding | None, norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of whole gradients, or of sharded ones over all ranks that hold shards."""
    if sharding is None:
        return get_total_norm(parts, norm_type, foreach=foreach)
    mesh, axes = sharding
    # A rank may hold no element of a short parameter, and an empty tensor has no maximum.
    present = [part for part in parts if part.numel()]
    # One dtype on every rank, whatever it holds, real for complex numbers; and a square may overflow float16.
    dtype = reduce(torch.promote_types, (part.dtype.to_real() for part in parts), torch.float32)
    norm = (
        get_total_norm(present, norm_type, foreach=foreach).to(dtype)
        if present
        else parts[0].new_zeros((), dtype=dtype)
    )
    infinite = math.isinf(norm_type)
    if not infinite:
        norm = norm**norm_type
    for axis in axes:
        all_reduce(norm, "max" if infinite else "sum", group=mesh.get_group(axis))
    return norm if infinite else norm.pow(1 / norm_type)


def _own_part(gradient: Any) -> tuple[Sharding | None, Tensor]:
    """Return how a gradient is sharded (None if it is whole), and the part that this rank holds."""
    if not is_dtensor(gradient):
        return None, gradient
    gradient = _summed(gradient)
    axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, axes), gradient.to_local()


def _summed(gradient: Any) -> Any:
    """Return a gradient; where ranks hold parts of a sum, the sum."""
    if not is_dtensor(gradient) or not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    return gradient.redistribute(
        placements=[Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    )


def _by_mesh(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the parameters with gradients into lists that torch accepts: none mixes shards of different meshes."""
    lists: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            lists.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    return list(lists.values())
