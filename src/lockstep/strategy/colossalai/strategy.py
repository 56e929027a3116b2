"""`ColossalAIStrategy`: ZeRO 1 and 2, and tensor parallelism, by ColossalAI's plugins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dataset.random_state import sync_random_state
from lockstep.device import get_device
from lockstep.dist import broadcast, init_dist, is_distributed
from lockstep.errors import ConfigError
from lockstep.model.tensor_parallel import PlanTrial
from lockstep.model.tensor_parallel_plan import read_plan, read_request
from lockstep.model.written import BY_RANK, DriftCheck
from lockstep.optim import build_optim_wrapper
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.strategy.base import OptimLike, Prepared
from lockstep.strategy.colossalai import engine
from lockstep.strategy.colossalai.plugin import PluginChoice, name_and_options
from lockstep.strategy.colossalai.state import ColossalAIState
from lockstep.strategy.colossalai.wrappers import ColossalAIOptimWrapper
from lockstep.strategy.engine_parameters import leave_out_frozen, max_norm_of
from lockstep.strategy.engine_strategy import EngineStrategy, require_plain
from lockstep.strategy.engine_wrappers import cast_inputs_and_parts
from lockstep.strategy.gradient_flow import GradientFlow
from lockstep.strategy.whole_params import WholeParams, called_by, called_from


@STRATEGIES.register_module(name=["ColossalAIStrategy", "colossalai"])
class ColossalAIStrategy(EngineStrategy):
    """Train with one of ColossalAI's plugins.

    All ranks start with the parameters of rank 0. Gradients are clipped by their global norm. A model that is prepared
    without an optim wrapper is only moved to its device.

    Args:
        plugin: `"lowlevel_zero"` (shards the optimizer, with `stage=2` also the gradients) or `"hybrid"`
            (`tp_size` ranks share each replica and split its layers); or a dict with one of these as `type` and its
            options. MMEngine's default is "gemini", which is refused.
        mixed_precision: must be None; give `precision="bf16"` to the plugin.
        model_wrapper: config of the wrapper, `ColossalAIModelWrapper` by default.
        tensor_parallel: as for `FSDPStrategy`, with plugin="hybrid": the number of ranks that share a replica, for a
            model with a `_tp_plan` that says how to split it; or
            `dict(degree=2, plan={"*.up": "colwise", "*.down": "rowwise"})`, with patterns of names of linear layers.
            With `tp_size` only, the split comes from a `custom_policy`, from ColossalAI's own policy for the model, or
            from the model's `_tp_plan`.
        **kwargs: options of the plugin: `stage`, `precision`, `tp_size` and so on.

    Raises:
        ConfigError: the plugin or an option is unknown, or gives wrong results in ColossalAI 0.5.0.

    **Source**: `colossalai.booster` (0.5.0).
    """

    package = "colossalai"

    def __init__(
        self,
        plugin: str | Mapping[str, Any] = "lowlevel_zero",
        mixed_precision: None = None,
        model_wrapper: Mapping[str, Any] | None = None,
        *,
        tensor_parallel: int | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if mixed_precision is not None:
            raise ConfigError(
                f"`mixed_precision` must be None, because ColossalAI's booster can't make one (0.5.0), but is "
                f"{mixed_precision!r}. Give the plugin precision='bf16'"
            )
        name, options = name_and_options(plugin)
        options |= kwargs
        self._splits_by_plan = tensor_parallel is not None
        self._plan_is_used = False
        self._plan: Mapping[str, Any] | None = None
        if self._splits_by_plan:
            options["tp_size"], self._plan = _read_tensor_parallel(tensor_parallel, options)
        self._choice = PluginChoice(name, options)
        self._wrapper = dict(model_wrapper or {})
        self._data_shard: tuple[int, int] | None = None

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Build the optimizer, then let the booster distribute model and optimizer over the ranks.

        **Collective**: every rank, once.

        Raises:
            ConfigError: ColossalAI is not installed, or the plugin does not support this model or optimizer.
        """
        engine.require_engine()
        require_plain(model, "ColossalAI")
        model = model.to(torch.device(get_device()))
        if optim_wrapper is None:
            self._state, self._trains = ColossalAIState(model), False
            return model, None
        if not is_distributed():
            init_dist("none")
        wrapper = ColossalAIOptimWrapper.of(build_optim_wrapper(model, optim_wrapper))
        self._choice.check_run(model, wrapper.optimizer)
        if self._choice.zero_stage:
            leave_out_frozen(wrapper.optimizer)
        max_norm = max_norm_of(wrapper.clip_grad, f"ColossalAI's {self._choice.kind!r}")
        options = self._choice.with_run(max_norm) | self._policy(model)
        plugin = engine.make_plugin(self._choice.class_name, options)
        _begin_alike(model)
        if self._plan_is_used:
            styles = read_plan(model, self._plan)
            mesh = DeviceMesh.from_group(plugin.tp_group, get_device())
            PlanTrial(model, styles, mesh, lambda _: "Use strategy 'fsdp'").copy(model)
        booster, boosted, laid = engine.boost(plugin, model, wrapper.optimizer)
        state = ColossalAIState(model, laid, getattr(plugin, "tp_group", None))
        engine.check_splits(model)
        if options.get("custom_policy") is None and not options.get("parallel_output"):
            engine.predict_whole_vocabulary(model)
        wrapper.attach(
            laid,
            model,
            flow=GradientFlow(model) if self._choice.zero_stage else None,
            masters=state.masters(offloads=bool(options.get("cpu_offload"))),
            drift=DriftCheck(lambda: list(model.named_parameters()), getattr(plugin, "dp_group", None), BY_RANK),
        )
        wrapper.sends_as_they_come = self._choice.zero_stage == 2 or bool(options.get("overlap_communication", True))
        cast_inputs_and_parts(model, self._choice.dtype)
        if self._choice.tp_size > 1:
            self._sync_replica(plugin)
        self._state, self._trains = state, True
        no_sync = None if self._choice.zero_stage == 2 else partial(booster.no_sync, boosted, laid)
        wrapped: nn.Module = MODEL_WRAPPERS.build(
            {"type": "ColossalAIModelWrapper", **self._wrapper},
            model=model, model_wrapper=boosted, booster=booster, no_sync=no_sync, **self._checks_of_parts(model),
        )  # fmt: skip
        self._model = wrapped  # keeps its booster alive, which owns the groups that gather states
        return wrapped, wrapper

    @property
    def data_shard(self) -> tuple[int, int]:
        """The data shard of this rank's replica and the number of shards."""
        return super().data_shard if self._data_shard is None else self._data_shard

    def _checks_of_parts(self, model: nn.Module) -> dict[str, Any]:
        """Return what refuses to use a part of a parameter as the whole; see `EngineModelWrapper`."""
        if self._choice.tp_size == 1:
            return {}
        uses = WholeParams(model, _problem_outside_layers, user="forward", owner="the layer that holds it")
        has_policy = self._choice.options.get("custom_policy") is not None  # whose layers may use weights themselves
        return {"parts": WholeParams(model, _problem_of_parts), "forward_checks": [] if has_policy else [uses]}

    def _sync_replica(self, plugin: Any) -> None:
        """Let the ranks of a replica process the same samples and draw the same random numbers."""
        self._data_shard = (plugin.dp_group.rank(), plugin.dp_group.size())
        sync_random_state(plugin.tp_group)
        # The inference fast path of nn.TransformerEncoderLayer would use a part of the weights as the whole.
        torch.backends.mha.set_fastpath_enabled(False)

    def _policy(self, model: nn.Module) -> dict[str, Any]:
        """Return the sharding policy, as an option of the plugin."""
        choice = self._choice
        has_custom = choice.options.get("custom_policy") is not None
        if choice.kind != "hybrid" or has_custom:
            return {}
        if choice.tp_size == 1:
            return {"custom_policy": engine.replacing_policy({})}
        if not self._splits_by_plan and engine.has_policy(model):
            _check_adapters(model)
            return {}
        self._plan_is_used = True
        return {"custom_policy": engine.replacing_policy(engine.replacements(model, self._plan, choice.tp_size))}


def _read_tensor_parallel(tensor_parallel: Any, options: Mapping[str, Any]) -> tuple[int, Mapping[str, Any] | None]:
    """Return the number of ranks that share a replica, and the plan."""
    request = read_request(tensor_parallel)
    assert request is not None
    degree = request.degree or options.get("tp_size")
    if degree is None or options.get("tp_size", degree) != degree or "custom_policy" in options:
        raise ConfigError(
            "`tensor_parallel` must have a degree, the same as `tp_size`, and no `custom_policy` with it, but is "
            f"{tensor_parallel!r} with {dict(options)}"
        )
    return degree, request.plan


def _begin_alike(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0; otherwise ZeRO would mix those of several ranks."""
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            broadcast(tensor)


def _check_adapters(model: nn.Module) -> None:
    """Refuse layers with adapters, which ColossalAI's own policies would replace by plain layers without them."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            raise ConfigError(
                f"`tp_size` must be 1 for a model with adapters, because ColossalAI's policy would drop those of "
                f"{path!r}, a {type(module).__name__}. Use plugin='lowlevel_zero', or strategy='fsdp'"
            )


def _problem_outside_layers(param: Tensor, _: str) -> str | None:
    """Return why a parameter can't be used in the forward pass, but by ColossalAI's layers; None if it can."""
    if not engine.is_split(param) or called_by("colossalai"):
        return None
    return (
        "with `tp_size` above 1 this rank has a part of it, which is whole only inside its layer. Leave the layer out "
        "of the plan; or use plugin='lowlevel_zero', or strategy 'fsdp'"
    )


def _problem_of_parts(param: Tensor, _: str) -> str | None:
    """Return why a parameter cannot be used outside the model's forward pass; None if it can."""
    if not engine.is_split(param) or called_from("torch.optim."):
        return None
    return (
        "with `tp_size` above 1 this rank has a part of it, and what layers return are parts, too. "
        "Use plugin='lowlevel_zero', or strategy 'fsdp'"
    )
