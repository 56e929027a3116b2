"""Converts between ColossalAI's shards and whole tensors by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dist import all_gather
from lockstep.model.shards import gather_full, shard_rows, template_of_rows
from lockstep.strategy import optim_state as canonical
from lockstep.strategy.base import ModelState, OptimState
from lockstep.strategy.colossalai.engine import gather_like, is_split, split_like
from lockstep.strategy.engine_parameters import MasterWeights, newer
from lockstep.strategy.engine_strategy import EngineState, check_shape


class ColossalAIState(EngineState):
    """Translates the states of one model and its optimizer.

    The trained tensor of a parameter (its master) may differ from the one that the model computes with. Tensor
    parallelism splits a parameter along one dim. ZeRO flattens and pads the result, and each rank trains one shard of
    it. Half precision trains float32 copies. The optimizer's state has the form of the trained tensor.

    Args:
        core: the user's own module.
        engine: ColossalAI's optimizer; None for a model that is only evaluated.
        tp_group: the ranks that share a replica; None if each rank has its own.

    **Cost**: for `model_state` and `optim_state`, one all-gather per sharded parameter or entry of its state. One
    tensor at a time is whole in device memory; every rank keeps its rows of it in CPU memory. Tensors that every rank
    holds whole are neither sent nor copied.

    **Source**: `LowLevelZeroOptimizer` and `colossalai.shardformer.layer.ParallelModule` (0.5.0).
    """

    def __init__(self, core: nn.Module, engine: Any = None, tp_group: Any = None) -> None:
        super().__init__(core, getattr(engine, "optim", None))
        self._tp_group = tp_group
        # Trained tensors, by id of the parameter that the model computes with.
        get_masters = getattr(engine, "get_working_to_master_map", dict)
        self._masters: dict[int, Tensor] = get_masters() or {}
        # The ranks over which ZeRO has sharded a parameter.
        self._zero_groups: Mapping[Tensor, Any] = getattr(engine, "param_to_pg", {})

    def masters(self, *, offloads: bool) -> MasterWeights:
        """Return this rank's master weights, which the optimizer updates.

        Args:
            offloads: whether they are in CPU memory.
        """
        named = [(name, own) for name, own in self._core.named_parameters() if id(own) in self._masters]
        pairs = []
        for _, param in named:
            weights, master = param.detach().flatten(), self._masters[id(param)].flatten()
            group = self._zero_groups.get(param)
            if group is not None:  # padded to a multiple of the number of ranks
                weights = weights[group.rank() * master.numel() :][: master.numel()]
            pairs.append((master[: weights.numel()], weights))
        return MasterWeights("ColossalAI", named, pairs, offloads=offloads)

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by parameter name. **Collective**: every rank.

        A parameter that has had no update has no entry.
        """
        state = {}
        for name, (param, trained) in self._trained().items():
            if held := self._optimizer.state.get(trained):
                state[name] = {
                    key: self._kept(param, value) if getattr(value, "shape", None) == trained.shape else value
                    for key, value in held.items()
                }
        return {"state": state, "param_groups": self._groups()}

    def optim_template(self) -> ModelState:
        """Return tensors by name, sharded as the optimizer's state is to be read. **Collective**: every rank."""
        own = dict(self._core.named_parameters())
        gathered = {name for name, param in own.items() if param in self._zero_groups or is_split(param)}
        return {
            name: template_of_rows(value.shape) if name in gathered else value
            for name, value in self.model_state().items()
        }

    def load_optim(self, state: OptimState) -> None:
        """Load an optimizer's state by parameter name. **Collective**: every rank, if there are DTensors in it.

        A parameter without an entry has no state afterwards, and starts as in a new optimizer; entries of frozen
        parameters that the optimizer does not hold are ignored.

        Raises:
            ConfigError: the state belongs to other parameters or another optimizer.
        """
        groups = self._groups()
        options = canonical.options_to_load(
            [(self._optimizer, group) for group in groups],
            [group["params"] for group in groups],
            dict(self._core.named_parameters()),
            state,
        )
        named = self._trained()
        packed: dict[int, dict[str, Any]] = {}
        of_numbers = self._keys_of_numbers(options)
        for index, name in enumerate(chain.from_iterable(group["params"] for group in groups)):
            entry = {key: gather_full(value) for key, value in state["state"].get(name, {}).items()}
            if entry:
                packed[index] = self._own_entry(named[name][0], entry, of_numbers)
        canonical.write_entries(self._optimizer, packed, options)

    def _trained(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by name, each parameter and its trained tensor."""
        held = {id(trained) for group in self._optimizer.param_groups for trained in group["params"]}
        pairs = {name: (param, self._masters.get(id(param), param)) for name, param in self._core.named_parameters()}
        return {name: pair for name, pair in pairs.items() if id(pair[1]) in held}

    def _own_state(self) -> dict[str, Any]:
        """Return the tensors of the model's state by name, as this rank holds them."""
        if not any(is_split(param) for param in self._core.parameters()):
            return self._core.state_dict(keep_vars=True)
        # Not by `state_dict`, where parallel layers would gather all their parameters at once.
        state: dict[str, Any] = {}
        for path, module in self._core.named_modules(remove_duplicate=False):
            buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
            owned: Mapping[str, Any] = {**module._parameters, **buffers}
            state |= {f"{path}.{name}".lstrip("."): value for name, value in owned.items() if value is not None}
        return state

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with the names of their parameters."""
        names = {trained: name for name, (_, trained) in self._trained().items()}
        groups = self._optimizer.param_groups
        return canonical.named_groups(groups, ([names[trained] for trained in group["params"]] for group in groups))

    def _keys_of_numbers(self, options: Sequence[Mapping[str, Any]]) -> set[str] | None:
        """Return the keys with one value per element of a parameter in the state; None if they are not known."""
        first = canonical.first_state(self._optimizer, options[0], 1)
        return None if first is None else {key for key, value in first.items() if _dims(value) == 1}

    def _own_entry(self, param: Tensor, entry: Mapping[str, Any], of_numbers: set[str] | None) -> dict[str, Any]:
        """Return this rank's part of a parameter's state."""
        own: dict[str, Any] = {}
        for key, value in entry.items():
            has_form = _dims(value) == param.dim() and self._is_form(param, value)
            if has_form and param.dim() == 0:  # counters also have no dims
                has_form = key != "step" if of_numbers is None else key in of_numbers
            if has_form:
                own[key] = self._own_shard(param, value).clone()
            elif key == "step" and type(self._optimizer).__module__.startswith("colossalai."):
                own[key] = int(value)  # torch's optimizers would convert it to a tensor
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value
        return own

    def _is_form(self, param: Tensor, value: Tensor) -> bool:
        if not is_split(param):
            return value.shape == param.shape
        return split_like(value.to("meta"), param, self._tp_group).shape == param.shape

    def _load_tensor(self, name: str, own: Any, value: Any) -> bool:
        if not isinstance(own, Tensor):
            return False
        part = split_like(value, own, self._tp_group) if is_split(own) else value
        check_shape(name, part, own.shape)
        own.copy_(part)
        if id(own) in self._masters:
            self._masters[id(own)].copy_(self._own_shard(own, value))
        return True

    def _canonical(self, own: Any) -> Any:
        if not isinstance(own, Tensor):
            return own
        master = self._masters.get(id(own))
        if master is not None and master.dtype != own.dtype:
            return self._kept(own, master, own.detach())
        # ZeRO's shards are not needed here: the tensor that the model computes with is whole.
        return shard_rows(gather_like(own.detach(), own, self._tp_group)) if is_split(own) else own.detach()

    def _kept(self, param: Tensor, tensor: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the whole tensor of one in the trained form of `param`; if it had to be gathered, this rank's rows.

        If `tensor` is a master, `weights` are the model's, which may have been written since the last update.
        """
        group = self._zero_groups.get(param)
        if group is not None:
            flat = torch.cat(all_gather(tensor.detach().flatten(), group=group))
            tensor = flat[: param.numel()].view(param.shape)
        if weights is not None:
            tensor = newer(tensor, weights)
        if group is None and not is_split(param):
            return tensor.detach()
        return shard_rows(gather_like(tensor, param, self._tp_group))

    def _own_shard(self, param: Tensor, full: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, in the trained form of `param`."""
        part = split_like(full, param, self._tp_group) if is_split(param) else full
        group = self._zero_groups.get(param)
        if group is None:
            return part
        padded = nn.functional.pad(part.flatten(), (0, -part.numel() % group.size()))
        shard: Tensor = padded.chunk(group.size())[group.rank()]
        return shard


def _dims(value: Any) -> int | None:
    return value.dim() if isinstance(value, Tensor) else None
