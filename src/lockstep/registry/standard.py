"""The root registries.

A library built on lockstep makes children: ``Registry("model", scope="mylib", parent=MODELS)``.

Locations are names, not imports: the rooms that fill these registries stand on floors above this one and import it to
register themselves. Naming them lets ``HOOKS.get("CheckpointHook")`` work in a process that has not imported
``lockstep.hooks`` yet, without an import cycle, and keeps torch out of ``lockstep --help``.
"""

from __future__ import annotations

from lockstep.registry.registry import Library, Registry

SCOPE = "lockstep"

MODELS = Registry("model", scope=SCOPE, locations=["lockstep.model"])
MODEL_WRAPPERS = Registry(
    "model wrapper", scope=SCOPE, locations=["lockstep.model", "lockstep.model.fsdp", "lockstep.strategy"]
)
OPTIMIZERS = Registry(
    "optimizer",
    scope=SCOPE,
    locations=["lockstep.optim"],
    libraries=[Library("torch.optim", base="Optimizer")],
)
OPTIM_WRAPPERS = Registry("optim wrapper", scope=SCOPE, locations=["lockstep.optim", "lockstep.strategy"])
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
HOOKS = Registry("hook", scope=SCOPE, locations=["lockstep.hooks"])
LOOPS = Registry("loop", scope=SCOPE, locations=["lockstep.runner"])
STRATEGIES = Registry("strategy", scope=SCOPE, locations=["lockstep.strategy"])
VISUALIZERS = Registry("visualizer", scope=SCOPE, locations=["lockstep.visualization"])
RUNNERS = Registry("runner", scope=SCOPE, locations=["lockstep.runner"])
