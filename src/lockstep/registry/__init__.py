"""Names for classes and functions, so that a config can say what to build.

```python
from lockstep.registry import MODELS

@MODELS.register_module()
class ToyNet(torch.nn.Module): ...

model = MODELS.build(dict(type="ToyNet", width=32))
```

A library built on lockstep makes children: ``Registry("model", scope="mylib", parent=MODELS)``.

Locations are names, not imports: the packages that fill these registries stand in layers above and import this one to
register themselves. Naming them lets ``HOOKS.get("CheckpointHook")`` work in a process that has not imported
``lockstep.hooks`` yet, without an import cycle, and keeps torch out of ``lockstep --help``. Where a location stands
beside its names, asking for one imports that module alone: what stands on FSDP or on an engine takes longer to import
than all else, and a run needs at most one of them.

Importing this package does not import torch, nor anything else of lockstep but its errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.registry.registry import Library, Registry, in_default_scope, init_default_scope
from lockstep.registry.signatures import BuildError

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "EVALUATOR",
    "FUNCTIONS",
    "HOOKS",
    "LOOPS",
    "METRICS",
    "MODELS",
    "MODEL_WRAPPERS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS",
    "RUNNERS",
    "STRATEGIES",
    "TASK_UTILS",
    "TRANSFORMS",
    "VISBACKENDS",
    "VISUALIZERS",
    "BuildError",
    "Library",
    "Registry",
    "in_default_scope",
    "init_default_scope",
]


def _build_runner(cfg: Mapping[str, Any], registry: Registry) -> Any:
    """Return the runner that a whole config describes, whose `runner_type` may name another class."""
    return registry[cfg.get("runner_type", "Runner")].from_cfg(cfg)  # type: ignore[attr-defined]


MODELS = Registry("model", locations=["lockstep.model"])
MODEL_WRAPPERS = Registry(
    "model wrapper",
    locations={
        "lockstep.model": ["MMDistributedDataParallel", "MMSeparateDistributedDataParallel"],
        "lockstep.model.fsdp": ["MMFullyShardedDataParallel"],
        "lockstep.strategy.deepspeed": ["MMDeepSpeedEngineWrapper"],
        "lockstep.strategy.colossalai": ["ColossalAIModelWrapper", "CollosalAIModelWrapper"],
    },
)
OPTIMIZERS = Registry(
    "optimizer",
    locations={
        "lockstep.strategy.deepspeed": [
            *("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion")
        ],
    },
    libraries=[Library("torch.optim", base="Optimizer")],
)
OPTIM_WRAPPERS = Registry(
    "optim wrapper",
    locations={
        "lockstep.optim": ["OptimWrapper", "AmpOptimWrapper", "OptimWrapperDict"],
        "lockstep.strategy.deepspeed": ["DeepSpeedOptimWrapper"],
        "lockstep.strategy.colossalai": ["ColossalAIOptimWrapper"],
    },
)
OPTIM_WRAPPER_CONSTRUCTORS = Registry("optim wrapper constructor", locations=["lockstep.optim"])
PARAM_SCHEDULERS = Registry("parameter scheduler", locations=["lockstep.optim"])
DATASETS = Registry("dataset", locations=["lockstep.dataset"])
DATA_SAMPLERS = Registry(
    "data sampler", locations=["lockstep.dataset"], libraries=[Library("torch.utils.data", base="Sampler")]
)
METRICS = Registry("metric", locations=["lockstep.evaluator"])
EVALUATOR = Registry("evaluator", locations=["lockstep.evaluator"])
HOOKS = Registry("hook", locations=["lockstep.hooks"])
LOOPS = Registry("loop", locations=["lockstep.runner"])
STRATEGIES = Registry(
    "strategy",
    locations={
        "lockstep.strategy.ddp": ["SingleDeviceStrategy", "single", "DDPStrategy", "ddp"],
        "lockstep.strategy.fsdp": ["FSDPStrategy", "fsdp"],
        "lockstep.strategy.deepspeed": ["DeepSpeedStrategy", "deepspeed"],
        "lockstep.strategy.colossalai": ["ColossalAIStrategy", "colossalai"],
    },
)
VISUALIZERS = Registry("visualizer", locations=["lockstep.visualization"])
# MMEngine's name for the registry of visualizers' backends, which are visualizers here.
VISBACKENDS = VISUALIZERS
RUNNERS = Registry("runner", locations=["lockstep.runner"], build_func=_build_runner)
# For functions and classes of a user's own: what collates samples, what transforms them, and whatever else.
FUNCTIONS = Registry("function", locations=["lockstep.dataset"])
TRANSFORMS = Registry("transform", locations=["lockstep.dataset"])
TASK_UTILS = Registry("task utility")
