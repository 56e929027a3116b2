"""The data plane: tensors that move from rank to rank on the device on which they are, by torch's public functions.

The memory of tensors, as it is sent and received, is here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from lockstep.device import copy_into
from lockstep.groups import Comm
from lockstep.transport.handles import Handle, in_backend, note_running, start
from lockstep.transport.reduce_ops import NATIVE_DTYPES

# Renamed in torch 2.13; remove the second name when 2.12 is no longer supported.
all_gather_single: Callable[..., Work | None] = (
    torch_dist.all_gather_single if hasattr(torch_dist, "all_gather_single") else torch_dist.all_gather_into_tensor
)


def gather_alike(wire: Tensor, comm: Comm) -> list[Tensor]:
    """Return every rank's tensor, all of one dtype and shape, as views of one new tensor.

    **Collective**: every rank. **Cost**: one `all_gather_single`.
    """
    if comm.pg is None:
        return [wire.clone()]
    every = wire.new_empty((comm.size, *wire.shape))
    start(all_gather_single, comm, wire.device, as_native(every).view(-1), as_native(wire).view(-1))
    return list(every.unbind())


def gather_into(outputs: Sequence[Tensor], wire: Tensor, comm: Comm, async_op: bool = False) -> Handle:
    """Fill `outputs` with every rank's tensor, which are like them, also where dtypes and shapes differ.

    **Collective**: every rank. **Cost**: one `all_gather`, which NCCL runs as a group of broadcasts if sizes differ.
    There, gloo would end the process: on the CPU it is one `broadcast` for each rank, all in flight at once.
    """
    if comm.pg is None:
        copy_into(outputs[0], wire)
        return Handle((), comm)
    received = [place_for(x, wire.device) for x in outputs]
    flat = [as_bytes(x) for x in received]
    if wire.is_cpu and len({x.numel() for x in flat}) > 1:
        copy_into(received[comm.rank], wire)
        works = [
            start(torch_dist.broadcast, comm, wire.device, x, group_src=rank, async_op=True)
            for rank, x in enumerate(flat)
            if x.numel()
        ]
    else:
        works = [start(torch_dist.all_gather, comm, wire.device, flat, as_bytes(wire), async_op=async_op)]

    def finish() -> None:
        used_on_current_stream(wire)
        copy_all(outputs, received)

    return Handle(works, comm, finish)


def send_to_each(parts: Sequence[Tensor], arriving: Sequence[int], comm: Comm, async_op: bool) -> tuple[Tensor, Handle]:
    """Start to send the i-th part to rank i; return where the parts of all ranks arrive, flat, and the handle.

    Args:
        parts: one for each rank, of one dtype. They may lie on several devices, but one tensor is sent, on the first's.
        arriving: number of elements that each rank sends here.
        comm: the group.
        async_op: return before it is complete.

    **Collective**: every rank. **Cost**: one `all_to_all_single`, and a copy of what is sent.
    """
    device = parts[0].device
    sent = torch.cat([part.reshape(-1).to(device) for part in parts])
    received = sent.new_empty(sum(arriving))
    sizes = [part.numel() for part in parts]
    work = start(torch_dist.all_to_all_single, comm, device, received, sent, arriving, sizes, async_op=async_op)

    def finish() -> None:
        used_on_current_stream(sent)
        used_on_current_stream(received)

    return received, Handle([work], comm, finish)


def place_for(output: Tensor, device: torch.device) -> Tensor:
    """Return the tensor to receive into: the output itself if possible, else a new one on the device."""
    if output.device == device and is_plain_memory(output):
        return output
    return torch.empty(output.shape, dtype=output.dtype, device=device)


def transfer(
    receiving: Sequence[tuple[Tensor, int]],
    sending: Sequence[tuple[Tensor, int]],
    comm: Comm,
    group: ProcessGroup | None = None,
    tag: int = 0,
) -> Handle:
    """Start to receive contiguous tensors from ranks, and to send some, in one group of messages.

    Sizes are equal on both sides.

    Args:
        receiving: tensors, each with the rank that sends it.
        sending: tensors, each with the rank that receives it.
        comm: the group.
        group: which group of torch's carries them, in place of that of `comm`; one of both must exist.
        tag: kind of messages; those of one kind keep their order.
    """
    moves = [(torch_dist.irecv, x, peer) for x, peer in receiving] + [
        (torch_dist.isend, x, peer) for x, peer in sending
    ]
    # Empty ones travel on devices, where all ranks must take part in the first messages of a group.
    moves = [move for move in moves if move[1].numel() or not move[1].is_cpu]
    # A view as bytes is detached: a parameter may be received into.
    ops = [
        P2POp(run, as_native(x.detach()), group=group or comm.pg, group_peer=peer, tag=tag) for run, x, peer in moves
    ]
    works: list[Work] = []
    if ops:
        with in_backend(comm):
            works = torch_dist.batch_isend_irecv(ops)
        if not ops[0].tensor.is_cpu:  # gloo's sends and receives can't be queried (torch 2.13)
            note_running(comm, ops[0].tensor.device, works[-1])

    def finish() -> None:
        for sent, _ in sending:
            used_on_current_stream(sent)

    return Handle(works, comm, finish)


def copy_all(data: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy each result into its tensor, as `copy_into` does, unless they are the same tensor."""
    for one, result in zip(data, results, strict=True):
        if result is not one:
            copy_into(one, used_on_current_stream(result))


def used_on_current_stream(staged: Tensor) -> Tensor:
    """Return a staging tensor after telling torch's allocator that the current stream reads it.

    Its memory is then not reused, by whichever stream has allocated it, before the current stream has read it. Of a
    collective that the current stream waits for, that holds for what was sent, too: torch keeps it until `Work.wait`,
    and NCCL may read it later (2.13).
    """
    if not staged.is_cpu:
        staged.record_stream(torch.accelerator.current_stream(staged.device))
    return staged


def is_dense_on_host(data: Tensor) -> bool:
    """Return whether a tensor is an array in the host's memory, not sparse, nested or quantized."""
    return data.is_cpu and data.layout is torch.strided and not (data.is_nested or data.is_quantized)


def is_plain_memory(data: Tensor) -> bool:
    """Return whether a tensor's memory holds exactly its values, in order, so that bytes may be written there."""
    return data.is_contiguous() and not data.is_neg() and not data.is_conj()


def as_bytes(data: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a flat uint8 view of the same memory."""
    # as_strided, because view(dtype) fails for a 0-dim tensor, and for one element of a strided view, which counts as
    # contiguous whatever its stride.
    return data.detach().as_strided((data.numel(),), (1,)).view(torch.uint8)


def as_native(wire: Tensor) -> Tensor:
    """Return a contiguous tensor unchanged, or as bytes if not every backend supports its dtype."""
    return wire if wire.dtype in NATIVE_DTYPES else as_bytes(wire)


def bytes_of(data: Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor's memory, which it keeps alive."""
    view: memoryview = as_bytes(data).numpy().data
    return view
