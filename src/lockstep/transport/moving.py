"""Tensors that move from rank to rank, on the device on which they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import P2POp, Work

from lockstep.device import copy_into
from lockstep.groups import Comm
from lockstep.transport.control import all_gather_single
from lockstep.transport.handles import Handle, in_backend, note_running, start
from lockstep.transport.memory import as_bytes, as_native, copy_all, is_plain_memory


def gather_alike(wire: Tensor, comm: Comm) -> list[Tensor]:
    """Return every rank's tensor, all of one dtype and shape, as views of one new tensor.

    **Collective**: every rank. **Cost**: one `all_gather_single`.
    """
    if comm.pg is None:
        return [wire.clone()]
    every = wire.new_empty((comm.size, *wire.shape))
    flat = as_native(every).view(-1), as_native(wire).view(-1)
    start(all_gather_single, comm, wire.device, *flat)
    return list(every.unbind())


def gather_into(outputs: Sequence[Tensor], wire: Tensor, comm: Comm, async_op: bool = False) -> Handle:
    """Fill `outputs` with every rank's tensor, which are like them, also where dtypes and shapes differ.

    **Collective**: every rank. **Cost**: one `all_gather`, which NCCL runs as a group of broadcasts if sizes differ; on
    the CPU, where gloo then ends the process, one `broadcast` for each rank, all in flight at once.
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
    return Handle(works, comm, lambda: copy_all(outputs, received))


def place_for(output: Tensor, device: torch.device) -> Tensor:
    """Return where a tensor arrives: the output itself, if it can be received there."""
    if output.device == device and is_plain_memory(output):
        return output
    return torch.empty(output.shape, dtype=output.dtype, device=device)


def transfer(receiving: Sequence[tuple[Tensor, int]], sending: Sequence[tuple[Tensor, int]], comm: Comm) -> Handle:
    """Start to receive contiguous tensors from ranks, and to send some, in one group of messages.

    Sizes are equal on both sides.
    """
    moves = [(torch_dist.irecv, x, peer) for x, peer in receiving] + [
        (torch_dist.isend, x, peer) for x, peer in sending
    ]
    # Empty ones travel on devices, where all ranks must take part in the first messages of a group.
    moves = [move for move in moves if move[1].numel() or not move[1].is_cpu]
    # A view as bytes is detached: a parameter may be received into.
    ops = [P2POp(run, as_native(x.detach()), group=comm.pg, group_peer=peer) for run, x, peer in moves]
    works: list[Work] = []
    if ops:
        with in_backend(comm):
            works = torch_dist.batch_isend_irecv(ops)
        if not ops[0].tensor.is_cpu:  # what goes from rank to rank over gloo can't be asked (torch 2.13)
            note_running(comm, ops[0].tensor.device, works[-1])
    return Handle(works, comm)
