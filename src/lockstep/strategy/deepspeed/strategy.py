"""`DeepSpeedStrategy`: ZeRO by the `deepspeed` package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError, wrong_type
from lockstep.optim import build_optim_wrapper
from lockstep.registry import STRATEGIES
from lockstep.strategy.base import OptimLike, Prepared
from lockstep.strategy.deepspeed import config as config_rules
from lockstep.strategy.deepspeed.engine import MMDeepSpeedEngineWrapper, join_engine, start_engine
from lockstep.strategy.deepspeed.optim import DeepSpeedOptimWrapper
from lockstep.strategy.deepspeed.state import DeepSpeedState
from lockstep.strategy.engine_parameters import check_kinds, leave_out_frozen, updates_elementwise
from lockstep.strategy.engine_strategy import EngineStrategy, require_plain
from lockstep.strategy.optim_state import names_by_group

_UNTESTED = "zero_allow_untested_optimizer"


@STRATEGIES.register_module(name=["DeepSpeedStrategy", "deepspeed"])
class DeepSpeedStrategy(EngineStrategy):
    """Train with a DeepSpeed engine: each rank holds a part of the optimizer's state, gradients and parameters (ZeRO).

    Accumulation and clipping may be set in the optim wrapper or in DeepSpeed's config, with the same meaning. The
    optimizer is the optim wrapper's: one of torch's, or `DeepSpeedCPUAdam` and others of DeepSpeed's by name. A model
    that is prepared without an optim wrapper is only moved to its device.

    Args:
        config: a DeepSpeed config, as a dict or as the path of a JSON file.
        stage: ZeRO stage, from 1 (the optimizer's state sharded) to 3 (everything); by default 1.
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
        TypeError: `inputs_to_half` is no list, such as one name.
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
        if isinstance(inputs_to_half, str) or not isinstance(inputs_to_half, Iterable | None):
            raise wrong_type("inputs_to_half", "a list of positions and names or None", inputs_to_half)
        self._inputs_to_half = None if inputs_to_half is None else list(inputs_to_half)

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Start an engine for the model and its optimizer; without an optimizer, prepare the model for evaluation.

        Raises:
            ConfigError: settings contradict each other, or DeepSpeed cannot support them here.
        """
        require_plain(model, "DeepSpeed")
        if optim_wrapper is None:
            return self.for_evaluation(model), None
        _refuse_scalars(model)
        join_engine()
        built = DeepSpeedOptimWrapper.of(build_optim_wrapper(model, optim_wrapper))
        counts = None if built.accumulative_counts == 1 else built.accumulative_counts
        if isinstance(optim_wrapper, Mapping):
            counts = optim_wrapper.get("accumulative_counts", counts)
        half = any(config_rules.is_on(self._config, name) for name in ("fp16", "bf16"))
        check_kinds(model, half=half, engine="DeepSpeed", half_option="bf16=True")
        config = config_rules.complete_config(
            self._config, counts=counts, clip_grad=built.clip_grad, world_size=get_world_size()
        )
        groups = _names_by_group(model, built.optimizer)
        engine = start_engine(model, built.optimizer, _with_optimizer_rules(config, built.optimizer))
        self._state = state = DeepSpeedState(engine, groups, offloads=config_rules.offloads_optimizer(config))
        clipping = config[config_rules.CLIPPING]
        wrapper = DeepSpeedOptimWrapper(
            engine.optimizer.optimizer,
            config[config_rules.ACCUMULATION],
            {"max_norm": clipping} if clipping else None,
            built.accumulate_across_epochs,
        )
        wrapper.attach_engine(engine, state.masters, groups)
        return MMDeepSpeedEngineWrapper(model=engine, inputs_to_half=self._inputs_to_half), wrapper


def _refuse_scalars(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"`{name}` must have at least one dimension under DeepSpeed 0.19, which can't send it "
                "otherwise. Make it nn.Parameter(torch.ones(1)), or use strategy 'ddp'"
            )


def _names_by_group(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group of the optimizer, before ZeRO replaces them by flat tensors.

    Frozen parameters, and groups with only such, are removed from the optimizer.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    leave_out_frozen(optimizer)
    if optimizer.state:
        raise ConfigError(
            f"`optimizer` must be new, but {type(optimizer).__name__} has a state already. Give its config instead, as "
            "in dict(type='AdamW', lr=1e-3)"
        )
    return names_by_group(optimizer, names)


def _with_optimizer_rules(config: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the config with the keys that DeepSpeed needs to use the optimizer unchanged."""
    full = dict(config)
    is_deepspeeds = type(optimizer).__module__.startswith("deepspeed.")
    if updates_elementwise(optimizer):
        full.setdefault(_UNTESTED, True)
    elif not (is_deepspeeds or full.get(_UNTESTED)):
        raise ConfigError(
            f"`optimizer` must update each number by itself under ZeRO, which cuts parameters into pieces, but is "
            f"{type(optimizer).__name__}, which is not known to do so. Use AdamW, strategy 'ddp' or 'fsdp', or set "
            f"{_UNTESTED}=True if it does"
        )
    if config_rules.offloads_optimizer(full):
        # Otherwise DeepSpeed accepts only its own optimizer, which has to be compiled.
        full.setdefault("zero_force_ds_cpu_optimizer", False)
    return full
