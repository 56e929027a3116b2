"""Gradients across ranks: differentiable collectives, and a warning where a collective cuts the gradient.

The four collectives that take `sync_grads` are linear maps of the tensors of all ranks. The backward pass runs the
transpose of the map: that of all_reduce is all_reduce, all_gather and reduce_scatter are transposes of each other, and
that of all_to_all swaps senders and receivers.

Convention: gradients are those of the *sum of all ranks' losses*. DistributedDataParallel and FSDP divide by the number
of ranks when they average the gradients of the parameters, which gives the gradient of the *mean of all ranks' losses*.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.calls import owner_of
from lockstep.dist.consistency import check_call
from lockstep.errors import DistError
from lockstep.groups import Comm
from lockstep.transport.control import exchange, report_failure
from lockstep.transport.reduce_ops import reduction

Apply: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_warned: set[tuple[str, int]] = set()


class LinearMap(NamedTuple):
    """A collective and its transpose.

    Attributes:
        apply: this rank's inputs -> its outputs, which are new tensors; always runs outside the autograd graph.
        transpose: the gradients of the outputs -> those of the inputs, likewise.
        comm: the group.
    """

    apply: Apply
    transpose: Apply
    comm: Comm


class _LinearMapFunction(Function):
    """One use of a `LinearMap` in a graph.

    All outputs require grad on every rank, even where the inputs don't, because every rank must take part in backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, linear: LinearMap, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.linear = linear
        return tuple(linear.apply([x.detach() for x in inputs]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        apply, transpose, comm = ctx.linear
        if comm.reference is not None and comm.pg is None:
            raise DistError(
                f"backward through a collective needs its group, which is gone ({comm.this_rank}). "
                "Call destroy_dist() later"
            )
        return None, None, *_apply_in_graph(LinearMap(transpose, apply, comm), gradients)


def apply_with_gradients(name: str, linear: LinearMap, inputs: Sequence[Tensor], *arguments: str) -> tuple[Tensor, ...]:
    """Return the outputs of a map, as part of the autograd graph if some rank's inputs require grad.

    Every rank must then take part in backward.

    Args:
        name: name of the collective.
        linear: the map.
        inputs: this rank's inputs.
        *arguments: those that must be the same on every rank.

    **Collective**: every rank; a rank whose arguments are wrong uses `report_failure` instead. **Raises**: PeerError if
    the arguments of another rank are wrong; CollectiveMismatchError on every rank if the calls differ, or if only some
    are under ``torch.no_grad()`` and another one's inputs require grad.
    """
    comm = linear.comm
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    with report_failure(comm):
        for x in inputs if needs_graph else ():
            reduction("sum", x.dtype)  # backward sums the gradients, so the dtype must allow it
    received = exchange(comm, bytes([needs_graph, torch.is_grad_enabled()]) + repr(arguments).encode())
    in_graph = any(one[0] for one in received)
    if in_graph and not torch.is_grad_enabled():
        arguments = (*arguments, "under no_grad")
    # Recorded only now: a rank whose arguments are wrong can't record what the others do.
    check_call(name, comm, "sync_grads", *arguments, compares=False)
    if len({one[2:] for one in received}) > 1 or (in_graph and not all(one[1] for one in received)):
        exchange(comm)  # raises CollectiveMismatchError, with what each rank has called
    if in_graph:
        return _apply_in_graph(linear, inputs)
    with torch.no_grad():
        return tuple(linear.apply([x.detach() for x in inputs]))


def _apply_in_graph(linear: LinearMap, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    anchor = torch.empty(0, device="cpu", requires_grad=torch.is_grad_enabled())
    outputs: tuple[Tensor, ...] = _LinearMapFunction.apply(anchor, linear, *inputs)  # type: ignore[no-untyped-call]
    return outputs


def fill_in_graph(outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """Fill the caller's tensors so that they get the graph of `parts`, and return them."""
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part)
    return list(outputs)


def describe(tensors: Sequence[Tensor]) -> str:
    """Return dtypes and shapes as text."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors)


def require_linear(comm: Comm, async_op: bool, op: str = "sum", name: str = "", outputs: Sequence[Tensor] = ()) -> None:
    """Raise an error unless gradients can flow through a call.

    Args:
        comm: the group.
        async_op: must be False.
        op: the reduction, which must be a sum or a mean.
        name: of the argument `outputs`.
        outputs: the tensors to fill; none may be a leaf that requires grad, which autograd does not allow to be filled.
    """
    if async_op:
        raise TypeError(f"`async_op` must be False with sync_grads, but is {async_op!r} ({comm.this_rank})")
    if op not in ("sum", "mean"):
        raise ValueError(
            f"`op` must be sum or mean with sync_grads, but is {op!r} ({comm.this_rank}). Leave sync_grads out, and "
            "hand in a detached tensor"
        )
    if torch.is_grad_enabled() and any(x.requires_grad and x.is_leaf for x in outputs):
        raise ValueError(
            f"`{name}` must not require grad with sync_grads, as it gets the graph of what fills it, but does "
            f"({comm.this_rank}). Hand in torch.empty_like({name})"
        )


def warn_of_lost_gradients(
    name: str, sent: Iterable[object] | None = None, filled: Iterable[object] = (), *, has_sync_grads: bool = False
) -> None:
    """Warn if a collective drops or falsifies the gradient of a tensor, once per calling line.

    No warning under ``torch.no_grad()``, or for calls from lockstep itself.

    Args:
        name: the collective.
        sent: what it sends, if what comes out is not in the graph; of values that are no tensors nothing is said.
        filled: what it fills. A leaf that requires grad, such as a parameter, gets new values, and loses nothing.
        has_sync_grads: whether the collective takes `sync_grads`.
    """
    is_dropped = any(isinstance(x, Tensor) and x.requires_grad for x in sent or ())
    is_falsified = any(isinstance(x, Tensor) and x.requires_grad and not x.is_leaf for x in filled)
    if not (is_dropped or is_falsified) or not torch.is_grad_enabled():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and owner_of(frame.f_code.co_filename) == "dist":
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    if owner_of(file) in ("dist", "lockstep", "command") or (file, line) in _warned:
        return
    _warned.add((file, line))
    outcome = "ends here, as what comes out has no graph"
    if sent is None:
        outcome = "stays that of this rank's own value, not of what replaces it"
    remedy = "Pass sync_grads=True" if has_sync_grads else "Use all_gather or all_reduce with sync_grads=True"
    warnings.warn_explicit(
        f"{name} at {file}:{line} is given a tensor that requires grad, but its gradient {outcome}. {remedy} "
        "to let gradients flow back over the ranks, or hand in .detach() to say that no gradient should flow",
        UserWarning,
        file,
        line,
    )
