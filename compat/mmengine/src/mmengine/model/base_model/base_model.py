"""`BaseModel`: lockstep's, with an `init_cfg`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

import lockstep.model
from mmengine.model.base_module import BaseModule, InitCfg
from mmengine.registry import MODELS


class BaseModel(lockstep.model.BaseModel, BaseModule):
    """A module whose one `forward` serves training, validation and plain use; see `lockstep.model.BaseModel`.

    Args:
        data_preprocessor: the module, or its config, that prepares each batch for `forward`.
        init_cfg: as for `BaseModule`.
    """

    def __init__(
        self, data_preprocessor: nn.Module | Mapping[str, Any] | None = None, init_cfg: InitCfg = None
    ) -> None:
        if data_preprocessor is None:
            data_preprocessor = {}
        if isinstance(data_preprocessor, Mapping):
            data_preprocessor = MODELS.build({"type": "BaseDataPreprocessor", **data_preprocessor})
        BaseModule.__init__(self, init_cfg)
        if not isinstance(data_preprocessor, nn.Module):
            raise TypeError(
                f"`data_preprocessor` must be a module, a config dict or None, but is {data_preprocessor!r}"
            )
        self.data_preprocessor = data_preprocessor

    @abstractmethod
    def forward(self, inputs: Any, data_samples: list[Any] | None = None, mode: str = "tensor") -> Any:
        """Return losses for the mode ``"loss"``, predictions for ``"predict"``, what fits for ``"tensor"``."""
        raise NotImplementedError(f"{type(self).__name__} must define `forward`")
