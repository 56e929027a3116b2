"""Converts between the flat partitions of a DeepSpeed engine and canonical states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.dist import get_rank
from lockstep.engines import load_engine
from lockstep.errors import ConfigError
from lockstep.model.shards import gather_full, shard_rows, template_of_rows
from lockstep.strategy import optim_state as canonical
from lockstep.strategy.base import OptimState
from lockstep.strategy.engine_parameters import MasterWeights, newer
from lockstep.strategy.engine_strategy import EngineState, check_shape


class DeepSpeedState(EngineState):
    """A view of an engine's state by parameter names.

    ZeRO concatenates the parameters and cuts the result into one piece per rank; checkpoints have no such sharding. So
    the parameters are gathered on their device, one at a time, and every rank copies its rows to CPU memory.

    Args:
        engine: the engine.
        groups: for each group of the optimizer, the names of its parameters before ZeRO.
        offloads: whether the optimizer's state is in CPU memory.

    **Cost**: for `model_state` and `optim_state`, one all-reduce (stages 1, 2) or all-gather (stage 3) per parameter
    and entry of its state; CPU memory for each rank's rows of all tensors, and device memory for one whole tensor at a
    time. Tensors that every rank holds whole (float32 weights at stages 1 and 2) are neither sent nor
    copied.

    **Source**: `deepspeed.utils.safe_get_full_fp32_param` and related functions, `deepspeed.zero.GatheredParameters`
    (0.19).
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[str]], *, offloads: bool = False) -> None:
        # The engine's optimizer wraps the one that runs the updates.
        super().__init__(engine.module, engine.optimizer.optimizer)
        self.engine = engine
        self._stage: int = engine.zero_optimization_stage()
        self._groups = groups
        self._utils = load_engine("deepspeed.utils")
        self.masters = _masters_of(engine, offloads=offloads)

    def model_state(self) -> dict[str, Any]:
        """Return the model's state by canonical names; half-precision weights as their float32 masters."""
        if self._stage == 3:
            self.masters.copy_weights()
        return super().model_state()

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by canonical names; before the first update there are no entries.

        After it, every trainable parameter has one, even if it never had a gradient, because a group has one state,
        shared by its parameters, and one number of steps. A native strategy that resumes from it continues the count of
        steps for such a parameter, too.
        """
        self._refuse_swapped()
        entries: dict[str, Any] = {}
        for index, names in enumerate(self._groups):
            tensors, scalars = self._entries_of_group(index)
            if tensors and self._stage < 3:
                self._link(index)
            for name, parameter in self._trained(names).items():
                get = self._utils.safe_get_full_optimizer_state
                entry = {key: shard_rows(get(parameter, key)) for key in tensors} | _copied(scalars)
                if entry:
                    entries[name] = entry
        return {"state": entries, "param_groups": canonical.named_groups(self._optimizer.param_groups, self._groups)}

    def optim_template(self) -> dict[str, Any]:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read: by rows."""
        return {name: template_of_rows(_shape(parameter)) for name, parameter in self._core.named_parameters()}

    @torch.no_grad()
    def load_optim(self, state: OptimState) -> None:
        """Load an optimizer's state.

        Parameters without an entry get the state after a first gradient of zero, with the number of
        steps of the others in their group; a group without any entries starts as in a new optimizer.

        Raises:
            ConfigError: on every rank, before anything is changed, if the state belongs to other parameters or another
                optimizer, or if values that all parameters of a group share differ between them.
        """
        self._refuse_swapped()
        entries: Mapping[str, Any] = state["state"]
        # At stage 3 a parameter that is not gathered is an empty tensor with one dim.
        whole: dict[str, Tensor] = {
            name: torch.empty(_shape(own), device="meta", requires_grad=own.requires_grad)
            for name, own in canonical.named_parameters(self._core).items()
        }
        groups = [(self._optimizer, group) for group in self._optimizer.param_groups]
        options = canonical.options_to_load(groups, self._groups, whole, state)
        trained = [self._trained(names) for names in self._groups]
        saved = [self._group_state(*group, entries) for group in zip(options, trained, strict=True)]
        for index, group in enumerate(saved):
            own = self._optimizer.param_groups[index]
            own.update({key: value for key, value in group.options.items() if key in own})
            self._begin(index, group)
            for name, parameter in trained[index].items():
                for key, fill in group.fills.items():
                    if entries.get(name):
                        self._write_moment(parameter, gather_full(entries[name][key]), key)
                    else:
                        self._write_moment(parameter, torch.full(_shape(parameter), fill, device="cpu"), key)

    def _canonical(self, value: Any) -> Any:
        if not isinstance(value, nn.Parameter):
            return value
        if value.requires_grad and (self._stage == 3 or value.dtype != torch.float32):
            master = self._utils.safe_get_full_fp32_param(value)
            return shard_rows(master if self._stage == 3 else newer(master, value.detach()))
        if _is_partitioned(value):
            with load_engine("deepspeed").zero.GatheredParameters(value):
                return shard_rows(value.detach())
        return value.detach()

    def _load_tensor(self, name: str, parameter: Any, value: Any) -> bool:
        if not isinstance(parameter, nn.Parameter) or not (parameter.requires_grad or _is_partitioned(parameter)):
            return False
        check_shape(name, value, _shape(parameter))
        with load_engine("deepspeed").zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(value)
        if parameter.requires_grad and self._stage == 3:
            self._utils.safe_set_local_fp32_param(parameter, _own_piece(value, parameter))
        elif parameter.requires_grad:
            self._utils.safe_set_full_fp32_param(parameter, value.float())
        return True

    def _write_moment(self, parameter: nn.Parameter, value: Tensor, key: str) -> None:
        if self._stage == 3:
            self._utils.safe_set_local_optimizer_state(parameter, _own_piece(value, parameter), key)
        else:
            self._utils.safe_set_full_optimizer_state(parameter, value, key)

    def _flats(self, index: int) -> list[Tensor]:
        """Return this rank's flat tensors that replace a group's parameters in the optimizer."""
        if self._stage < 3:
            return list(self._optimizer.param_groups[index]["params"])
        zero = self.engine.optimizer
        owners: Mapping[int, int] = zero.sub_group_to_group_id
        return [flat for number, flat in enumerate(zero.fp32_partitioned_groups_flat) if owners[number] == index]

    def _entries_of_group(self, index: int) -> tuple[list[str], dict[str, Any]]:
        """Return the keys of the state's per-parameter tensors, and the values that all parameters of a group share."""
        flat = self._flats(index)[0]
        held: Mapping[str, Any] = self._optimizer.state.get(flat, {})
        tensors = [key for key, value in held.items() if isinstance(value, Tensor) and value.shape == flat.shape]
        # torch's optimizers count steps in a tensor, some of DeepSpeed's count in an int.
        return tensors, {
            key: torch.as_tensor(value, dtype=torch.float32).cpu() if key == "step" else value
            for key, value in held.items()
            if key not in tensors
        }

    def _group_state(
        self, options: dict[str, Any], parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
    ) -> _GroupState:
        """Return the state to load into a group, from the entries of its parameters.

        Raises:
            ConfigError: values that must be shared differ.
        """
        entries = {name: state[name] for name in parameters if state.get(name)}
        if not entries:
            return _GroupState(options, {}, {})
        name, entry = next(iter(entries.items()))
        shape = _shape(parameters[name])
        own = [key for key, value in entry.items() if isinstance(value, Tensor) and value.shape == shape]
        agreed = {key: _agreed(key, {name: entries[name][key] for name in entries}) for key in entry if key not in own}
        if "step" in agreed:
            # torch's optimizers count steps in a tensor, DeepSpeed's count in an int.
            is_deepspeeds = type(self._optimizer).__module__.startswith("deepspeed.")
            agreed["step"] = (
                int(agreed["step"]) if is_deepspeeds else torch.as_tensor(float(agreed["step"]), device="cpu")
            )
        first = canonical.first_state(self._optimizer, options, 1) or {}
        return _GroupState(options, {key: float(first.get(key, 0.0)) for key in own}, agreed)

    def _begin(self, index: int, group: _GroupState) -> None:
        """Create a new state for a group, with tensors to be filled later; no state if none was saved."""
        for flat in self._flats(index):
            self._optimizer.state.pop(flat, None)
            if group.fills or group.scalars:
                on_device = group.options.get("fused") or group.options.get("capturable")
                scalars = _copied(group.scalars, flat.device if on_device else torch.device("cpu"))
                self._optimizer.state[flat] = {**scalars, **{key: torch.zeros_like(flat) for key in group.fills}}
        if group.fills and self._stage < 3:
            self._link(index)

    def _link(self, index: int) -> None:
        """Make DeepSpeed link each parameter to its part of the current state; links may be missing or outdated."""
        parameters = list(self._trained(self._groups[index]).values())
        (flat,) = self._flats(index)
        self._utils.lazy_init_hp_params_optimizer_state(parameters, flat, self._optimizer.state)

    def _trained(self, names: Sequence[str]) -> dict[str, nn.Parameter]:
        """Return, by name, those of the named parameters that ZeRO trains: the ones that are not frozen."""
        parameters = dict(self._core.named_parameters())
        return {name: parameters[name] for name in names if parameters[name].requires_grad}

    def _refuse_swapped(self) -> None:
        if getattr(self.engine.optimizer, "swap_optimizer", False):
            raise ConfigError("the state of an optimizer that is offloaded to 'nvme' can't be saved. Offload to 'cpu'")


class _GroupState(NamedTuple):
    """The state to load into a group, whose parameters ZeRO concatenates into flat tensors.

    Attributes:
        options: the group's options.
        fills: for each key with one value per element of a parameter, the value for parameters without an entry.
        scalars: the values that all parameters share.
    """

    options: dict[str, Any]
    fills: dict[str, float]
    scalars: dict[str, Any]


def _masters_of(engine: Any, *, offloads: bool) -> MasterWeights:
    """Return the masters of an engine's optimizer.

    **Source**: `DeepSpeedZeroOptimizer`, `BF16_Optimizer`, `DeepSpeedZeroOptimizer_Stage3` (0.19). In float32 without
    offloading, the masters of stage 3 are the pieces of the parameters themselves; on NVMe there are none in memory.
    """
    if engine.zero_optimization_stage() == 3:
        zero = engine.optimizer
        pieces = zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
        in_memory = [pair for pair in pieces if pair[1] is not None and pair[0].numel() == pair[1].numel()]
        return MasterWeights("DeepSpeed", [], in_memory, offloads=offloads)
    trained = [(name, own) for name, own in engine.module.named_parameters() if hasattr(own, "_hp_mapping")]
    pairs = []
    for _, parameter in trained:
        fragment = parameter._hp_mapping
        if fragment is not None:  # a part of the parameter is this rank's
            address = fragment.lp_fragment_address
            weights = parameter.detach().flatten().narrow(0, address.start, address.numel)
            pairs.append((fragment.hp_fragment, weights))
    return MasterWeights("DeepSpeed", trained, pairs, offloads=offloads)


def _copied(scalars: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return copies of scalars, for one parameter only."""
    return {key: value.to(device, copy=True) if isinstance(value, Tensor) else value for key, value in scalars.items()}


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the whole parameter."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _own_piece(value: Tensor, parameter: Any) -> Tensor:
    """Return the piece of a parameter that this rank holds at stage 3; the last piece is padded with zeros.

    **Source**: `safe_set_full_fp32_param` (0.19) fails if the number of elements is not a multiple of the number of
    ranks.
    """
    size = parameter.ds_tensor.numel()
    piece = torch.zeros(size, dtype=torch.float32, device="cpu")
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
