"""The registries of MMEngine, each the child of lockstep's, so that both find what the other's code has registered."""

from __future__ import annotations

from lockstep import registry as core
from mmengine.registry.build_functions import (
    build_model_from_cfg,
    build_runner_from_cfg,
    build_scheduler_from_cfg,
)
from mmengine.registry.registry import Registry

RUNNERS = Registry("runner", build_runner_from_cfg, core.RUNNERS, locations=["mmengine.runner"])
RUNNER_CONSTRUCTORS = Registry("runner constructor")
LOOPS = Registry("loop", parent=core.LOOPS, locations=["mmengine.runner"])
HOOKS = Registry("hook", parent=core.HOOKS, locations=["mmengine.hooks"])
LOG_PROCESSORS = Registry("log processor", locations=["mmengine.runner"])
OPTIMIZERS = Registry("optimizer", parent=core.OPTIMIZERS, locations=["mmengine.optim"])
OPTIM_WRAPPERS = Registry("optim wrapper", parent=core.OPTIM_WRAPPERS, locations=["mmengine.optim"])
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    "optimizer wrapper constructor", parent=core.OPTIM_WRAPPER_CONSTRUCTORS, locations=["mmengine.optim"]
)
PARAM_SCHEDULERS = Registry(
    "parameter scheduler", build_scheduler_from_cfg, core.PARAM_SCHEDULERS, locations=["mmengine.optim"]
)
DATASETS = Registry("dataset", parent=core.DATASETS, locations=["mmengine.dataset"])
DATA_SAMPLERS = Registry("data sampler", parent=core.DATA_SAMPLERS, locations=["mmengine.dataset"])
TRANSFORMS = Registry("transform", parent=core.TRANSFORMS, locations=["mmengine.dataset"])
MODELS = Registry("model", build_model_from_cfg, core.MODELS, locations=["mmengine.model"])
MODEL_WRAPPERS = Registry("model wrapper", parent=core.MODEL_WRAPPERS, locations=["mmengine.model"])
WEIGHT_INITIALIZERS = Registry("weight initializer", locations=["mmengine.model"])
METRICS = Registry("metric", parent=core.METRICS, locations=["mmengine.evaluator"])
EVALUATOR = Registry("evaluator", parent=core.EVALUATOR, locations=["mmengine.evaluator"])
TASK_UTILS = Registry("task util")
VISUALIZERS = Registry("visualizer", parent=core.VISUALIZERS, locations=["mmengine.visualization"])
VISBACKENDS = Registry("visualizer backend", locations=["mmengine.visualization"])
INFERENCERS = Registry("inferencer", locations=["mmengine.infer"])
STRATEGIES = Registry("strategy", parent=core.STRATEGIES)
FUNCTIONS = Registry("function", parent=core.FUNCTIONS, locations=["mmengine.dataset"])

__all__ = [name for name in globals() if name.isupper()]
