"""Names for classes and functions, so that a config can say what to build.

```python
from lockstep.registry import MODELS

@MODELS.register_module()
class ToyNet(torch.nn.Module): ...

model = MODELS.build(dict(type="ToyNet", width=32))
```

Importing this package does not import torch, nor anything else of lockstep but its errors.
"""

from __future__ import annotations

from lockstep.registry.building import BuildError
from lockstep.registry.registry import Library, Registry, in_default_scope, init_default_scope
from lockstep.registry.standard import (
    DATA_SAMPLERS,
    DATASETS,
    EVALUATOR,
    FUNCTIONS,
    HOOKS,
    LOOPS,
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    RUNNERS,
    STRATEGIES,
    TASK_UTILS,
    TRANSFORMS,
    VISBACKENDS,
    VISUALIZERS,
)

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
