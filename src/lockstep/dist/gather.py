"""all_gather, gather and scatter: tensors whose shapes may differ from rank to rank.

Synchronous calls first exchange headers with shape and dtype, between the hosts. Tensors then travel in one call, if
they are alike, and without padding if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias, cast, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.device import copy_into
from lockstep.dist.consistency import check_call
from lockstep.dist.gradients import LinearMap, apply_with_gradients, warn_of_lost_gradients
from lockstep.dist.header import Header, decode, encode, header_of, require_expected
from lockstep.dist.reduce import scatter_reduced
from lockstep.dist.validate import (
    GROUP_TWICE,
    NOT_GIVEN,
    No,
    Yes,
    either,
    places_given,
    require_alike,
    require_list,
    require_only_on,
    require_rank,
    require_tensor,
)
from lockstep.groups import Comm, GroupLike, resolve
from lockstep.transport.control import exchange, report_failure, require_no_failure
from lockstep.transport.handles import Handle, wait_unless_async
from lockstep.transport.moving import copy_all, gather_alike, gather_into, place_for, transfer

Tensors: TypeAlias = Sequence[Tensor]


@overload
def all_gather(data: Tensor, group: GroupLike = ..., *, sync_grads: bool = ..., uneven: bool = ...) -> list[Tensor]: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    async_op: No = ...,
    *,
    sync_grads: No = ...,
    tensor_list: Sequence[Tensor] = ...,
    uneven: bool = ...,
) -> None: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    *,
    async_op: Yes,
    tensor_list: Sequence[Tensor] = ...,
    uneven: bool = ...,
) -> Handle: ...
def all_gather(  # type: ignore[misc]  # the overloads share their places, not their names
    data: Tensor | Sequence[Tensor] = NOT_GIVEN,
    tensor: Tensor | GroupLike = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
    tensor_list: Sequence[Tensor] = NOT_GIVEN,
    uneven: bool = True,
) -> list[Tensor] | Handle | None:
    """Give every rank every rank's tensor, as ``all_gather(data) -> list`` or ``all_gather(tensor_list, tensor)``.

    Args:
        data: this rank's tensor; or the list to fill, with one tensor for each rank.
        tensor: this rank's tensor, in the filling form; in the other form the second argument is the group.
        group: the process group; None is the default group.
        async_op: in the filling form, return at once, with a handle to wait for. No rank then waits for another one
            before it sends: `data` says what each sends, and must be right.
        sync_grads: let gradients flow back to every rank through the returned tensors, not in the filling form. Every
            rank must then run backward through them.
        tensor_list: an alias for `data` in the filling form.
        uneven: False promises that all ranks have tensors of one dtype and shape, all on the CPU or all on devices, and
            saves the header.

    **Collective**: every rank of the group; ranks may mix the two forms, if `uneven`, and not `async_op`. **Shapes**:
    any shape and dtype on every rank; in the filling form ``tensor_list[i]`` has those of rank i's tensor.

    **Returns**: the tensors in rank order, on the device of `data`; or None, or a handle. Tensors that are alike may
    be views of one.

    **Gradients**: without `sync_grads` no gradient flows; a warning says so once for each calling line. With it, the
    gradient of `data` is the sum over the ranks of the gradients of what they received: the gradient of the sum of all
    ranks' losses. DDP and FSDP then average the gradients of the parameters, which gives the gradient of the mean of
    all ranks' losses. In the second example it equals the gradient of one process that has the whole batch.

    **Raises**: ValueError on a rank whose list does not match the tensors of all ranks, TypeError on one that passes
    something other than tensors, PeerError on the others; no tensor has been sent by then. With `async_op`, or without
    `uneven`, each rank checks its own arguments alone, and others wait for it. With `sync_grads`,
    CollectiveMismatchError on every rank if dtypes differ.

    **Cost**: a header, by one exchange of 256 bytes between the hosts, then the tensors without padding: in one
    call if they are alike; else on an accelerator in one group of broadcasts, on the CPU in one for each rank. With
    `sync_grads` one more header, and in backward the bytes of the gradients of everything that was received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather, get_rank
        >>> [x.tolist() for x in all_gather(torch.arange(get_rank() + 1))]
        [[0], [0, 1]]
        >>> filled = [torch.empty(2), torch.empty(2)]
        >>> all_gather(filled, torch.full((2,), float(get_rank())))
        >>> filled[1].tolist()
        [1.0, 1.0]

    **Example (2 ranks)**: a contrastive loss, as in CLIP, over the features of all ranks::

        >>> from lockstep.dist import all_reduce
        >>> images, texts = torch.tensor([[0.2], [-0.5]]), torch.tensor([[0.3], [0.9]])  # a batch of two pairs
        >>> def loss_of(weight, image, text):  # of the whole batch
        ...     logits = (image * weight) @ (text * weight).T
        ...     pairs = torch.arange(len(image))
        ...     return torch.nn.functional.cross_entropy(logits, pairs)
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> own = slice(get_rank(), get_rank() + 1)  # one pair for each rank
        >>> image = torch.cat(all_gather(images[own] * weight, sync_grads=True))
        >>> text = torch.cat(all_gather(texts[own] * weight, sync_grads=True))
        >>> loss_of(1.0, image, text).backward()
        >>> gradient = weight.grad.clone()
        >>> all_reduce(gradient, "mean")  # which DDP does
        >>> whole = torch.tensor(2.0, requires_grad=True)
        >>> loss_of(whole, images, texts).backward()  # on one process
        >>> torch.allclose(gradient, whole.grad)
        True

    **Source**: `torch.distributed.all_gather` (2.13), which on gloo aborts the process if shapes differ.
    """
    data = either("data", data, "tensor_list", tensor_list)
    if isinstance(data, Tensor):
        if async_op:
            raise TypeError("`async_op` needs the form all_gather(tensor_list, tensor)")
        if tensor is not None and group is not None:
            raise TypeError(GROUP_TWICE)
        comm = resolve(group if tensor is None else cast(GroupLike, tensor))  # which checks it
        own, outputs = data, NOT_GIVEN
    else:
        # Also all_gather(x, group) with an `x` that is no tensor comes here: the ranks of that group are to hear of it.
        comm = resolve(tensor if isinstance(tensor, ProcessGroup | DeviceMesh) else group)
        own, outputs = cast(Tensor, tensor), data
    if sync_grads:
        return _all_gather_with_grads(data, comm, uneven)
    warn_of_lost_gradients("all_gather", [own], has_sync_grads=True)
    if outputs is NOT_GIVEN:
        return _all_gather(own, comm, uneven)
    return wait_unless_async(_all_gather_into(outputs, own, comm, uneven, async_op), async_op)


@overload
def gather(data: Tensor = ..., dst: int = ..., group: GroupLike = ..., *, tensor: Tensor = ...) -> list[Tensor]: ...
@overload
def gather(
    data: Tensor = ...,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int = ...,
    group: GroupLike = ...,
    *,
    async_op: Yes,
    tensor: Tensor = ...,
) -> Handle: ...
def gather(  # type: ignore[misc]  # the overloads share their places, not their names
    data: Tensor = NOT_GIVEN,
    gather_list: Sequence[Tensor] | Integral | int | None = None,
    dst: int | GroupLike = 0,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    tensor: Tensor = NOT_GIVEN,
) -> list[Tensor] | Handle | None:
    """Give rank `dst` every rank's tensor, as ``gather(data, dst) -> list`` or ``gather(tensor, gather_list, dst)``.

    Args:
        data: this rank's tensor.
        gather_list: on `dst`, the tensors to fill, one for each rank; elsewhere None.
        dst: rank within the group.
        group: the process group; None is the default group.
        async_op: return at once, with a handle; `dst` must fill a list, which says what each rank sends.
        tensor: an alias for `data`.

    **Collective**: every rank of the group. **Shapes**: any shape and dtype on every rank.

    **Returns**: on `dst` the tensors in rank order, on the device of its `data`, or None if it filled a list; ``[]``
    elsewhere.

    **Raises**: ValueError on `dst` if its list does not match the tensors of all ranks, and on another rank that passes
    one, TypeError on a rank that passes something else, PeerError on the others; nothing has been sent by then. With
    `async_op`, each rank checks its own arguments alone.

    **Cost**: a header, by one exchange of 256 bytes between the hosts; then the bytes of each tensor to `dst`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import gather, get_rank
        >>> parts = gather(torch.ones(get_rank() + 1), dst=1)
        >>> [x.tolist() for x in parts] == ([[1.0], [1.0, 1.0]] if get_rank() == 1 else [])
        True
    """
    gather_list, dst, group = places_given(gather_list, dst, group)
    comm = resolve(group)
    data = either("data", data, "tensor", tensor)
    dst = require_rank("dst", dst, comm)
    warn_of_lost_gradients("gather", [data])
    outputs: Any = gather_list if comm.rank == dst and gather_list is not None else NOT_GIVEN
    if not async_op:
        check_call("gather", comm, dst, compares=False)
        with report_failure(comm):
            require_only_on(dst, "gather_list", gather_list, comm)
        wire, headers = _exchange_headers(data, comm, outputs, "gather_list")
        fills = outputs is not NOT_GIVEN
        if not fills:
            outputs = [torch.empty(x.shape, dtype=x.dtype, device=data.device) for x in headers if comm.rank == dst]
        _start_gather(wire, dst, comm, outputs).wait()
        return None if fills else outputs
    require_only_on(dst, "gather_list", gather_list, comm)
    if comm.rank == dst and outputs is NOT_GIVEN:
        raise TypeError(f"`async_op` needs the form gather(tensor, gather_list, dst) ({comm.this_rank})")
    _require_form(data, outputs, comm, "gather_list")
    check_call("gather", comm, dst, async_op=True)
    return _start_gather(comm.to_wire(data), dst, comm, outputs)


@overload
def scatter(
    tensor: Tensor, scatter_list: Tensors | None = ..., src: int = ..., group: GroupLike = ..., async_op: No = ...
) -> None: ...
@overload
def scatter(
    tensor: Tensor, scatter_list: Tensors | None = ..., src: int = ..., group: GroupLike = ..., *, async_op: Yes
) -> Handle: ...
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Fill rank i's `tensor` with the i-th tensor of rank `src`'s list.

    Args:
        tensor: filled in place.
        scatter_list: on `src`, one tensor for each rank; elsewhere None.
        src: rank within the group.
        group: the process group; None is the default group.
        async_op: return at once, with a handle to wait for. No rank then waits for another one before it sends:
            `tensor` says what each receives, and must be right.

    **Collective**: every rank of the group. **Shapes**: ``scatter_list[i]`` has the shape and dtype of rank i's
    `tensor`; the entries may differ.

    **Raises**: ValueError or TypeError on `src` if its list does not hold one tensor for each rank, ValueError on a
    rank whose `tensor` does not match what it would get, PeerError on the others; nothing has been sent by then. With
    `async_op`, each rank checks its own arguments alone.

    **Cost**: one exchange of 256 bytes between the hosts, and a header of `src` for each rank; then the bytes
    of each tensor from `src`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, scatter
        >>> data = torch.empty(get_rank() + 1)
        >>> scatter(data, [torch.tensor([5.0]), torch.tensor([6.0, 7.0])] if get_rank() == 0 else None)
        >>> data.tolist() == ([5.0] if get_rank() == 0 else [6.0, 7.0])
        True
    """
    comm = resolve(group)
    src = require_rank("src", src, comm)
    is_mixed = False  # some are on the CPU, and some are not
    if async_op:
        sent = _scattered_from(tensor, scatter_list, src, comm)
        check_call("scatter", comm, src, async_op=True)
    else:
        check_call("scatter", comm, src, compares=False)
        with report_failure(comm):
            sent = _scattered_from(tensor, scatter_list, src, comm)
        is_mixed = _exchange_scatter_headers(tensor, sent, src, comm)
    warn_of_lost_gradients("scatter", sent, [tensor])
    wires = [comm.to_wire(entry) for entry in sent]
    if is_mixed:
        wires = [wire.to(comm.comm_device) for wire in wires]
    if comm.rank == src:
        received = wires[src]
        moving = transfer([], [(wire, rank) for rank, wire in enumerate(wires) if rank != src], comm)
    else:
        stays = comm.is_alone or (comm.carries(tensor) and not is_mixed)
        received = place_for(tensor, tensor.device if stays else comm.comm_device)
        moving = transfer([(received, src)], [], comm)
    # Copied once nothing is sent from there: `tensor` may share memory with what the others get.
    return wait_unless_async(Handle([moving], comm, lambda: copy_all([tensor], [received])), async_op)


def _all_gather(data: Tensor, comm: Comm, uneven: bool) -> list[Tensor]:
    if uneven:
        check_call("all_gather", comm, compares=False)
        wire, headers = _exchange_headers(data, comm)
        alike = all(header[:2] == headers[0][:2] for header in headers)  # dtype and shape
    else:
        require_tensor("data", data)
        check_call("all_gather", comm, data, "even")
        wire, headers, alike = comm.to_wire(data), [], True
    if alike:
        parts = gather_alike(wire, comm)
    else:
        parts = [torch.empty(x.shape, dtype=x.dtype, device=wire.device) for x in headers]
        gather_into(parts, wire, comm).wait()
    return parts if wire.device == data.device else [part.to(data.device) for part in parts]


def _all_gather_into(outputs: Sequence[Tensor], data: Any, comm: Comm, uneven: bool, async_op: bool) -> Handle:
    if async_op or not uneven:
        _require_form(data, outputs, comm)
        for rank in [comm.rank] if uneven else range(comm.size):
            require_alike(f"tensor_list[{rank}]", outputs[rank], "`tensor`", data, comm)
        check_call("all_gather", comm, *outputs, async_op=async_op)
        wire = comm.to_wire(data)
    else:
        check_call("all_gather", comm, compares=False)
        wire, _ = _exchange_headers(data, comm, outputs)
    return gather_into(outputs, wire, comm, async_op)


def _all_gather_with_grads(data: Any, comm: Comm, uneven: bool) -> list[Tensor]:
    check_call("all_gather", comm, "sync_grads", compares=False)
    with report_failure(comm):
        require_tensor("data", data)

    def gather_all(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.clone() for x in _all_gather(inputs[0], comm, uneven)]  # autograd refuses several views of one

    def sum_up(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return [scatter_reduced(gradients, "sum", comm)]

    return list(apply_with_gradients("all_gather", LinearMap(gather_all, sum_up, comm), [data], str(data.dtype)))


def _start_gather(wire: Tensor, dst: int, comm: Comm, outputs: Sequence[Tensor]) -> Handle:
    """Start to send a tensor to `dst`, which fills `outputs`; the shapes are known there."""
    if comm.rank != dst:
        return transfer([], [(wire, dst)], comm)
    copy_into(outputs[dst], wire)  # first: another output may share its memory
    received = [place_for(x, wire.device) for x in outputs]
    arriving = [(x, rank) for rank, x in enumerate(received) if rank != dst]
    if comm.is_alone:  # the other ranks of a fake group have the same
        copy_all([x for x, _ in arriving], [wire] * len(arriving))
    handle = transfer(arriving, [], comm)
    places = [outputs[rank] for _, rank in arriving]
    return Handle([handle], comm, lambda: copy_all(places, [x for x, _ in arriving]))


def _require_form(data: object, outputs: Sequence[Tensor], comm: Comm, list_name: str = "tensor_list") -> None:
    """Raise unless `data` is a tensor and `outputs`, if given, holds one tensor for each rank."""
    if outputs is NOT_GIVEN or list_name == "gather_list":  # the tensor comes first
        require_tensor("data", data)
    elif isinstance(data, Tensor):
        require_tensor("tensor", data)
    else:
        raise TypeError(
            "`data` must be a tensor, or a list to fill with a tensor in second place, but they are "
            f"{type(outputs).__name__} and {type(data).__name__} ({comm.this_rank})"
        )
    if outputs is not NOT_GIVEN:
        require_list(list_name, outputs, comm, is_filled=True)


def _exchange_headers(
    data: Any, comm: Comm, outputs: Sequence[Tensor] = NOT_GIVEN, list_name: str = "tensor_list"
) -> tuple[Tensor, list[Header]]:
    """Return the tensor to send, and every rank's header, once all ranks can take part and their lists fit."""
    with report_failure(comm):  # also where a device has no memory left
        _require_form(data, outputs, comm, list_name)
        wire = comm.to_wire(data)
        encoded = encode(header_of(wire, wire.is_cpu, None if outputs is NOT_GIVEN else outputs))
    headers = [decode(one)[0] for one in exchange(comm, encoded)]
    if outputs is not NOT_GIVEN:
        for rank, output in enumerate(outputs):
            own = f"{list_name}[{rank}]"
            require_alike(own, output, f"rank {rank}'s tensor", headers[rank], comm, ". Or leave the list out")
    require_expected(headers, comm, list_name)
    if not all(header.on_cpu == wire.is_cpu for header in headers):
        wire = wire.to(comm.comm_device)  # some have theirs on a device, and some on the CPU
    return wire, headers


def _scattered_from(tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int, comm: Comm) -> Sequence[Tensor]:
    """Return what this rank sends, after checking its arguments: nothing, unless it is `src`."""
    require_tensor("tensor", tensor, is_filled=True)
    if comm.rank != src:
        return ()
    if scatter_list is None:
        raise ValueError(f"`scatter_list` must be a list on `src`, but is None ({comm.this_rank})")
    require_list("scatter_list", scatter_list, comm)
    require_alike("tensor", tensor, f"scatter_list[{src}]", scatter_list[src], comm)
    return scatter_list


def _exchange_scatter_headers(tensor: Tensor, sent: Sequence[Tensor], src: int, comm: Comm) -> bool:
    """Return whether some tensors are on the CPU, and some are not; if one is not like what it gets, all raise."""
    if comm.is_alone and comm.rank != src:  # in a fake group, whose other ranks send nothing
        return False
    encoded = encode(*[header_of(x, x.is_cpu or comm.device_type == "cpu") for x in (tensor, *sent)])
    found = [decode(one) for one in exchange(comm, encoded)]
    _, *entries = found[src]
    require_alike("tensor", tensor, f"what rank {src} sends here", entries[comm.rank], comm)
    refusal = "ValueError: its `tensor` is not like what is sent to it"
    wrong = [headers[0][:2] != one[:2] for headers, one in zip(found, entries, strict=True)]
    require_no_failure([refusal if one else None for one in wrong], comm)
    return len({header.on_cpu for headers in found for header in headers}) > 1
