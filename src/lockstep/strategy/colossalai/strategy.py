"""`ColossalAIStrategy`: replicas, ZeRO 1 and 2, tensor parallelism and pipelines, by ColossalAI's plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lockstep.dataset.random_state import sync_random_state
from lockstep.device import get_device
from lockstep.dist import broadcast, init_dist, is_distributed
from lockstep.errors import ConfigError
from lockstep.model import outside_loss
from lockstep.model.tensor_parallel import PlanTrial
from lockstep.model.tensor_parallel_plan import read_plan, read_request
from lockstep.model.written import BY_RANK, DriftCheck
from lockstep.optim import OptimWrapperDict, build_optim_wrapper
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.strategy.base import OptimLike, Prepared
from lockstep.strategy.colossalai import engine
from lockstep.strategy.colossalai.pipeline import Inventory, Pipeline, PipelineState, Stages, check_model
from lockstep.strategy.colossalai.plugin import PluginChoice, name_and_options
from lockstep.strategy.colossalai.state import ColossalAIState
from lockstep.strategy.colossalai.wrappers import ColossalAIOptimWrapper, Drive
from lockstep.strategy.engine_parameters import GradientPlaceholders, leave_out_frozen, max_norm_of
from lockstep.strategy.engine_strategy import EngineStrategy, require_plain
from lockstep.strategy.gradient_flow import GradientFlow
from lockstep.strategy.own_steps import WholeParams, called_by, called_from, cast_inputs, cast_parts

# ColossalAI's optimizer, the translator of its states, and the arguments of the model's wrapper.
_Boosted: TypeAlias = tuple[Any, ColossalAIState, dict[str, Any]]


@STRATEGIES.register_module(name=["ColossalAIStrategy", "colossalai"])
class ColossalAIStrategy(EngineStrategy):
    """Train with one of ColossalAI's plugins.

    All ranks start with the parameters of rank 0. Gradients are clipped by their global norm. A model that is prepared
    without an optim wrapper is only moved to its device.

    Args:
        plugin: `"ddp"`, `"lowlevel_zero"` (shards the optimizer, with `stage=2` also the gradients) or `"hybrid"`
            (`tp_size` times `pp_size` ranks share each replica: `tp_size` ranks split each layer, and `pp_size` stages
            have some layers each); or a dict with one of these as `type` and its options. MMEngine's default is
            "gemini", which is refused.
        mixed_precision: must be None; give `precision="bf16"` to the plugin.
        model_wrapper: config of the wrapper, `ColossalAIModelWrapper` by default.
        tensor_parallel: as for `FSDPStrategy`, with plugin="hybrid": the number of ranks that share a replica, for a
            model with a `_tp_plan` that says how to split it; or
            `dict(degree=2, plan={"*.up": "colwise", "*.down": "rowwise"})`, with patterns of names of linear layers.
            With `tp_size` only, the split comes from a `custom_policy`, from ColossalAI's own policy for the model, or
            from the model's `_tp_plan`.
        **kwargs: options of the plugin: `stage`, `precision`, `tp_size`, `pp_size` with `num_microbatches` or
            `microbatch_size`, and so on.

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
        wrapper = build_optim_wrapper(model, optim_wrapper)
        if self._choice.clips or isinstance(wrapper, OptimWrapperDict):  # else any may be used, as with DDP
            wrapper = ColossalAIOptimWrapper.of(wrapper)
        self._choice.check_run(model, wrapper.optimizer)
        if self._choice.zero_stage:
            leave_out_frozen(wrapper.optimizer)
        max_norm = max_norm_of(wrapper.clip_grad, f"ColossalAI's {self._choice.kind!r}") if self._choice.clips else None
        options = self._choice.with_run(max_norm) | self._policy(model)
        plugin = engine.make_plugin(self._choice.class_name, options)
        _begin_alike(model)
        in_pipeline = self._choice.pp_size > 1
        lay = self._in_stages if in_pipeline else self._whole
        laid, translator, parts = lay(plugin, model, wrapper.optimizer)
        engine.check_splits(model)
        if options.get("custom_policy") is None and not options.get("parallel_output"):
            engine.predict_whole_vocabulary(model)
        drift = DriftCheck(lambda: list(model.named_parameters()), getattr(plugin, "dp_group", None), BY_RANK)
        if isinstance(wrapper, ColossalAIOptimWrapper):
            drive = Drive(
                laid,
                partial(engine.gradients_of, laid, model),
                clips=self._choice.clips,
                in_pipeline=in_pipeline,
                flow=GradientFlow(model) if self._choice.zero_stage and not in_pipeline else None,
                sends_as_they_come=self._choice.zero_stage == 2 or bool(options.get("overlap_communication", True)),
                held=GradientPlaceholders("ColossalAI"),
                drift=drift,
                masters=translator.masters(offloads=bool(options.get("cpu_offload"))),
            )
            wrapper.attach(drive)
        else:
            parts["drift"] = drift
        cast_inputs(model, self._choice.dtype)
        cast_parts(model, self._choice.dtype)
        if self._choice.tp_size * self._choice.pp_size > 1:
            self._sync_replica(plugin)
        self._state, self._trains = translator, True
        cfg = {"type": "ColossalAIModelWrapper", **self._wrapper}
        wrapped: nn.Module = MODEL_WRAPPERS.build(cfg, model=model, **parts)
        self._model = wrapped  # keeps its booster alive, which owns the groups that gather states
        return wrapped, wrapper

    @property
    def data_shard(self) -> tuple[int, int]:
        """The data shard of this rank's replica and the number of shards."""
        return super().data_shard if self._data_shard is None else self._data_shard

    def compiled_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts that are compiled separately: here the whole model.

        Raises:
            ConfigError: the model will be in stages, and the code of its layers is replaced when they are built.
        """
        if self._choice.pp_size > 1:
            raise ConfigError("`compile` must be left out with `pp_size` above 1, but is given. Use strategy='fsdp'")
        return super().compiled_parts(model)

    def _whole(self, plugin: Any, model: nn.Module, optimizer: Optimizer) -> _Boosted:
        """Boost a model that has all its layers on each rank; see `_Boosted`."""
        if self._plan_is_used:
            styles = read_plan(model, self._plan)
            mesh = DeviceMesh.from_group(plugin.tp_group, get_device())
            PlanTrial(model, styles, mesh, lambda _: "Use strategy 'fsdp'").copy(model)
        booster, boosted, laid = engine.boost(plugin, model, optimizer)
        no_sync = None if self._choice.zero_stage == 2 else partial(booster.no_sync, boosted, laid)
        options = {"model_wrapper": boosted, "booster": booster, "no_sync": no_sync}
        if self._choice.tp_size > 1:
            options["guard"] = WholeParams(model, _problem_of_parts)
            if self._choice.options.get("custom_policy") is None:  # whose layers may use their weights themselves
                options["uses"] = WholeParams(
                    model, _problem_outside_layers, user="forward", owner="the layer that holds it"
                )
        options["may_go_round"] = self._choice.kind == "ddp"
        return laid, ColossalAIState(model, laid, getattr(plugin, "tp_group", None)), options

    def _in_stages(self, plugin: Any, model: nn.Module, optimizer: Optimizer) -> _Boosted:
        """Boost a model in stages; see `_Boosted`."""
        if outside_loss(model) is not None:
            raise ConfigError(
                "`loss` must be None with `pp_size` above 1, because the last stage computes the loss. Let "
                "its `forward` return the loss"
            )
        inventory = Inventory.of(model, optimizer)
        engine.take_micro_batches(plugin)
        with _put_aside(model, "data_preprocessor"):  # no policy gives it to a stage, but each stage needs it
            booster, boosted, laid = engine.boost(plugin, model, optimizer)
        shared, zero = engine.shared_parameters(boosted), self._choice.zero_stage > 0
        stages = Stages(inventory, model, plugin.pp_group, plugin.dp_group, shared, zero)
        pipeline = Pipeline(
            partial(engine.run_pipeline, booster, boosted), boosted.no_sync, laid, model, stages, self._choice.cutting
        )
        no_sync = partial(booster.no_sync, boosted, laid)
        options = {"model_wrapper": boosted, "booster": booster, "no_sync": no_sync, "pipeline": pipeline}
        return laid, PipelineState(model, laid, plugin.tp_group, stages), options

    def _sync_replica(self, plugin: Any) -> None:
        """Let the ranks of a replica process the same samples and draw the same random numbers."""
        self._data_shard = (plugin.dp_group.rank(), plugin.dp_group.size())
        sync_random_state(plugin.pp_group)
        sync_random_state(plugin.tp_group)
        # The inference fast path of nn.TransformerEncoderLayer would use a part of the weights as the whole.
        torch.backends.mha.set_fastpath_enabled(False)

    def _policy(self, model: nn.Module) -> dict[str, Any]:
        """Return the sharding policy, as an option of the plugin."""
        choice = self._choice
        has_custom = choice.options.get("custom_policy") is not None
        if choice.pp_size > 1:
            if self._splits_by_plan:
                raise ConfigError(
                    "`tensor_parallel` must be left out with `pp_size` above 1, because a plan does not say which "
                    "stage has which layers. Use `tp_size`, by which ColossalAI's own policy for the model also splits "
                    "layers"
                )
            check_model(model, has_policy=engine.has_policy(model), has_custom_policy=has_custom)
            return {}
        if choice.kind != "hybrid" or has_custom:
            return {}
        if choice.tp_size == 1:
            return {"custom_policy": engine.replacing_policy({})}
        if not self._splits_by_plan and engine.has_policy(model):
            _check_adapters(model)
            return {}
        self._plan_is_used = True
        return {"custom_policy": engine.replacing_policy(engine.replacements(model, self._plan, choice.tp_size))}


@contextmanager
def _put_aside(model: nn.Module, name: str) -> Iterator[None]:
    """Remove a child module from a model inside the context."""
    child = dict(model.named_children()).get(name)
    if child is not None:
        delattr(model, name)
    try:
        yield
    finally:
        if child is not None:
            model.add_module(name, child)


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
