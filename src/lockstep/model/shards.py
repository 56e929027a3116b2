"""Sharded tensors and models: told apart, gathered in full for a time, brought from one sharding to another; digests.

DTensor and FSDP are imported where something is sharded: that takes half as long as importing torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, group

from lockstep.dist import get_rank, get_world_size
from lockstep.transport.moving import as_bytes

_ROW = 2**16
# Rows per multiplication: on the CPU one, which stays in the cache; on an accelerator many, because starting one takes
# as long as multiplying thousands of numbers.
_ROWS_ON_DEVICE = 64
# Words are widened to 64 bits before they are multiplied. So even their highest bits, such as the signs of two numbers,
# do not cancel each other, as they would modulo 2**64.
_WORDS = {1: torch.uint8, 2: torch.int16}
_meshes_of_rows: WeakKeyDictionary[ProcessGroup, Any] = WeakKeyDictionary()  # by default group

UPDATES_SHARDS = (
    "in the optimizer's update, whose parameters are shards (DTensor) under FSDP. Use an optimizer that can update "
    "shards, such as AdamW or SGD, or strategy 'ddp', which keeps every parameter whole"
)
"""What to add to an error of an optimizer that was let through."""


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a `DTensor`."""
    return hasattr(tensor, "device_mesh")


def own_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory, or the tensor itself if it is not sharded."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def reshard(model: nn.Module) -> None:
    """Free the full parameters of all units of FSDP, so that the parameters of `model` are the shards. Nothing is sent.

    The outermost unit keeps its parameters in full after a forward pass. An optimizer that is then built would hold
    tensors that are about to be freed.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # so nothing is sharded
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def shard_like(value: Tensor, like: Any) -> Tensor:
    """Return `value`, which every rank has in full, sharded like `like`. Nothing is sent."""
    if not is_dtensor(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.to(like.device_mesh.device_type)
    sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to(like.device)  # a different device if parameters are offloaded


def gather_full(tensor: Any) -> Any:
    """Return a tensor in full: `tensor` itself if it is not sharded.

    **Collective**: every rank of its mesh.
    """
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    # One axis at a time. If one dim is split twice, torch warns of it, and gathers once more than it needs to.
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def reshard_as(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested state with its tensors sharded like those of `like` under the same keys.

    **Collective**: every rank, if the sharding of a tensor has to change. **Cost**: an all-gather of each such tensor;
    only one at a time is whole in memory.
    """
    resharded = dict(state)
    for key, value in state.items():
        other = like.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            resharded[key] = reshard_as(value, other)
        elif isinstance(value, Tensor) and isinstance(other, Tensor):
            resharded[key] = reshard_like(value, other)
    return resharded


def reshard_like(value: Tensor, like: Tensor | None) -> Tensor:
    """Return a tensor sharded like another one, or whole; if nothing has to change, the tensor itself.

    **Collective**: every rank, if its sharding has to change. **Cost**: an all-gather in that case.
    """
    if _sharding(value) == _sharding(like):
        return value
    full: Tensor = gather_full(value)
    return full if like is None else shard_like(full, like)


def shard_rows(full: Tensor) -> Tensor:
    """Shard by rows a tensor that every rank has whole; each rank keeps its own rows.

    They are copied to CPU memory. Meant for states that are gathered one tensor at a time because all would not fit at
    once.
    """
    ranks = get_world_size()
    if ranks == 1 or full.dim() == 0:
        return full.detach().to("cpu", copy=True)
    rows = full.detach().chunk(ranks)
    own = rows[get_rank()] if get_rank() < len(rows) else full[:0]
    return _of_rows(own.detach().to("cpu", copy=True), full.shape, full.stride())


def template_of_rows(shape: Sequence[int]) -> Tensor:
    """Return a tensor that is sharded like one of `shard_rows`, but takes no memory; its values are meaningless."""
    ranks = get_world_size()
    nothing = torch.zeros((), device="cpu")
    if ranks == 1 or not shape:
        return nothing.expand(tuple(shape))
    most = -(-shape[0] // ranks)
    rows = max(0, min(most, shape[0] - most * get_rank()))
    full = torch.empty(*shape, device="meta")
    return _of_rows(nothing.expand(rows, *shape[1:]), full.shape, full.stride())


def _of_rows(own: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world = group.WORLD
    assert world is not None, "there are several ranks"
    # Where there is CUDA, torch makes a new group for each mesh over a default group of gloo.
    if (mesh := _meshes_of_rows.get(world)) is None:
        _meshes_of_rows[world] = mesh = init_device_mesh("cpu", (get_world_size(),))
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _sharding(tensor: Any) -> Any:
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def words_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of at most 32 bits, in the order of its elements.

    Args:
        tensor: strided, of any dtype; of a DTensor, this rank's part is taken. A copy is made of one that is not
            contiguous.

    **Shapes**: any -> [n], where n is the number of elements, or of 4-byte words if elements are longer.
    """
    local = own_shard(tensor).detach().resolve_conj().resolve_neg().contiguous()
    return as_bytes(local).view(_WORDS.get(local.element_size(), torch.int32))


def digest_of(words: Tensor) -> Tensor:
    """Return the digest of some words, as a scalar on their device.

    It is the sum of all words, each multiplied by an odd number that depends on its place, modulo 2**64. If one bit is
    flipped, the sum always changes, because an odd factor times a power of two below 2**32 is no multiple of 2**64. If
    several bits differ, it is the same with a probability of about 2**-32.

    Args:
        words: what `words_of` returned.

    **Shapes**: [n] -> [], int64.

    **Cost**: on the CPU 1 ns per word on one core; on an accelerator, about five times the reading of the words, and
    memory for 32 MB. Nothing is sent, and no device is waited for.

    Example:
        >>> from lockstep.model.shards import digest_of, words_of
        >>> weights = torch.randn(1000)
        >>> before = digest_of(words_of(weights))
        >>> weights.view(torch.int32)[123] ^= 1  # the lowest bit
        >>> bool(digest_of(words_of(weights)) == before)
        False
    """
    count = len(words)
    factors = _factors(words.device, 0)
    if count <= _ROW:
        return (words * factors[:count]).sum()
    whole = count // _ROW * _ROW
    step = 1 if words.device.type == "cpu" else _ROWS_ON_DEVICE
    rows = [(part * factors).sum(1) for part in torch.split(words[:whole].view(-1, _ROW), step)]
    if whole < count:
        rows.append((words[whole:] * factors[: count - whole]).sum().view(1))
    sums = torch.cat(rows)
    for_rows = _factors(words.device, 1)
    if len(sums) > _ROW:  # more than 2**32 words
        for_rows = for_rows.repeat(len(sums) // _ROW + 1)
    return (sums * for_rows[: len(sums)]).sum()


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of each tensor's bits, on the device of the first; of a DTensor, of this rank's part.

    Equal replicas have equal digests on machines of all kinds, unlike sums of floating-point numbers.

    **Shapes**: n tensors -> [n], int64. **Cost**: as for `digest_of`.
    """
    found = [digest_of(words_of(tensor)) for tensor in tensors]
    first = found[0].device
    return torch.stack([digest.to(first, non_blocking=first.type != "cpu") for digest in found])


@cache
def _factors(device: torch.device, number: int) -> Tensor:
    """Return odd factors, the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    return (torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator, device="cpu") | 1).to(device)
