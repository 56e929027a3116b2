"""Weights that are written where a strategy loses the change, or where replicas drift apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.calls import unlike_most
from lockstep.dist import get_world_size
from lockstep.dist.agreement import Sampled, differing
from lockstep.errors import ConfigError, DivergenceError, counted, ranks_in_words
from lockstep.groups import GroupLike
from lockstep.model.parts import Site, parameter_at
from lockstep.model.shards import digests

IN_FORWARD = (
    "was written in the forward pass, where it is a gathered copy that is released afterwards. Write it between steps, "
    "where it is the shard, as in a hook after each update"
)
DATA_SET = (
    "was given values by `parameter.data = values`, which changes nothing in a shard. Write it in place, as by "
    "`parameter.data.copy_(values)`"
)


class LostWrites:
    """Finds such writes in the forward passes that are looked at.

    A gathered parameter has been written if its version or its digest changes during the forward pass of its unit: a
    write through `parameter.data` leaves the version as it is.

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
        self._before: dict[nn.Module, tuple[list[Tensor], list[int], Tensor]] = {}
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
        parameters: list[Tensor] = [parameter for _, _, parameter in self._at(unit)]
        if parameters and torch.is_grad_enabled():
            versions = [parameter._version for parameter in parameters]
            self._before[unit] = parameters, versions, digests(parameters)

    def end(self, unit: nn.Module) -> None:
        """Compare. FSDP has not released the unit yet."""
        if (before := self._before.pop(unit, None)) is not None:
            parameters, versions, sums = before
            names = [name for _, name, _ in self._at(unit)]
            changed = [own._version != version for own, version in zip(parameters, versions, strict=True)]
            self.found.update(dict.fromkeys(compress(names, changed), IN_FORWARD))
            self._changes.append((names, sums != digests(parameters)))

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


def _storage(shard: Tensor) -> int:
    """Return the identity of a DTensor's own storage, which holds nothing, but changes if its `data` are set (2.13)."""
    return int(shard.untyped_storage()._cdata)


def awaits_update(optim_wrapper: Any) -> bool:
    """Return whether a step has updated nothing, because a window of accumulation goes on in each optim wrapper."""
    parts = getattr(optim_wrapper, "optim_wrappers", {"": optim_wrapper})
    return all(getattr(part, "has_open_window", False) for part in parts.values())


class DriftCheck:
    """Compares the parameters of all replicas, which stay equal only if each update is the same on every rank.

    After the first three updates, every 500th, and each that `look_again` asks for, and before a checkpoint is saved,
    one digest of each parameter is compared; or before updates alone, if an engine lays replicas out so that an update
    makes them equal again, with a mixture of what was in them.

    Args:
        named: returns the parameters that must be equal, with their names, the same on every rank.
        group: the ranks.
        remedy: what to do if there is a difference whose cause is not known.

    **Collective**: every rank of the group. **Cost**: per check, one reading of all parameters, one host read, and one
    exchange between the hosts.
    """

    def __init__(self, named: Callable[[], Sequence[tuple[str, Tensor]]], group: GroupLike, remedy: str) -> None:
        self._named, self._group, self._remedy = named, group, remedy
        self._has_peers = get_world_size(group) > 1
        self._updates = Sampled(first=3, every=500)
        self._looks_again = False
        self._is_local = True  # until an update that is the same on every rank

    def look_again(self) -> None:
        """Compare after the next update, too: weights may have been written since the last one. On every rank."""
        self._looks_again = True

    def after_update(self) -> None:
        """Compare if that is due, after a training step that may have updated the parameters.

        Raises:
            DivergenceError: on every rank, if replicas differ.
        """
        self._is_local = False
        if self._updates.is_due() or self._looks_again:
            self._looks_again = False
            self._compare(f"after {counted(self._updates.count, 'update')}")

    def after_local_update(self) -> None:
        """Be told of a step that may have updated with gradients of this rank's own, so that replicas may differ."""
        self._is_local = True

    def before_save(self) -> None:
        """Compare, unless replicas may differ: a checkpoint would hold the weights of one of them.

        Raises:
            DivergenceError: on every rank, if replicas differ.
        """
        if not self._is_local:
            self._compare(f"after {counted(self._updates.count, 'update')}, where a checkpoint was to be saved")

    def before_update(self) -> None:
        """Compare if that is due, where an engine is about to update.

        Raises:
            DivergenceError: on every rank, if replicas differ.
        """
        if self._updates.is_due():
            self._compare(f"before update {self._updates.count}")

    def _compare(self, when: str) -> None:
        named = self._named() if self._has_peers else []
        if not named:
            return
        by_rank = differing(digests([tensor for _, tensor in named]).tolist(), [self._group])
        if by_rank is None:
            return
        columns = zip((name for name, _ in named), zip(*by_rank, strict=True), strict=True)
        name, column = next((name, column) for name, column in columns if len(set(column)) > 1)
        ranks = unlike_most(dict(enumerate(column)))
        raise DivergenceError(
            f"`{name}` must be the same on all ranks, but is not: {ranks_in_words(ranks)} of {len(column)} "
            f"{'differs' if len(ranks) == 1 else 'differ'} from the others {when}. {self._remedy}",
            name=name,
            ranks=ranks,
        )


_BY_OWN_BATCH = "in the forward pass, where each rank has its own batch"
_ALIKE = (
    "Write weights between steps, in the same way on every rank, as in a hook; let a layer that initialises itself "
    "with its first batch do so before training, with a batch that is the same on every rank; or train in one process "
    "with strategy 'single'"
)
_DRAWS = (
    "Let an optimizer that draws some do so within torch.random.fork_rng(), after a torch.manual_seed that is the same "
    "on every rank, or let all ranks draw the same for everything: randomness=dict(diff_rank_seed=False)."
)
OWN_STEP = (
    "The training step may have updated it with gradients that were not averaged over ranks. Let the optim wrapper "
    "run the backward pass: optim_wrapper.update_params(loss), or "
    "optim_wrapper.backward(optim_wrapper.scale_loss(loss)) and "
    f"optim_wrapper.step(); in the loop of a Session, session.step(loss). Or it was written {_BY_OWN_BATCH}, or by "
    f"code that some ranks alone run, as under `if rank == 0`; or the optimizer draws random numbers. {_DRAWS} {_ALIKE}"
)
"""What to do if a training step of the user's own has let replicas drift apart."""
AVERAGED = (
    f"Its gradients are averaged, so it was written {_BY_OWN_BATCH}; or an option of the optimizer, a hook, or random "
    f"numbers in the update differ between ranks, or the memory of one is faulty. {_DRAWS} {_ALIKE}"
)
"""What to do if replicas have drifted apart whose gradients were averaged."""
BY_RANK = f"Each rank has written other values, as {_BY_OWN_BATCH}. {_ALIKE}"
"""What to do if replicas differ before an update of an engine's."""


def refuse_max_norm(module: nn.Module, why: str, ignored: Collection[nn.Module] = ()) -> None:
    """Refuse embeddings that shorten the rows that they look up, in the forward pass.

    Args:
        module: the model.
        why: what becomes of that on this strategy, the middle of a sentence.
        ignored: modules that each rank has for itself.

    Raises:
        ConfigError: on every rank, naming the embedding.
    """
    for name, part in module.named_modules():
        if part not in ignored and isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ConfigError(
                f"`{f'{name}.max_norm'.lstrip('.')}` must be None {why}, but is {part.max_norm}: "
                f"{type(part).__name__} would shorten the rows that it looks up in the forward pass. Shorten all rows "
                f"in a hook after each update, with weight.copy_(torch.renorm(weight, {part.norm_type:g}, 0, "
                "max_norm)), or use strategy 'single'"
            )
