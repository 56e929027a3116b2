"""Writes to the parameters of a sharded model that FSDP would lose: to gathered copies, or to the `data` of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.model.drift import checksum
from lockstep.model.fsdp_sites import Site, parameter_at
from lockstep.model.shards import is_dtensor, own_shard

IN_FORWARD = (
    "was written in the forward pass, where it is a gathered copy that is released afterwards. Write it between steps, "
    "where it is the shard, as in a hook after each update"
)
DATA_SET = (
    "was given values by `parameter.data = values`, which changes nothing in a shard. Write it in place, as by "
    "`parameter.data.copy_(values)`"
)


class TensorVersions:
    """The versions of named tensors, such as parameters, at a moment.

    A write in place raises a tensor's version, and `tensor.data = other` changes its address. A write in place through
    `tensor.data` or `tensor.detach().numpy()` changes neither, and is not seen.

    Args:
        named: the tensors, such as `module.named_parameters()`. Of a DTensor, a write to this rank's shard counts,
            too.

    **Cost**: about half a microsecond per tensor and comparison. Nothing is read from a device.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._named = list(named)
        self._seen: list[tuple[int, ...]] = []
        self.record()

    def record(self) -> None:
        """Take the present versions as those to compare with."""
        self._seen = [_version(tensor) for _, tensor in self._named]

    def written(self) -> list[str]:
        """Return the names of the tensors that have been written since the last `record`."""
        return [name for (name, tensor), seen in zip(self._named, self._seen, strict=True) if _version(tensor) != seen]


class _Before(NamedTuple):
    """What a unit's gathered parameters were when its forward pass began."""

    parameters: list[Tensor]
    versions: TensorVersions
    sums: Tensor


class LostWrites:
    """Finds such writes in the forward passes that are looked at.

    A gathered parameter has been written if its version, its address or its checksum changes during the forward pass of
    its unit.

    Args:
        sites: for each unit, where to find its parameters, and their names.

    Attributes:
        found: by name, what happened to a parameter.

    **Cost**: in a pass that is looked at, two readings of all gathered parameters. `resolve` reads one number for each
    of them from the device.
    """

    def __init__(self, sites: Mapping[nn.Module, Mapping[Site, str]]) -> None:
        self.found: dict[str, str] = {}
        self._sites = sites
        self._before: dict[nn.Module, _Before] = {}
        self._changes: list[tuple[list[str], Tensor]] = []
        shards = {site: parameter_at(site) for own in sites.values() for site in own}
        self._shards = {site: (shard, _storage(shard)) for site, shard in shards.items()}

    def check_shards(self, unit: nn.Module) -> None:
        """Find shards whose `data` have been set since the model was sharded. FSDP has not gathered the unit yet."""
        for site, name, parameter in self._at(unit):
            shard, storage = self._shards[site]
            if parameter is shard and _storage(shard) != storage:
                self.found.setdefault(name, DATA_SET)

    def begin(self, unit: nn.Module) -> None:
        """Note what the parameters of a unit are. FSDP has gathered the unit."""
        named = [(name, parameter) for _, name, parameter in self._at(unit)]
        if named and torch.is_grad_enabled():
            parameters: list[Tensor] = [parameter for _, parameter in named]
            self._before[unit] = _Before(parameters, TensorVersions(named), _checksums(parameters))

    def end(self, unit: nn.Module) -> None:
        """Compare. FSDP has not released the unit yet."""
        if (before := self._before.pop(unit, None)) is not None:
            self.found.update(dict.fromkeys(before.versions.written(), IN_FORWARD))
            names = [name for _, name, _ in self._at(unit)]
            self._changes.append((names, before.sums != _checksums(before.parameters)))

    def resolve(self) -> dict[str, str]:
        """Return what has been found, after a look at the device."""
        if self._changes:
            names = [name for names, _ in self._changes for name in names]
            changed = torch.cat([changed.to(self._changes[0][1].device) for _, changed in self._changes]).tolist()
            written = zip(names, changed, strict=True)
            self.found.update({name: IN_FORWARD for name, is_written in written if is_written})
        self._changes.clear()
        return self.found

    def _at(self, unit: nn.Module) -> Iterator[tuple[Site, str, nn.Parameter]]:
        for site, name in self._sites[unit].items():
            yield site, name, parameter_at(site)


def _checksums(parameters: list[Tensor]) -> Tensor:
    return torch.stack([checksum(parameter) for parameter in parameters])


def _storage(shard: Tensor) -> int:
    """Return the identity of a DTensor's own storage, which holds nothing, but changes if its `data` are set (2.13)."""
    return int(shard.untyped_storage()._cdata)


def _version(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_inference():  # has no version
        return (tensor.data_ptr(),)
    if not is_dtensor(tensor):
        return tensor._version, tensor.data_ptr()
    with torch.no_grad():
        return tensor._version, *_version(own_shard(tensor))
