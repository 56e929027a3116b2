"""Test-time augmentation in a run: `PrepareTTAHook`, and `build_runner_with_tta`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.hooks import Hook
from mmengine.registry import HOOKS, MODELS, RUNNERS

__all__ = ["PrepareTTAHook", "build_runner_with_tta"]


@HOOKS.register_module()
class PrepareTTAHook(Hook):
    """Test the model inside of one that merges its predictions on several augmented forms of each sample.

    Args:
        tta_cfg: the config of that model, a subclass of `BaseTTAModel`, without its argument `module`.
    """

    def __init__(self, tta_cfg: Mapping[str, Any]) -> None:
        self.tta_cfg = dict(tta_cfg)
        self._trained: nn.Module | None = None

    def before_test(self, runner: Any) -> None:
        """Put the run's model into the other one."""
        self._trained = runner.model
        runner.model = MODELS.build({**self.tta_cfg, "module": runner.model}).eval()

    def after_test(self, runner: Any) -> None:
        """Give the run its own model back."""
        if self._trained is not None:
            runner.model, self._trained = self._trained, None


def build_runner_with_tta(cfg: Mapping[str, Any]) -> Any:
    """Return the runner of a config that tests as its keys `tta_model` and `tta_pipeline` say.

    Raises:
        AssertionError: the config lacks one of these keys.
    """
    if missing := [key for key in ("tta_model", "tta_pipeline") if key not in cfg]:
        raise AssertionError(f"the config must have the key `{missing[0]}` for test-time augmentation")
    cfg = copy.deepcopy(cfg)
    dataset: Any = cfg["test_dataloader"]["dataset"]
    while "pipeline" not in dataset and "dataset" in dataset:  # of a wrapper
        dataset = dataset["dataset"]
    dataset["pipeline"] = cfg["tta_pipeline"]
    runner = RUNNERS.build(cfg)
    runner.register_hook(PrepareTTAHook(cfg["tta_model"]))
    return runner
