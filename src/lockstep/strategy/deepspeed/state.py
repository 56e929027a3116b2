"""The canonical state of what a DeepSpeed engine holds in flat shares, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as canonical
from torch.distributed.tensor import DTensor

from lockstep.dist import get_rank
from lockstep.dist.engines import load_engine
from lockstep.errors import ConfigError
from lockstep.model.full_params import gather_full
from lockstep.strategy.layout import laid_out_as, own_rows


class EngineState:
    """A view of an engine's state by parameter names.

    ZeRO cuts the parameters, laid end to end, into one piece per rank, which is no shard that a checkpoint knows. So
    each parameter in turn is made whole on its device, and of that every rank keeps its rows, in CPU memory.

    Args:
        engine: the engine.
        groups: for each group of the optimizer the names of its parameters, as they were before ZeRO; none where there
            is no optimizer.

    **Cost**: of `model_state` and `optim_state`: one all-reduce (stages 1, 2) or all-gather (stage 3) per parameter
    and entry of its state. In CPU memory each rank's share of it all; on the device one whole tensor at a time. What
    every rank holds in full anyhow (all at stage 0, float32 weights at stages 1 and 2) is neither sent nor copied.

    **Source**: `deepspeed.utils.safe_get_full_fp32_param` and its neighbours, `deepspeed.zero.GatheredParameters`
    (0.19).
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[str]]) -> None:
        self._engine = engine
        self._core: nn.Module = engine.module
        self._stage: int = engine.zero_optimization_stage()
        self._groups = groups
        self._doors = load_engine("deepspeed.utils")

    def model_state(self) -> dict[str, Any]:
        """Return the model's state by canonical names; of half-precision weights the full ones in float32."""
        whole: dict[int, Any] = {}  # what is tied is gathered once
        state: dict[str, Any] = {}
        for name, value in self._entries().items():
            if id(value) not in whole:
                whole[id(value)] = self._value(value)
            state[name] = whole[id(value)]
        return state

    def optim_state(self) -> dict[str, Any]:
        """Return the optimizer's state by canonical names."""
        if self._stage == 0:
            state: dict[str, Any] = canonical.get_optimizer_state_dict(self._core, self._optimizer)
            return state
        self._make_optimizer_states()
        parameters = dict(self._core.named_parameters())
        entries: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for index, names in enumerate(self._groups):
            tensors, scalars = self._entries_of_group(index)
            for name in names:
                get = self._doors.safe_get_full_optimizer_state
                entries[name] = {key: own_rows(get(parameters[name], key)) for key in tensors} | _copied(scalars)
            options = {key: value for key, value in self._optimizer.param_groups[index].items() if key != "params"}
            groups.append({**options, "params": list(names)})
        return {"state": entries, "param_groups": groups}

    @torch.no_grad()
    def load_model(self, state: Mapping[str, Any]) -> None:
        """Take over a model's state; every name must be there."""
        entries = self._entries()
        _check_names("the model's state", state, entries)
        rest: dict[str, Any] = {}
        done: set[int] = set()
        for name, value in entries.items():
            if not isinstance(value, nn.Parameter) or not (self._has_master(value) or _is_partitioned(value)):
                rest[name] = _whole(state[name])
            elif id(value) not in done:
                done.add(id(value))
                self._write_parameter(name, value, _whole(state[name]))
        self._core.load_state_dict(rest, strict=False)

    @torch.no_grad()
    def load_optim(self, state: Mapping[str, Any]) -> None:
        """Take over an optimizer's state; every name must be there."""
        if self._stage == 0:
            laid_out = laid_out_as(state, self.optim_state(), copy=True)
            canonical.set_optimizer_state_dict(self._core, self._optimizer, laid_out)
            return
        self._make_optimizer_states()
        parameters = dict(self._core.named_parameters())
        entries: Mapping[str, Any] = state["state"]
        _check_names("the optimizer's state", entries, [name for names in self._groups for name in names])
        for index, names in enumerate(self._groups):
            tensors, scalars = self._entries_of_group(index)
            for name in names:
                for key in tensors:
                    self._write_moment(parameters[name], _whole(entries[name][key]), key)
            agreed = {key: _agreed(key, {name: entries[name][key] for name in names}) for key in scalars}
            self._write_scalars(index, agreed)
            self._take_options(index, names, state["param_groups"])

    @property
    def _optimizer(self) -> Any:
        """The torch optimizer that updates."""
        return getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)

    def _entries(self) -> dict[str, Any]:
        state: dict[str, Any] = self._core.state_dict(keep_vars=True)
        return state

    def _has_master(self, parameter: nn.Parameter) -> bool:
        """Say whether the optimizer holds the parameter's true values."""
        return self._stage > 0 and bool(self._groups) and parameter.requires_grad

    def _value(self, value: Any) -> Any:
        if not isinstance(value, nn.Parameter):
            return value
        if self._has_master(value) and (self._stage == 3 or value.dtype != torch.float32):
            return own_rows(self._doors.safe_get_full_fp32_param(value))
        if _is_partitioned(value):
            with load_engine("deepspeed").zero.GatheredParameters(value):
                return own_rows(value.detach())
        return value.detach()

    def _write_parameter(self, name: str, parameter: nn.Parameter, value: Tensor) -> None:
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if value.shape != shape:
            raise ConfigError(f"`{name}` must have shape {tuple(shape)}, but has {tuple(value.shape)}")
        with load_engine("deepspeed").zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(value)
        if not self._has_master(parameter):
            return
        if self._stage == 3:
            self._doors.safe_set_local_fp32_param(parameter, _own_piece(value, parameter))
        else:
            self._doors.safe_set_full_fp32_param(parameter, value.float())

    def _write_moment(self, parameter: nn.Parameter, value: Tensor, key: str) -> None:
        if self._stage == 3:
            self._doors.safe_set_local_optimizer_state(parameter, _own_piece(value, parameter), key)
        else:
            self._doors.safe_set_full_optimizer_state(parameter, value, key)

    def _flats(self, index: int) -> list[Tensor]:
        """Return the flat tensors, on this rank, that stand for a group's parameters in the optimizer."""
        if self._stage < 3:
            return list(self._optimizer.param_groups[index]["params"])
        zero = self._engine.optimizer
        owners: Mapping[int, int] = zero.sub_group_to_group_id
        return [flat for number, flat in enumerate(zero.fp32_partitioned_groups_flat) if owners[number] == index]

    def _entries_of_group(self, index: int) -> tuple[list[str], dict[str, Any]]:
        """Return the keys of what each parameter has of its own in the state, and what all of a group share."""
        flat = self._flats(index)[0]
        held: Mapping[str, Any] = self._optimizer.state[flat]
        tensors = [key for key, value in held.items() if isinstance(value, Tensor) and value.shape == flat.shape]
        # torch's optimizers count steps in a tensor, some of DeepSpeed's in an int.
        return tensors, {
            key: torch.as_tensor(value, dtype=torch.float32).cpu() if key == "step" else value
            for key, value in held.items()
            if key not in tensors
        }

    def _write_scalars(self, index: int, values: Mapping[str, Any]) -> None:
        for flat in self._flats(index):
            held = self._optimizer.state[flat]
            for key, value in values.items():
                if isinstance(held[key], Tensor):
                    held[key].copy_(torch.as_tensor(value))
                else:
                    held[key] = type(held[key])(value)

    def _take_options(self, index: int, names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> None:
        saved = next((group for group in groups if set(group["params"]) == set(names)), None)
        if saved is None:
            raise ConfigError(
                f"the optimizer must have the parameter groups of the state that is loaded, but group {index} with "
                f"{names[0]!r} and {len(names) - 1} others is not among its {len(groups)}"
            )
        group = self._optimizer.param_groups[index]
        group.update({key: value for key, value in saved.items() if key != "params" and key in group})

    def _make_optimizer_states(self) -> None:
        """Let an optimizer that has not stepped yet make its state: all zeros, and no steps."""
        optimizer = self._optimizer
        if optimizer.state:
            return
        if getattr(self._engine.optimizer, "swap_optimizer", False):
            raise ConfigError("the state of an optimizer that is offloaded to 'nvme' can't be saved. Offload to 'cpu'")
        flats = [self._flats(index) for index in range(len(self._groups))]
        kept = [(group["params"], group["lr"]) for group in optimizer.param_groups]
        gradients = [(flat, flat.grad) for own in flats for flat in own]
        for group, own in zip(optimizer.param_groups, flats, strict=True):
            group["params"], group["lr"] = own, 0.0
        for flat, _ in gradients:
            flat.grad = torch.zeros_like(flat)
        optimizer.step()
        for group, (params, lr) in zip(optimizer.param_groups, kept, strict=True):
            group["params"], group["lr"] = params, lr
        for flat, gradient in gradients:
            flat.grad = gradient
            if "step" in optimizer.state[flat]:
                optimizer.state[flat]["step"] *= 0
        if self._stage < 3:
            self._link(flats)

    def _link(self, flats: Sequence[Sequence[Tensor]]) -> None:
        """Let DeepSpeed find each parameter's part of a state that it has not made itself."""
        parameters = dict(self._core.named_parameters())
        for names, (flat,) in zip(self._groups, flats, strict=True):
            self._doors.lazy_init_hp_params_optimizer_state(
                [parameters[name] for name in names], flat, self._optimizer.state
            )


def _copied(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return scalars for one parameter alone: a checkpoint is read into the tensors of a state."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}


def _whole(value: Any) -> Any:
    return gather_full(value) if isinstance(value, DTensor) else value


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _own_piece(value: Tensor, parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter at stage 3, where the last piece is filled up with zeros.

    **Source**: `safe_set_full_fp32_param` (0.19) fails where the number of elements is no multiple of the ranks.
    """
    size = parameter.ds_tensor.numel()
    piece = torch.zeros(size, dtype=torch.float32)
    own = value.flatten()[get_rank() * size : (get_rank() + 1) * size]
    piece[: own.numel()] = own
    return piece


def _agreed(key: str, values: Mapping[str, Any]) -> Any:
    (first, value), *others = values.items()
    for name, other in others:
        if other != value:
            raise ConfigError(
                f"the optimizer's {key!r} must be the same for all parameters of a group, of which DeepSpeed makes one "
                f"tensor, but is {value} for {first!r} and {other} for {name!r}. Use strategy 'fsdp' to go on from it"
            )
    return value


def _check_names(what: str, given: Mapping[str, Any], wanted: Iterable[str]) -> None:
    expected = set(wanted)
    missing, surplus = sorted(expected - given.keys()), sorted(given.keys() - expected)
    if missing or surplus:
        raise ConfigError(
            f"{what} must have an entry for each parameter, but misses {missing} and has besides {surplus}"
        )
