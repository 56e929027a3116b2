"""Checking that all ranks gather the same units of a sharded model, and get gradients for the same parameters."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.dist import all_reduce
from lockstep.dist.agreement import from_all
from lockstep.errors import CollectiveMismatchError, ConfigError, listed
from lockstep.groups import this_rank
from lockstep.model.autograd_graph import backward_pass, leaf_of, never_compiled, nodes_of, on_backward
from lockstep.model.call_order import CallOrder
from lockstep.model.fsdp.units import is_unit, sites_by_unit
from lockstep.model.hidden_outputs import without_shown
from lockstep.model.parts import parameter_at
from lockstep.model.written import LostWrites
from lockstep.tree import tree_leaves

_COMPARED_PASSES = 6  # passes of each kind that are compared
_REMEDY = (
    "Use strategy 'ddp' with find_unused_parameters=True; or gather the part around them as one unit, by its class in "
    "`auto_wrap_policy` or by auto_wrap_policy=None, with find_unused_parameters=True"
)


class Consistency:
    """Compares, across ranks, the calls of units and the gradients, which FSDP assumes to be the same.

    Units are gathered, and their gradients reduced, by collectives that carry no names: see `CallOrder` for forward
    passes. Ranks whose losses depend on different parameters of a unit would wait for each other forever or, if the
    parameters have the same shape, mix up their gradients. Before a compared backward pass, the ranks check that it
    reaches the same units and parameters on all of them; before it and a compared forward pass, that all or none hold
    gathered parameters.

    The first six passes are compared, unit by unit, and every fiftieth after, at its end; all of them, unit by unit,
    after `check_collectives("always")`.
    Forward passes with gradients, those without, and backward passes are counted separately.

    Args:
        module: the module, sharded.
        mesh: all ranks that must behave in the same way, along one axis or several.
        replicated: parameters that are not sharded, but whose gradients are averaged.
        find_unused: allow different parameters of a unit to get gradients on different ranks. A rank without a gradient
            contributes zeros if another rank has one. Every backward pass is then compared.
        frees: units are freed after their forward passes, all but the outermost, so none may return its parameters.

    **Cost**: in each forward pass, a look at the tensor in each parameter's place. In a compared one, an exchange
    between the hosts, in the first six for each unit, and two readings of all gathered parameters, to find those that
    are written. In a compared backward pass, a walk over its graph, and one exchange between the hosts; with
    `find_unused` also an all_reduce of one byte for each parameter.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, replicated: Collection[Tensor], find_unused: bool, frees: bool
    ) -> None:
        self._find_unused, self._frees = find_unused, frees
        self._module = module
        self._units = {unit: name for name, unit in module.named_modules() if is_unit(unit)}
        self._unit_names = list(self._units.values())
        self._order = CallOrder(
            self._unit_names,
            rule="all ranks must call the same units of FSDP in the same order",
            remedy=_REMEDY,
            error=CollectiveMismatchError,
            first=_COMPARED_PASSES,
            mesh=mesh,
        )
        self._sites = sites_by_unit(module)
        self._writes = LostWrites(self._sites)
        self._shards = {site: parameter_at(site) for sites in self._sites.values() for site in sites}
        # Gathered parameters of the units that have been called, and their names.
        self._gathered: dict[Tensor, str] = {}
        self._known_units: set[nn.Module] = set()  # units whose gathered parameters are in there
        whole = set(replicated)
        self._replicated: dict[Tensor, str] = {own: name for name, own in module.named_parameters() if own in whole}
        names = [name for sites in self._sites.values() for name in sites.values()]
        self._param_names = list(dict.fromkeys([*names, *self._replicated.values()]))
        # Of the present forward pass: units that run, outermost first; the exception that was being handled before it.
        self._running: list[nn.Module] = []
        self._handled: BaseException | None = None
        # Of the present window of accumulation: whether its backward passes are compared, None before the first; names
        # of the parameters that they have reached.
        self._window_is_due: bool | None = None
        self._window: set[str] = set()
        self._is_prepared = False  # inside `backward_pass`
        for unit in self._units:
            # Before and after FSDP's own hooks; like those, they must be excluded from compilation.
            unit.register_forward_pre_hook(never_compiled(self._before_unit), prepend=True)
            unit.register_forward_pre_hook(never_compiled(self._find_gathered))
            unit.register_forward_hook(never_compiled(self._before_release), prepend=True)
            unit.register_forward_hook(never_compiled(self._after_unit), always_call=True)
        if find_unused and self._order.has_peers:
            on_backward(module, self._require_preparation)

    @contextmanager
    def backward_pass(self, loss: Tensor, *, reduces: bool) -> Iterator[None]:
        """Run a backward pass inside, after all ranks have checked that it will reach the same units and parameters.

        With `find_unused`, this rank first contributes zeros for gradients that only other ranks get.

        Args:
            loss: the loss on which the pass runs.
            reduces: whether the pass reduces gradients over ranks at its end.

        **Collective**: every rank of the mesh.

        Raises:
            CollectiveMismatchError: on every rank, if the passes reach different units or, without `find_unused`,
                different parameters; or if some ranks alone have freed gathered parameters.
            ConfigError: on every rank, if a parameter was written where the change is lost, see `LostWrites`; or if
                torch has reduced no gradients of a unit that the pass reaches.
        """
        reached: Collection[str] = ()
        if self._window_is_due is None:
            self._window_is_due = self._order.samples("backward") or self._find_unused
        if self._window_is_due and self._order.has_peers:
            reached = self._compare_graphs(loss, reduces)
        elif self._window_is_due and (lost := self._writes.resolve()):
            self._refuse_writes(lost)
        if reduces:
            self._window.clear()
            self._window_is_due = None
        self._is_prepared = True
        try:
            yield
        finally:
            self._is_prepared = False
        if reduces:
            self._require_reduced(reached)

    def _require_reduced(self, reached: Collection[str]) -> None:
        """Refuse a unit that is still gathered after a pass that has reached it: its gradients are on this rank alone.

        So it is where a loss depends only on tensors that torch does not find in the unit's output, and after a
        backward pass that has failed, and whose error was caught (2.13).
        """
        for unit, sites in self._sites.items():
            for site, name in sites.items():
                if name in reached and not isinstance(parameter_at(site), DTensor):
                    raise ConfigError(
                        f"`{self._units[unit] or type(unit).__name__}` must return the tensors that the loss depends "
                        f"on where FSDP finds them, because it has reduced no gradient of `{name}` ({this_rank()}). "
                        "Return a tensor, or a dict, list, tuple or dataclass of tensors. After a backward pass that "
                        "has failed, FSDP can't go on: end the training, and resume it"
                    )

    def _require_preparation(self, _: Tensor) -> None:
        if not self._is_prepared:
            raise RuntimeError(
                "a backward pass under `find_unused_parameters` must be prepared, so that no rank waits for gradients "
                "that another one lacks. Call optim_wrapper.update_params(loss) in the model's train_step, or write "
                "`with model.backward_context(loss, syncs=True): loss.backward()`"
            )

    def _compare_graphs(self, loss: Tensor, reduces: bool) -> Collection[str]:
        """Compare what the pass will reach, and return the names of the parameters. **Collective**: every rank."""
        units, params = self._reached_from(loss)
        self._window |= params
        # A pass that reduces nothing only gathers units.
        names = self._param_names if reduces and not self._find_unused else []
        of_units = [name in units for name in self._unit_names]
        of_params = [name in self._window for name in names]
        lost = self._writes.resolve()
        digest = zlib.crc32(
            bytes([*of_units, *of_params, self._holds_gathered(), reduces]) + repr(sorted(lost.items())).encode()
        )
        if not self._order.meet_in_backward(digest) or lost:
            self._refuse_freed()
            self._refuse_writes(lost)
            self._refuse_other_ends(reduces)
            self._refuse_graphs(of_units, of_params)
        if reduces and self._find_unused:
            self._contribute_zeros()
        return params

    def _contribute_zeros(self) -> None:
        """Give this rank zero gradients to reduce for parameters that get a gradient only on other ranks."""
        anywhere = torch.tensor([name in self._window for name in self._param_names], dtype=torch.uint8, device="cpu")
        for group in self._order.groups:
            all_reduce(anywhere, op="max", group=group)
        missing = set(compress(self._param_names, anywhere.tolist())) - self._window
        for parameter, name in self._gathered.items():
            if name in missing:
                parameter.grad = torch.zeros_like(parameter)

    def _reached_from(self, loss: Tensor) -> tuple[set[str], set[str]]:
        """Return the units and the parameters that gradients of `loss` flow into."""
        units: set[str] = set()
        params: set[str] = set()
        for node in nodes_of(loss):
            leaf = leaf_of(node)
            if leaf is not None:
                name = self._gathered.get(leaf) or self._replicated.get(leaf)
                if name is not None:
                    params.add(name)
            elif type(node).__name__ == "RegisterPostBackwardFunctionBackward":
                # If a unit's inputs require grad, FSDP's own node reduces the unit's gradients after theirs (2.13).
                units.update(self._units[unit] for unit in node.param_group.modules if unit in self._units)
        # If they don't, the unit is gathered if some of its parameters get a gradient. The outermost unit stays
        # gathered.
        inner = [unit for unit in self._units if unit is not self._module]
        units.update(self._units[unit] for unit in inner if not params.isdisjoint(self._sites[unit].values()))
        return units, params

    def _before_unit(self, module: nn.Module, args: Any) -> None:
        if backward_pass() != -1:  # recomputation in a backward pass
            return
        self._refuse_given(module)
        if module is self._module or not self._running:
            self._running.clear()
            self._handled = sys.exception()
            self._order.begin()
        if self._order.is_compared:
            holds = module is self._module and self._holds_gathered()
            if not self._order.call(self._unit_names.index(self._units[module]), holds):
                self._refuse_freed()
        if self._order.is_sampled:
            self._writes.check_shards(module)
        self._running.append(module)

    def _find_gathered(self, module: nn.Module, args: Any) -> None:
        if self._order.is_sampled and backward_pass() == -1:
            self._writes.begin(module)
        if module in self._known_units and not self._order.is_compared and not self._find_unused:
            return
        self._known_units.add(module)
        for site, full_name in self._sites[module].items():
            self._gathered[parameter_at(site)] = full_name

    def _before_release(self, module: nn.Module, args: Any, output: Any) -> None:
        self._writes.end(module)
        if self._order.is_sampled and self._frees and module is not self._module:
            self._refuse_own(module, output)

    def _after_unit(self, module: nn.Module, args: Any, output: Any) -> Any:
        if backward_pass() == -1 and module in self._running:
            del self._running[self._running.index(module) :]
            if not self._running:
                self._order.end(failed=sys.exception() is not self._handled)
        return without_shown(output)

    def _holds_gathered(self) -> bool:
        """Return whether this rank holds gathered parameters between passes, as of the outermost unit."""
        return any(parameter_at(site) in self._gathered for sites in self._sites.values() for site in sites)

    def _refuse_given(self, unit: nn.Module) -> None:
        """Refuse tensors that a call is given for a unit's parameters: FSDP would compute with its own all the same."""
        for site, name in self._sites[unit].items():
            given = getattr(*site)
            is_known = unit in self._known_units or not isinstance(given, nn.Parameter)  # others may be gathered
            if is_known and given is not self._shards[site] and given not in self._gathered:
                raise ConfigError(
                    f"`{name}` must be the model's own parameter where FSDP gathers it, but another tensor is in its "
                    f"place ({this_rank()}), as torch.func.functional_call puts it there. Call that in the `forward` "
                    "of a module around the model, which auto_wrap_policy=None makes one unit; or use strategy 'ddp'"
                )

    def _refuse_freed(self) -> None:
        """Raise an error if some ranks alone have freed what all had gathered. **Collective**: every rank of the mesh.

        They would gather it again, and the others would not take part in that.
        """
        holds = from_all(self._holds_gathered(), self._order.groups)
        if len(set(holds)) > 1:
            raise CollectiveMismatchError(
                "`parameters()` and `state_dict()` of a model under FSDP must be called on every rank after a forward "
                "pass, because they free the parameters that it has gathered, but were called on "
                f"{self._order.ranks_with(False, holds)} alone. Call them on every rank, or before the forward pass",
                failed_ranks=self._order.unlike_most(holds),
            )

    def _refuse_own(self, module: nn.Module, output: Any) -> None:
        """Refuse a parameter, or a view of one, as output: its memory is about to be freed (torch 2.13: SIGSEGV)."""
        names = {
            parameter_at(site).untyped_storage().data_ptr(): name
            for site, name in self._sites[module].items()
            if not isinstance(parameter_at(site), DTensor)
        }
        for leaf in tree_leaves(output):
            # A layer that tensor parallelism splits returns a DTensor here, which has no storage of its own.
            if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
                continue
            if name := names.get(leaf.untyped_storage().data_ptr()):
                raise ConfigError(
                    f"`{self._units[module]}` must not return its parameter `{name}`, nor a view of it, because FSDP "
                    f"frees what it has gathered for a unit when the unit's forward pass ends ({this_rank()}). Return "
                    f"{name.rpartition('.')[2]}.clone(), or let `auto_wrap_policy` make no unit of this module, or "
                    "give reshard_after_forward=False"
                )

    def _refuse_writes(self, lost: Mapping[str, str]) -> None:
        """Raise an error if a write is lost on any rank. **Collective**: every rank of the mesh.

        Args:
            lost: this rank's, as `LostWrites.resolve` returns them.
        """
        by_rank = from_all(dict(lost), self._order.groups)
        for name in self._param_names:
            what = [lost.get(name) for lost in by_rank]
            if kind := next(filter(None, what), None):
                raise ConfigError(
                    f"`{name}` must not be written where FSDP loses the change, but on "
                    f"{self._order.ranks_with(kind, what)} it {kind}, or use strategy 'ddp' if all ranks write the same"
                )

    def _refuse_other_ends(self, reduces: bool) -> None:
        """Raise an error if some ranks alone reduce gradients in this pass. **Collective**: every rank of the mesh."""
        by_rank = from_all(reduces, self._order.groups)
        if len({*by_rank}) > 1:
            raise CollectiveMismatchError(
                "all ranks must reduce gradients in the same backward passes under FSDP, but "
                f"{self._order.ranks_with(True, by_rank)} alone do in this one. Let windows of accumulation, and "
                "no_sync(), end on all ranks with the same pass",
                failed_ranks=self._order.unlike_most([(one,) for one in by_rank]),
            )

    def _refuse_graphs(self, of_units: list[bool], of_params: list[bool]) -> NoReturn:
        """Raise an error that says which ranks reach what; all ranks know by now that there is a difference."""
        rows = from_all((*of_units, *of_params), self._order.groups)
        columns = list(zip(*rows, strict=True))
        units = self._differing(self._unit_names, columns[: len(of_units)])
        params = {} if units else self._differing(self._param_names, columns[len(of_units) :])
        named = [f"{'unit ' if units else ''}`{name}` on {ranks} alone" for name, ranks in (units | params).items()]
        remedy = "Pass find_unused_parameters=True, or use strategy 'ddp' with it"
        raise CollectiveMismatchError(
            "the losses of all ranks must depend on the same units and parameters under FSDP, but depend on "
            f"{listed(named, most=4)}. {_REMEDY if units else remedy}",
            failed_ranks=self._order.unlike_most(rows),
        )

    def _differing(self, names: Sequence[str], columns: Sequence[Sequence[bool]]) -> dict[str, str]:
        """For each name that only some ranks reach, return those ranks as text."""
        return {
            name: self._order.ranks_with(True, column)
            for name, column in zip(names, columns, strict=False)
            if len(set(column)) > 1
        }
