"""`DefaultOptimWrapperConstructor`: lockstep's, for configs whose keys need not all fit the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

import lockstep.optim
from lockstep.optim.constructor import param_sites
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

__all__ = ["DefaultOptimWrapperConstructor"]

_logger = logging.getLogger(__name__)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor(lockstep.optim.DefaultOptimWrapperConstructor):
    """Builds an optimizer and its wrapper; see `lockstep.optim.DefaultOptimWrapperConstructor`.

    A key in `custom_keys` that is part of no parameter's name has no effect, with a warning, because packages share
    their schedules among models of which not all have every parameter.
    """

    def add_params(
        self, params: list[dict[str, Any]], module: nn.Module, prefix: str = "", is_dcn_module: bool | None = None
    ) -> None:
        """Add the parameter groups of a module to `params`."""
        custom = self.paramwise_cfg.get("custom_keys")
        if isinstance(custom, Mapping):
            names = [site.name for site in param_sites(module)]
            used = {key: options for key, options in custom.items() if any(key in name for name in names)}
            if unused := [repr(key) for key in custom if key not in used]:
                _logger.warning(
                    "`paramwise_cfg['custom_keys']`: part of no parameter's name, so without effect: %s",
                    ", ".join(unused),
                )
            self.paramwise_cfg = {**self.paramwise_cfg, "custom_keys": used}
        super().add_params(params, module, prefix, is_dcn_module)
