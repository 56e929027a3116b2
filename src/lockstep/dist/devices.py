"""Where data lives, where a group talks, and the way between the two."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.tree import tree_items, tree_map


def get_data_device(data: Any) -> torch.device:
    """Return the device on which all tensors in `data` live.

    Args:
        data: a tensor, or any tree of tensors and other leaves; the others are passed over.

    **Raises**: ValueError where tensors live on different devices, naming one of each; TypeError where there is no
    tensor.

    **Example**::

        >>> get_data_device({"image": torch.zeros(2), "label": 3})
        device(type='cpu')
    """
    first_path, device = "", None
    for path, leaf in tree_items(data):
        if not isinstance(leaf, Tensor):
            continue
        if device is None:
            first_path, device = path, leaf.device
        elif leaf.device != device:
            raise ValueError(
                f"`data` must live on one device, but `{first_path}` is on {device} and `{path}` on {leaf.device}. "
                "Move it with cast_data_device()"
            )
    if device is None:
        raise TypeError(f"`data` must hold a tensor, but holds none: {_shortened(data)}")
    return device


def get_comm_device(group: GroupLike = None) -> torch.device:
    """Return the device on which the group talks; data that lives elsewhere is staged through it.

    The accelerator bound to this process where the backend serves it (nccl: ``cuda``), else the CPU.
    """
    return resolve(group).comm_device


def cast_data_device(data: Any, device: torch.device | str, out: Any = None) -> Any:
    """Return `data` with its tensors on `device`, all types of containers kept.

    Args:
        data: a tensor, or any tree of tensors and other leaves; the others are passed on as they are.
        device: where to.
        out: a tree shaped as `data`, into whose tensors the values are copied; it is then what is returned.

    **Raises**: ValueError where `out` differs from `data` in its leaves or the shape of a tensor, or its tensors do not
    live on `device`; nothing is copied then.
    """
    target = torch.device(device)
    if out is None:
        return tree_map(lambda x: x.to(target) if isinstance(x, Tensor) else x, data)
    sources, sinks = (sorted(tree_items(tree), key=itemgetter(0)) for tree in (data, out))
    paths, sink_paths = [path for path, _ in sources], [path for path, _ in sinks]
    if paths != sink_paths:
        raise ValueError(f"`out` must have the leaves of `data`, {paths}, but has {sink_paths}")
    pairs = [
        (path, source, sink)
        for (path, source), (_, sink) in zip(sources, sinks, strict=True)
        if isinstance(source, Tensor)
    ]
    for path, source, sink in pairs:
        _check_sink(sink, source, path, target)
    for _, source, sink in pairs:
        copy_back(sink, source)
    return out


def to_wire(data: Tensor, group: Group) -> Tensor:
    """Return `data`, or a contiguous copy of it on a device that the group moves, outside the graph of gradients."""
    if data.requires_grad:
        data = data.detach()
    if data.is_conj() or data.is_neg():  # backends see the memory, not what torch still owes to it
        data = data.resolve_conj().resolve_neg()
    # The first question is a cheap one, and answers for the usual case.
    is_moved = (data.is_cpu and "cpu" in group.devices) or data.device.type in group.devices
    if not is_moved and group.reference is not None:
        data = data.to(group.comm_device)
    return data.contiguous()


def to_comm(data: Tensor, group: Group) -> Tensor:
    """Return `data`, or a copy, as `to_wire` does, but always on `group.comm_device`.

    For collectives that leave devices free: where a group serves several, the ranks have to agree on one.
    """
    wire = to_wire(data, group)
    return wire if wire.device == group.comm_device else wire.to(group.comm_device)


def is_bare(data: Tensor) -> bool:
    """Return whether a tensor's memory holds its values one after the other, so that bytes may be written there."""
    return data.is_contiguous() and not data.is_neg() and not data.is_conj()


def as_bytes(data: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a flat uint8 view of the same memory."""
    # Any dtype can travel so, also those for which a backend has no name. Neither a 0-dim tensor can change its item
    # size nor one element of a strided view, which counts as contiguous whatever its stride.
    return data.detach().as_strided((data.numel(),), (1,)).view(torch.uint8)


def copy_back(data: Tensor, result: Tensor) -> None:
    """Copy a result, of any shape with as many elements, into the caller's tensor."""
    result = result.reshape(data.shape)
    if data.requires_grad:
        with torch.no_grad():
            data.copy_(result)
    else:
        data.copy_(result)


def _check_sink(sink: Any, source: Tensor, path: str, target: torch.device) -> None:
    if not isinstance(sink, Tensor) or sink.shape != source.shape:
        got = tuple(sink.shape) if isinstance(sink, Tensor) else type(sink).__name__
        raise ValueError(f"`out` at `{path}` must be a tensor of shape {tuple(source.shape)}, but is {got}")
    if sink.device.type != target.type or (target.index is not None and sink.device.index != target.index):
        raise ValueError(f"`out` at `{path}` must live on {target}, but is on {sink.device}")


def _shortened(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."
