"""`BaseTTAModel`: predictions on several augmented forms of a sample, merged into one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmengine.model.base_module import BaseModule
from mmengine.registry import MODELS


@MODELS.register_module(force=True)
class BaseTTAModel(BaseModule):
    """Predict each sample in several augmented forms, and merge the predictions; base class.

    A subclass defines `merge_preds`.

    Args:
        module: the model that predicts, or its config; it needs a `test_step`.
        data_preprocessor: the data preprocessor in the config of `module`, instead of its own.

    Example:
        >>> class Net(nn.Module):
        ...     def test_step(self, data):
        ...         return [2.0 * sample for sample in data["inputs"]]
        >>> class Mean(BaseTTAModel):
        ...     def merge_preds(self, data_samples_list):
        ...         return [sum(forms) / len(forms) for forms in data_samples_list]
        >>> Mean(Net()).test_step({"inputs": [[1.0, 10.0], [3.0, 30.0]]})
        [4.0, 40.0]
    """

    def __init__(
        self, module: nn.Module | Mapping[str, Any], data_preprocessor: nn.Module | Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if isinstance(module, Mapping):
            extra = {} if data_preprocessor is None else {"data_preprocessor": data_preprocessor}
            module = MODELS.build({**module, **extra})
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must be a module or its config, but is {module!r} of {type(module).__name__}")
        if not hasattr(module, "test_step"):
            raise AssertionError(f"`module` must have a method `test_step`, but {type(module).__name__} has none")
        self.module = module

    @abstractmethod
    def merge_preds(self, data_samples_list: list[Sequence[Any]]) -> list[Any]:
        """Return one prediction for each sample.

        Args:
            data_samples_list: for each sample, the predictions on all its augmented forms.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `merge_preds`")

    def test_step(self, data: Any) -> list[Any]:
        """Return the merged predictions for a batch.

        Args:
            data: a dict, tuple or list, each entry of which is a list with one batch for each augmentation.
        """
        predictions = [self.module.test_step(batch) for batch in _batches(data)]  # type: ignore[operator]
        return self.merge_preds(list(zip(*predictions, strict=True)))

    def forward(self, inputs: torch.Tensor, data_samples: list[Any] | None = None, mode: str = "tensor") -> Any:
        """Not defined: the model is only called through `test_step`."""
        raise NotImplementedError(f"{type(self).__name__} has no `forward`; call `test_step`")


def _batches(data: Any) -> list[Any]:
    """Return the batch of each augmentation."""
    if isinstance(data, Mapping):
        count = len(next(iter(data.values())))
        return [{key: value[index] for key, value in data.items()} for index in range(count)]
    if isinstance(data, tuple | list):
        return [[entry[index] for entry in data] for index in range(len(data[0]))]
    raise TypeError(f"`data` must be a dict, tuple or list, but is {data!r} of {type(data).__name__}")
