"""From ColossalAI's shards to whole tensors by the names of parameters, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.dist import all_gather
from lockstep.errors import ConfigError
from lockstep.strategy.base import ModelState, OptimState
from lockstep.strategy.colossalai.engine import gather_like, is_split, split_like
from lockstep.strategy.colossalai.stages import owned_state
from lockstep.strategy.layout import own_rows


class StateTranslator:
    """Translates the states of one model and its optimizer.

    What is trained may differ from what computes. Tensor parallelism splits a parameter along one dim; ZeRO makes of
    this a flat tensor, padded, and gives each rank one share of it to train; half precision trains copies in float32.
    The optimizer's state has the form of what is trained.

    Args:
        core: the user's own module.
        engine: ColossalAI's optimizer.
        tp_group: the ranks that share a replica; None where each has one.

    **Cost**: of `model_state` and `optim_state`: one all-gather per parameter and entry of its state that is sharded.
    On the device one whole tensor at a time; of each, every rank keeps its rows in CPU memory. What every rank holds in
    full anyhow is neither sent nor copied.

    **Source**: `LowLevelZeroOptimizer` and `colossalai.shardformer.layer.ParallelModule` (0.5.0).
    """

    def __init__(self, core: nn.Module, engine: Any, tp_group: Any) -> None:
        self._core = core
        self._optimizer: Optimizer = engine.optim
        self._tp_group = tp_group
        # By id of what computes: what is trained in its place.
        get_masters = getattr(engine, "get_working_to_master_map", dict)
        self._masters: dict[int, Tensor] = get_masters() or {}
        # The ranks among which ZeRO has dealt out a parameter.
        self._zero_groups: Mapping[Tensor, Any] = getattr(engine, "param_to_pg", {})

    def model_state(self) -> ModelState:
        """Return the model's state, in the precision in which it is trained. **Collective**: every rank."""
        kept: dict[int, Any] = {}  # what is tied is gathered once
        state: ModelState = {}
        for name, own in self._own_state().items():
            if id(own) not in kept:
                kept[id(own)] = self._canonical(own)
            state[name] = kept[id(own)]
        return state

    @torch.no_grad()
    def load_model(self, state: ModelState) -> None:
        """Take over a model's state. **Collective**: every rank, if there are DTensors in it.

        Raises:
            ConfigError: it is that of another model.
        """
        present = self._own_state()
        names = self._state_names(present)
        missing, surplus = sorted(names - state.keys()), sorted(state.keys() - names)
        if missing or surplus:
            raise ConfigError(f"the model's state must fit the model, but lacks {missing} and has {surplus} besides")
        rest: dict[str, Any] = {}
        for name in sorted(names):  # the same order on every rank
            value, own = _full(state[name]), present.get(name)
            if isinstance(own, Tensor):
                self._load_tensor(name, own, value)
            elif name in present:
                rest[name] = value
        self._core.load_state_dict(rest, strict=False)

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by parameter name. **Collective**: every rank."""
        with begun(self._optimizer):
            state = {
                name: self._entry(param, trained)
                for name, (param, trained) in self._trained().items()
                if trained in self._optimizer.state
            }
        return {"state": state, "param_groups": self._groups()}

    def load_optim(self, state: OptimState) -> None:
        """Take over a state by parameter name. **Collective**: every rank, if there are DTensors in it.

        Raises:
            ConfigError: it is that of other parameters.
        """
        named = self._trained()
        names = {trained: name for name, (_, trained) in named.items()}
        order = [[names[trained] for trained in group["params"]] for group in self._optimizer.param_groups]
        indices = {name: index for index, name in enumerate(chain(*order))}
        packed: dict[int, dict[str, Any]] = {}
        with begun(self._optimizer):
            own = {name: self._optimizer.state.get(named[name][1], {}) for name in indices}
            self._refuse(_misfit(own, state))
            for name in self._names_to_load(indices):
                saved = {key: _full(value) for key, value in state["state"].get(name, {}).items()}
                if saved and name in own:
                    param, trained = named[name]
                    packed[indices[name]] = {
                        key: self._share(param, value).clone() if _is_like(own[name][key], trained) else value
                        for key, value in saved.items()
                    }
        groups = [
            {**_group_of(group["params"], state["param_groups"]), "params": [indices[name] for name in own_names]}
            for group, own_names in zip(self._groups(), order, strict=True)
        ]
        self._optimizer.load_state_dict({"state": packed, "param_groups": groups})

    def _trained(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by name, what computes and what is trained."""
        held = {id(trained) for group in self._optimizer.param_groups for trained in group["params"]}
        pairs = {name: (param, self._masters.get(id(param), param)) for name, param in self._core.named_parameters()}
        return {name: pair for name, pair in pairs.items() if id(pair[1]) in held}

    def _own_state(self) -> dict[str, Any]:
        """Return what the model's state consists of, as it is held here, by name."""
        if any(is_split(param) for param in self._core.parameters()):
            return owned_state(self._core)
        return self._core.state_dict(keep_vars=True)

    def _state_names(self, present: Mapping[str, Any]) -> set[str]:
        """Return the names in the model's state, of which those `present` are held here."""
        return set(present)

    def _names_to_load(self, own: Iterable[str]) -> Iterable[str]:
        """Return the names of the parameters whose state is to be loaded, of which `own` are trained here."""
        return own

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with the names of their parameters."""
        names = {trained: name for name, (_, trained) in self._trained().items()}
        groups = self._optimizer.param_groups
        return [{**group, "params": [names[trained] for trained in group["params"]]} for group in groups]

    def _refuse(self, complaint: str | None) -> None:
        """Raise a complaint about what is to be loaded, if there is one."""
        if complaint is not None:
            raise ConfigError(complaint)

    def _load_tensor(self, name: str, own: Tensor, value: Tensor) -> None:
        part = split_like(value, own, self._tp_group) if is_split(own) else value
        if part.shape != own.shape:
            raise ConfigError(f"`{name}` has not the shape that is to be loaded, {tuple(value.shape)}")
        own.copy_(part)
        if id(own) in self._masters:
            self._masters[id(own)].copy_(self._share(own, value))

    def _entry(self, param: Tensor, trained: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a parameter."""
        state = self._optimizer.state[trained]
        return {key: self._kept(param, value) if _is_like(value, trained) else value for key, value in state.items()}

    def _portion(self, whole: Tensor) -> Tensor:
        """Return what this rank keeps of a tensor that had to be made whole: its rows."""
        return own_rows(whole)

    def _canonical(self, own: Any) -> Any:
        if not isinstance(own, Tensor):
            return own
        master = self._masters.get(id(own))
        if master is not None and master.dtype != own.dtype:
            return self._kept(own, master)
        # ZeRO's shards are of no interest here: what computes is whole.
        return self._portion(gather_like(own.detach(), own, self._tp_group)) if is_split(own) else own.detach()

    def _kept(self, param: Tensor, tensor: Tensor) -> Tensor:
        """Return a tensor of the form in which `param` is trained, whole; of what had to be gathered the own rows."""
        group = self._zero_groups.get(param)
        if group is None and not is_split(param):
            return tensor.detach()
        if group is not None:
            flat = torch.cat(all_gather(tensor.flatten(), group=group))
            tensor = flat[: param.numel()].view(param.shape)
        return self._portion(gather_like(tensor, param, self._tp_group))

    def _share(self, param: Tensor, full: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, in the form in which `param` is trained."""
        part = split_like(full, param, self._tp_group) if is_split(param) else full
        group = self._zero_groups.get(param)
        if group is None:
            return part
        padded = nn.functional.pad(part.flatten(), (0, -part.numel() % group.size()))
        share: Tensor = padded.chunk(group.size())[group.rank()]
        return share


@contextmanager
def begun(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer that has made no step yet the state that it would begin with, for the while.

    It makes a step by nothing: with a learning rate of 0 on gradients of 0.
    """
    if optimizer.state:
        yield
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] *= 0
        yield
    finally:
        optimizer.state.clear()
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient


def _is_like(value: Any, trained: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == trained.shape


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _misfit(own: Mapping[str, Mapping[str, Any]], state: OptimState) -> str | None:
    """Return what is wrong with a saved state for the parameters that have states of their own already."""
    for name, present in own.items():
        saved = state["state"].get(name, {})
        if saved.keys() != present.keys():
            return (
                f"the optimizer's state of {name!r} must have {sorted(present)}, but has {sorted(saved)}. Resume "
                "with the optimizer that saved it"
            )
    return None


def _group_of(names: list[str], groups: list[dict[str, Any]]) -> dict[str, Any]:
    for group in groups:
        if set(names) <= set(group["params"]):
            return group
    raise ConfigError(
        f"the optimizer's state must have one group with {', '.join(names[:3])}{', ...' if names[3:] else ''}, but has "
        "none. Resume with the groups of parameters that were saved"
    )
