"""Names for classes and functions, so that a config can name what to build.

```python
from lockstep.registry import MODELS

@MODELS.register_module()
class ToyNet(torch.nn.Module): ...

model = MODELS.build(dict(type="ToyNet", width=32))
```

A library built on lockstep creates children: ``Registry("model", scope="mylib", parent=MODELS)``.

Locations are module names, not imports: the packages that fill these registries are in higher layers and import this
package. So ``HOOKS.get("CheckpointHook")`` works in a process that has not imported ``lockstep.hooks`` yet, without an
import cycle, and ``lockstep --help`` does not import torch. If a location lists its names, looking up one of them
imports only that module: modules that need FSDP or an engine are the slowest to import, and a run needs at most one.

Importing this package imports neither torch nor any other part of lockstep except its errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.registry.registry import (
    Registry,
    default_scope,
    in_default_scope,
    init_base_scope,
    init_default_scope,
    is_registered,
)
from lockstep.registry.signatures import BuildError

__all__ = [
    "CONVERTERS",
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
    "TRANSFORMS",
    "VISUALIZERS",
    "BuildError",
    "Registry",
    "default_scope",
    "in_default_scope",
    "init_base_scope",
    "init_default_scope",
    "is_registered",
]


def _build_runner(cfg: Mapping[str, Any], registry: Registry) -> Any:
    """Return the runner that a whole config describes; its `runner_type` may be another class, or name one."""
    kind = cfg.get("runner_type", "Runner")
    return (kind if isinstance(kind, type) else registry[kind]).from_cfg(cfg)  # type: ignore[attr-defined]


MODELS = Registry("model", locations=["lockstep.model"])
"""Models, the modules in them, losses, and data preprocessors."""
MODEL_WRAPPERS = Registry(
    "model wrapper",
    locations={
        "lockstep.model": ["MMDistributedDataParallel", "MMSeparateDistributedDataParallel"],
        "lockstep.model.fsdp": ["MMFullyShardedDataParallel"],
        "lockstep.strategy.deepspeed": ["MMDeepSpeedEngineWrapper"],
        "lockstep.strategy.colossalai": ["ColossalAIModelWrapper", "CollosalAIModelWrapper"],
    },
)
"""Wrappers that distribute a model."""
OPTIMIZERS = Registry(
    "optimizer",
    locations={
        "lockstep.strategy.deepspeed": [
            *("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion")
        ],
    },
    libraries={"torch.optim": "Optimizer"},
)
"""Optimizers: those of torch, of the engines, and your own."""
OPTIM_WRAPPERS = Registry(
    "optim wrapper",
    locations={
        "lockstep.optim": ["OptimWrapper", "AmpOptimWrapper", "OptimWrapperDict"],
        "lockstep.strategy.deepspeed": ["DeepSpeedOptimWrapper"],
        "lockstep.strategy.colossalai": ["ColossalAIOptimWrapper"],
    },
)
"""Optim wrappers."""
OPTIM_WRAPPER_CONSTRUCTORS = Registry("optim wrapper constructor", locations=["lockstep.optim"])
"""What builds an optim wrapper from a config."""
PARAM_SCHEDULERS = Registry("parameter scheduler", locations=["lockstep.optim"])
"""Schedules of learning rates and other options."""
DATASETS = Registry("dataset", locations=["lockstep.dataset"])
"""Datasets."""
DATA_SAMPLERS = Registry("data sampler", locations=["lockstep.dataset"], libraries={"torch.utils.data": "Sampler"})
"""Samplers and batch samplers."""
METRICS = Registry("metric", locations=["lockstep.evaluator"])
"""Metrics."""
EVALUATOR = Registry("evaluator", locations=["lockstep.evaluator"])
"""Evaluators."""
HOOKS = Registry("hook", locations=["lockstep.hooks"])
"""Hooks."""
LOOPS = Registry("loop", locations=["lockstep.runner"])
"""Training, validation and test loops."""
CONVERTERS = Registry("converter", locations={"lockstep.model.float8": ["Float8", "float8"]})
"""What changes the layers of a model before a strategy distributes it; see `Strategy.converters`."""
STRATEGIES = Registry(
    "strategy",
    locations={
        "lockstep.strategy.native": ["SingleDeviceStrategy", "single", "DDPStrategy", "ddp"],
        "lockstep.strategy.fsdp": ["FSDPStrategy", "fsdp"],
        "lockstep.strategy.deepspeed": ["DeepSpeedStrategy", "deepspeed"],
        "lockstep.strategy.colossalai": ["ColossalAIStrategy", "colossalai"],
    },
)
"""Strategies."""
VISUALIZERS = Registry("visualizer", locations=["lockstep.visualization"])
"""Visualizers."""
RUNNERS = Registry("runner", locations=["lockstep.runner"], build_func=_build_runner)
"""Runners."""
FUNCTIONS = Registry("function", locations=["lockstep.dataset"])
"""Functions, such as those that collate a batch, and others of a user's own."""
TRANSFORMS = Registry("transform", locations=["lockstep.dataset"])
"""Transforms of one sample."""
