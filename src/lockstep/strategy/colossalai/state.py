"""Converts between ColossalAI's shards and whole tensors by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dist import all_gather
from lockstep.model.shards import gather_full, shard_rows, template_of_rows
from lockstep.strategy import optim_state as canonical
from lockstep.strategy.base import ModelState, OptimState
from lockstep.strategy.engine_parameters import MasterWeights, newer
from lockstep.strategy.engine_strategy import EngineState, check_shape

# What torch's optimizers keep once for a parameter, not for each of its elements.
_COUNTERS = ("step", "mu_product", "eta", "mu")


class ColossalAIState(EngineState):
    """Translates the states of one model and its optimizer.

    The trained tensor of a parameter (its master) is not the one that the model computes with: ZeRO flattens and pads
    it, and each rank trains one shard of the result, in float32. The optimizer's state has the form of that shard.

    Args:
        core: the user's own module.
        engine: ColossalAI's optimizer.

    **Cost**: for `model_state` and `optim_state`, one all-gather per sharded parameter or entry of its state. One
    tensor at a time is whole in device memory; every rank keeps its rows of it in CPU memory. Tensors that every rank
    holds whole are neither sent nor copied.

    **Source**: `LowLevelZeroOptimizer` (0.5.0).
    """

    def __init__(self, core: nn.Module, engine: Any) -> None:
        super().__init__(core, engine.optim)
        # Trained tensors, by id of the parameter that the model computes with.
        self._masters: dict[int, Tensor] = engine.get_working_to_master_map()
        # The ranks over which ZeRO has sharded a parameter.
        self._zero_groups: Mapping[Tensor, Any] = engine.param_to_pg

    def masters(self, *, offloads: bool) -> MasterWeights:
        """Return this rank's master weights, which the optimizer updates.

        Args:
            offloads: whether they are in CPU memory.
        """
        named, pairs = [], []
        for name, (param, master) in self._trained().items():
            begin = self._zero_groups[param].rank() * master.numel()
            weights = param.detach().flatten()[begin : begin + master.numel()]
            named.append((name, param))
            pairs.append((master.flatten()[: weights.numel()], weights))  # padded to a multiple of the number of ranks
        return MasterWeights("ColossalAI", named, pairs, offloads=offloads)

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by parameter name. **Collective**: every rank.

        A parameter that has had no update has no entry.
        """
        state = {}
        for name, (param, trained) in self._trained().items():
            if held := self._optimizer.state.get(trained):
                state[name] = {
                    key: self._gathered(param, value) if getattr(value, "shape", None) == trained.shape else value
                    for key, value in held.items()
                }
        return {"state": state, "param_groups": self._groups()}

    def optim_template(self) -> ModelState:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read."""
        return {
            name: template_of_rows(own.shape) if own in self._zero_groups else own.detach()
            for name, own in self._core.named_parameters()
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
        for index, name in enumerate(chain.from_iterable(group["params"] for group in groups)):
            entry = {key: gather_full(value) for key, value in state["state"].get(name, {}).items()}
            if entry:
                packed[index] = self._own_entry(named[name][0], entry)
        canonical.write_entries(self._optimizer, packed, options)

    def _trained(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return, by name, each parameter that is trained, and its trained tensor."""
        named = self._core.named_parameters()
        return {name: (own, self._masters[id(own)]) for name, own in named if id(own) in self._masters}

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with the names of their parameters."""
        names = {trained: name for name, (_, trained) in self._trained().items()}
        groups = self._optimizer.param_groups
        return canonical.named_groups(groups, ([names[trained] for trained in group["params"]] for group in groups))

    def _own_entry(self, param: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's state."""
        own: dict[str, Any] = {}
        for key, value in entry.items():
            is_counter = param.dim() == 0 and key in _COUNTERS  # which has no dims either
            if isinstance(value, Tensor) and value.shape == param.shape and not is_counter:
                own[key] = self._own_shard(param, value).clone()
            elif key == "step" and type(self._optimizer).__module__.startswith("colossalai."):
                own[key] = int(value)  # torch's optimizers would convert it to a tensor
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value
        return own

    def _load_tensor(self, name: str, own: Any, value: Any) -> bool:
        if not isinstance(own, Tensor):
            return False
        check_shape(name, value, own.shape)
        own.copy_(value)
        if id(own) in self._masters:
            self._masters[id(own)].copy_(self._own_shard(own, value))
        return True

    def _canonical(self, own: Any) -> Any:
        if not isinstance(own, Tensor):
            return own
        master = self._masters.get(id(own))
        if master is not None and master.dtype != own.dtype:
            return self._gathered(own, master, own.detach())
        return own.detach()  # ZeRO's shards are not needed here: the tensor that the model computes with is whole

    def _gathered(self, param: Tensor, shard: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return this rank's rows of the whole tensor of which the ranks have shards, as of `param`.

        If `shard` is a master, `weights` are the model's, which may have been written since the last update.
        """
        flat = torch.cat(all_gather(shard.detach().flatten(), group=self._zero_groups[param]))
        whole = flat[: param.numel()].view(param.shape)
        return shard_rows(whole if weights is None else newer(whole, weights))

    def _own_shard(self, param: Tensor, full: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor, as it has of `param`."""
        group = self._zero_groups[param]
        padded = nn.functional.pad(full.flatten(), (0, -full.numel() % group.size()))
        shard: Tensor = padded.chunk(group.size())[group.rank()]
        return shard
