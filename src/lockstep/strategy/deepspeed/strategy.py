"""`DeepSpeedStrategy`: ZeRO by the `deepspeed` package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.registry import STRATEGIES
from lockstep.strategy.base import OptimLike, Prepared
from lockstep.strategy.deepspeed import config as config_rules
from lockstep.strategy.deepspeed.engine import MMDeepSpeedEngineWrapper, join_engine, release_engine, start_engine
from lockstep.strategy.deepspeed.optim import DeepSpeedOptimWrapper, read_optim
from lockstep.strategy.deepspeed.state import DeepSpeedState
from lockstep.strategy.engine_parameters import check_kinds, leave_out_frozen, updates_elementwise
from lockstep.strategy.engine_strategy import EngineStrategy, require_plain
from lockstep.strategy.engine_wrappers import cast_inputs_and_parts
from lockstep.strategy.optim_state import names_by_group

_UNTESTED = "zero_allow_untested_optimizer"


@STRATEGIES.register_module(name=["DeepSpeedStrategy", "deepspeed"])
class DeepSpeedStrategy(EngineStrategy):
    """Train with a DeepSpeed engine: each rank holds a part of the optimizer's state, gradients and parameters (ZeRO).

    Accumulation and clipping may be set in the optim wrapper or in DeepSpeed's config, with the same meaning. The
    optimizer is the optim wrapper's: one of torch's, or `DeepSpeedCPUAdam` and others of DeepSpeed's by name. Or it is
    the one in DeepSpeed's config, where "Adam" and "AdamW" mean torch's, which need no compilation, unless `torch_adam`
    is false. A `scheduler` in DeepSpeed's config steps with every update.

    Args:
        config: a DeepSpeed config, as a dict or as the path of a JSON file.
        stage: ZeRO stage, from 0 (as DDP) to 3 (everything sharded); by default 1 if neither `config` nor
            `zero_optimization` is given.
        offload: keep the optimizer's state, and at stage 3 the parameters, in CPU memory.
        inputs_to_half: with `fp16` or `bf16`, the inputs of the model that are converted to that precision, by position
            or by name; by default all floating-point tensors.
        exclude_frozen_parameters: from MMEngine; has no effect, because a checkpoint has every parameter.
        **kwargs: further keys of a DeepSpeed config, such as `zero_optimization`, `activation_checkpointing`, `aio` and
            `torch_autocast`, which are sections; `gradient_clipping`, the maximum norm of all gradients (by default, no
            limit); `gradient_accumulation_steps`, the number of batches per update; `train_micro_batch_size_per_gpu`,
            which DeepSpeed only uses to count samples, because the data loader makes the batches; `steps_per_print`;
            `fp16` to train in float16 with float32 master weights in the optimizer, as True or DeepSpeed's section, not
            on the CPU; `bf16`, the same in bfloat16, also on the CPU. MMEngine's `amp` is refused, because DeepSpeed no
            longer has it.

    Raises:
        ConfigError: DeepSpeed is not installed, or settings contradict each other or cannot be supported correctly.

    **Source**: DeepSpeed 0.19, through `deepspeed.initialize`.
    """

    package = "deepspeed"

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        stage: int | None = None,
        offload: bool = False,
        inputs_to_half: Iterable[int | str] | None = None,
        exclude_frozen_parameters: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if find_spec("deepspeed") is None:
            raise ConfigError(
                "strategy 'deepspeed' needs the package deepspeed, which is not installed. Install it with: "
                "pip install 'lockstep-engine[deepspeed]', or use strategy 'fsdp', which shards as well"
            )
        self._config = config_rules.read_config(config, {"stage": stage, "offload": offload or None, **kwargs})
        if get_device() == "cpu" and config_rules.is_on(self._config, "fp16"):
            raise ConfigError(
                "`fp16` must not be enabled on the CPU, where DeepSpeed does not support it. Use bf16=True"
            )
        self._inputs_to_half = None if inputs_to_half is None else list(inputs_to_half)
        if "optimizer" in self._config:
            self.own_optim_wrapper = {"type": "DeepSpeedOptimWrapper"}
        if "scheduler" in self._config:
            self.own_schedule = f"the scheduler {self._config['scheduler'].get('type')!r} of the DeepSpeed config"

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Start an engine for the model and its optimizer; without an optimizer, prepare the model for evaluation.

        Raises:
            ConfigError: settings contradict each other, or DeepSpeed cannot support them here.
        """
        model = self._unwrapped(model)
        join_engine()
        if optim_wrapper is None:
            return self._prepare_evaluation(model), None
        optimizer, counts, clip_grad = read_optim(model, optim_wrapper, has_own="optimizer" in self._config)
        half = config_rules.model_dtype(self._config) != torch.float32
        check_kinds(model, half=half, engine="DeepSpeed", half_option="bf16=True")
        config = config_rules.complete_config(
            self._config, counts=counts, clip_grad=clip_grad, world_size=get_world_size()
        )
        groups = _names_by_group(model, optimizer)
        engine = start_engine(model, optimizer, _with_optimizer_rules(config, optimizer))
        state = DeepSpeedState(engine, groups, offloads=config_rules.offloads_optimizer(config))
        self._state, self._trains = state, True
        clipping = config[config_rules.CLIPPING]
        wrapper = DeepSpeedOptimWrapper(
            getattr(engine.optimizer, "optimizer", engine.optimizer),
            config[config_rules.ACCUMULATION],
            {"max_norm": clipping} if clipping else None,
        )
        wrapper.attach_engine(engine, state)
        return MMDeepSpeedEngineWrapper(model=engine, inputs_to_half=self._inputs_to_half), wrapper

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the user's own module, which this strategy may have prepared for evaluation before."""
        if isinstance(model, MMDeepSpeedEngineWrapper) and not self._trains and not self._changes_model():
            return release_engine(model)
        require_plain(model, "DeepSpeed")
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"`{name}` must have at least one dimension under DeepSpeed 0.19, which can't send it "
                    "otherwise. Make it nn.Parameter(torch.ones(1)), or use strategy 'ddp'"
                )
        return model

    def _prepare_evaluation(self, model: nn.Module) -> nn.Module:
        """Prepare the model without an optimizer: whole on every rank, or sharded at stage 3."""
        config = config_rules.complete_config(self._config, counts=None, clip_grad=None, world_size=get_world_size())
        config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        if config_rules.stage_of(config) < 3:
            dtype = config_rules.model_dtype(config)
            model.to(dtype)
            cast_inputs_and_parts(model, dtype, self._inputs_to_half)
            config = {key: value for key, value in config.items() if key not in ("fp16", "bf16")}
            config["zero_optimization"] = {"stage": 0}
        engine = start_engine(model, None, config)
        self._state, self._trains = DeepSpeedState(engine, []), False
        return MMDeepSpeedEngineWrapper(model=engine, inputs_to_half=self._inputs_to_half)

    def _changes_model(self) -> bool:
        """Return whether preparing the model for evaluation changes it."""
        return config_rules.stage_of(self._config) == 3 or config_rules.model_dtype(self._config) != torch.float32


def _names_by_group(model: nn.Module, optimizer: Optimizer | None) -> list[list[str]]:
    """Return the names of the parameters in each group of the optimizer, before ZeRO replaces them by flat tensors.

    Frozen parameters, and groups with only such, are removed from the optimizer.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    if optimizer is None:  # DeepSpeed builds its own over all parameters
        return [[name for parameter, name in names.items() if parameter.requires_grad]]
    leave_out_frozen(optimizer)
    if optimizer.state:
        raise ConfigError(
            f"`optimizer` must be new, but {type(optimizer).__name__} has a state already. Give its config instead, as "
            "in dict(type='AdamW', lr=1e-3)"
        )
    return names_by_group(optimizer, names)


def _with_optimizer_rules(config: Mapping[str, Any], optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the config with the keys that DeepSpeed needs to use the optimizer unchanged."""
    full = dict(config)
    is_deepspeeds = type(optimizer).__module__.startswith("deepspeed.")
    if optimizer is None:
        section = dict(full["optimizer"])
        kind = str(section.get("type")).lower()
        if kind == "muon":
            raise ConfigError(
                "`optimizer.type` must not be 'muon', which sorts the parameters into groups of its own, so that "
                "their states can't be saved by name. Use 'adamw'"
            )
        if kind in ("adam", "adamw"):
            section["params"] = {"torch_adam": True, **section.get("params", {})}
        full["optimizer"] = section
    elif updates_elementwise(optimizer):
        full.setdefault(_UNTESTED, True)
    elif config_rules.stage_of(full) > 0 and not (is_deepspeeds or full.get(_UNTESTED)):
        raise ConfigError(
            f"`optimizer` must update each number by itself under ZeRO, which cuts parameters into pieces, but is "
            f"{type(optimizer).__name__}, which is not known to do so. Use AdamW, stage=0 or strategy 'fsdp', or set "
            f"{_UNTESTED}=True if it does"
        )
    if config_rules.offloads_optimizer(full):
        # Otherwise DeepSpeed accepts only its own optimizer, which has to be compiled.
        full.setdefault("zero_force_ds_cpu_optimizer", False)
    return full
