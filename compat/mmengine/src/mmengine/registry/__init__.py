"""Registries: those of lockstep, with MMEngine's rules, each with MMEngine's own as a child of scope `mmengine`."""

from __future__ import annotations

from lockstep.registry import init_base_scope as _init_base_scope
from mmengine.registry.build_functions import (
    build_from_cfg,
    build_model_from_cfg,
    build_runner_from_cfg,
    build_scheduler_from_cfg,
)
from mmengine.registry.default_scope import DefaultScope
from mmengine.registry.registry import Registry
from mmengine.registry.root import (
    DATA_SAMPLERS,
    DATASETS,
    EVALUATOR,
    FUNCTIONS,
    HOOKS,
    INFERENCERS,
    LOG_PROCESSORS,
    LOOPS,
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    RUNNER_CONSTRUCTORS,
    RUNNERS,
    STRATEGIES,
    TASK_UTILS,
    TRANSFORMS,
    VISBACKENDS,
    VISUALIZERS,
    WEIGHT_INITIALIZERS,
)
from mmengine.registry.utils import count_registered_modules, init_default_scope, traverse_registry_tree

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "EVALUATOR",
    "FUNCTIONS",
    "HOOKS",
    "INFERENCERS",
    "LOG_PROCESSORS",
    "LOOPS",
    "METRICS",
    "MODELS",
    "MODEL_WRAPPERS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS",
    "RUNNERS",
    "RUNNER_CONSTRUCTORS",
    "STRATEGIES",
    "TASK_UTILS",
    "TRANSFORMS",
    "VISBACKENDS",
    "VISUALIZERS",
    "WEIGHT_INITIALIZERS",
    "DefaultScope",
    "Registry",
    "build_from_cfg",
    "build_model_from_cfg",
    "build_runner_from_cfg",
    "build_scheduler_from_cfg",
    "count_registered_modules",
    "init_default_scope",
    "traverse_registry_tree",
]

_init_base_scope("mmengine")
