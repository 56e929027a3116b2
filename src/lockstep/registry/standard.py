"""The root registries.

A library built on lockstep makes children: ``Registry("model", scope="mylib", parent=MODELS)``.

Locations are names, not imports: the rooms that fill these registries stand on floors above this one and import it to
register themselves. Naming them lets ``HOOKS.get("CheckpointHook")`` work in a process that has not imported
``lockstep.hooks`` yet, without an import cycle, and keeps torch out of ``lockstep --help``. Where a location stands
beside its names, asking for one imports that module alone: what stands on FSDP or on an engine takes longer to import
than all else, and a run needs at most one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.registry.registry import Library, Registry


def build_runner(cfg: Mapping[str, Any], registry: Registry) -> Any:
    """Return the runner that a whole config describes, whose `runner_type` may name another class."""
    return registry[cfg.get("runner_type", "Runner")].from_cfg(cfg)  # type: ignore[attr-defined]


SCOPE = "lockstep"

MODELS = Registry("model", scope=SCOPE, locations=["lockstep.model"])
MODEL_WRAPPERS = Registry(
    "model wrapper",
    scope=SCOPE,
    locations={
        "lockstep.model": ["MMDistributedDataParallel", "MMSeparateDistributedDataParallel"],
        "lockstep.model.fsdp": ["MMFullyShardedDataParallel"],
        "lockstep.strategy.deepspeed": ["MMDeepSpeedEngineWrapper"],
        "lockstep.strategy.colossalai": ["ColossalAIModelWrapper", "CollosalAIModelWrapper"],
    },
)
OPTIMIZERS = Registry(
    "optimizer",
    scope=SCOPE,
    locations={
        "lockstep.strategy.deepspeed": [
            *("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion")
        ],
    },
    libraries=[Library("torch.optim", base="Optimizer")],
)
OPTIM_WRAPPERS = Registry(
    "optim wrapper",
    scope=SCOPE,
    locations={
        "lockstep.optim": ["OptimWrapper", "AmpOptimWrapper", "OptimWrapperDict"],
        "lockstep.strategy.deepspeed": ["DeepSpeedOptimWrapper"],
        "lockstep.strategy.colossalai": ["ColossalAIOptimWrapper"],
    },
)
OPTIM_WRAPPER_CONSTRUCTORS = Registry("optim wrapper constructor", scope=SCOPE, locations=["lockstep.optim"])
PARAM_SCHEDULERS = Registry("parameter scheduler", scope=SCOPE, locations=["lockstep.optim"])
DATASETS = Registry("dataset", scope=SCOPE, locations=["lockstep.dataset"])
DATA_SAMPLERS = Registry(
    "data sampler",
    scope=SCOPE,
    locations=["lockstep.dataset"],
    libraries=[Library("torch.utils.data", base="Sampler")],
)
METRICS = Registry("metric", scope=SCOPE, locations=["lockstep.evaluator"])
EVALUATOR = Registry("evaluator", scope=SCOPE, locations=["lockstep.evaluator"])
HOOKS = Registry("hook", scope=SCOPE, locations=["lockstep.hooks"])
LOOPS = Registry("loop", scope=SCOPE, locations=["lockstep.runner"])
STRATEGIES = Registry(
    "strategy",
    scope=SCOPE,
    locations={
        "lockstep.strategy.ddp": ["SingleDeviceStrategy", "single", "DDPStrategy", "ddp"],
        "lockstep.strategy.fsdp": ["FSDPStrategy", "fsdp"],
        "lockstep.strategy.deepspeed": ["DeepSpeedStrategy", "deepspeed"],
        "lockstep.strategy.colossalai": ["ColossalAIStrategy", "colossalai"],
    },
)
VISUALIZERS = Registry("visualizer", scope=SCOPE, locations=["lockstep.visualization"])
# MMEngine's name for the registry of visualizers' backends, which are visualizers here.
VISBACKENDS = VISUALIZERS
RUNNERS = Registry("runner", scope=SCOPE, locations=["lockstep.runner"], build_func=build_runner)
# For functions and classes of a user's own: what collates samples, what transforms them, and whatever else.
FUNCTIONS = Registry("function", scope=SCOPE, locations=["lockstep.dataset"])
TRANSFORMS = Registry("transform", scope=SCOPE, locations=["lockstep.dataset"])
TASK_UTILS = Registry("task utility", scope=SCOPE)
