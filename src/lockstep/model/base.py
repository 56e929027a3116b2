"""Base classes of models: `BaseModule` initialises its weights; `BaseModel` has steps for training and validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.errors import ConfigError, wrong_type
from lockstep.model import steps, wrapper
from lockstep.model.preprocessor import BaseDataPreprocessor
from lockstep.registry import MODELS


class BaseModule(nn.Module):
    """A module whose `init_weights` is called before training: by the Runner if it is the model, else by its parent.

    Args:
        init_cfg: exists for compatibility with MMEngine; must be None, because `init_weights` initialises the weights.

    Example:
        >>> class Head(BaseModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(4, 2)
        ...     def init_weights(self):
        ...         nn.init.zeros_(self.linear.weight)
        >>> class Net(BaseModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.heads = nn.ModuleList([Head()])
        >>> net = Net()
        >>> net.init_weights()
        >>> net.heads[0].linear.weight.abs().max().item()
        0.0
    """

    def __init__(self, init_cfg: None = None) -> None:
        super().__init__()
        if init_cfg is not None:
            raise ConfigError(
                f"`init_cfg` must be None, but is {init_cfg!r}. Initialise the weights in `init_weights`, which a "
                "Runner calls, by the functions of torch.nn.init; give a file of weights to the Runner as `load_from`"
            )

    def init_weights(self) -> None:
        """Let every `BaseModule` inside initialise its weights; other modules keep the weights from their constructors.

        A subclass initialises its own weights here, and calls this method for the others. Before training, a Runner
        calls it on every rank, with the same random numbers, before any weights are loaded.
        """
        for module in _outermost(self):
            module.init_weights()


class BaseModel(BaseModule):
    """A module whose one `forward` serves training, validation and plain use.

    A subclass defines `forward`. Its arguments before `mode` are the unpacked batch that the data loader yields:
    `forward(self, inputs, data_samples=None, mode="tensor")` for batches that are pairs, or dicts with these keys;
    `forward(self, imgs, labels, mode)` for pairs.

    * `mode="loss"`: return the loss, or a dict of losses (see `parse_losses`).
    * `mode="predict"`: return what the metrics receive.
    * `mode="tensor"`: return whatever plain use needs.

    Args:
        data_preprocessor: the module, or its config, that prepares each batch for `forward`; by default one that moves
            the batch to the model's device.
        init_cfg: as for `BaseModule`.

    Example:
        >>> class Net(BaseModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(4, 2)
        ...     def forward(self, inputs, labels=None, mode="tensor"):
        ...         scores = self.linear(inputs)
        ...         if mode == "loss":
        ...             return {"loss": nn.functional.cross_entropy(scores, labels)}
        ...         return (scores, labels) if mode == "predict" else scores
    """

    def __init__(self, data_preprocessor: nn.Module | Mapping[str, Any] | None = None, init_cfg: None = None) -> None:
        super().__init__(init_cfg)
        if data_preprocessor is None:
            data_preprocessor = BaseDataPreprocessor()
        elif isinstance(data_preprocessor, Mapping):
            data_preprocessor = MODELS.build(data_preprocessor, type="BaseDataPreprocessor")
        if not isinstance(data_preprocessor, nn.Module):
            raise wrong_type("data_preprocessor", "a module, a config dict or None", data_preprocessor)
        self.data_preprocessor = data_preprocessor

    @steps.default_step
    def train_step(self, data: Any, optim_wrapper: steps.UpdatesParams) -> dict[str, Tensor]:
        """Train on one batch, and return the values to log.

        Override it to train differently, for instance with several optimizers. Every strategy calls it. In it, call the
        model as `self(...)`, and let `optim_wrapper` run the backward passes and updates.
        """
        return wrapper.train_step(self, data, optim_wrapper)

    @steps.default_step
    def val_step(self, data: Any) -> Any:
        """Return what the model predicts for one batch of the validation data."""
        return wrapper.predict_step(self, data)

    @steps.default_step
    def test_step(self, data: Any) -> Any:
        """Return what the model predicts for one batch of the test data."""
        return wrapper.predict_step(self, data)

    def _run_forward(self, data: Any, mode: steps.Mode) -> Any:
        """Call the model on a preprocessed batch, as steps that were written for MMEngine do."""
        return steps.call_forward(self, self, data, mode)

    def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Add up what `forward(mode="loss")` returned; see `lockstep.model.parse_losses`."""
        return steps.parse_losses(losses)


def _outermost(module: nn.Module) -> Iterator[BaseModule]:
    """Yield the outermost `BaseModule`s inside `module`; each of them initialises those within it."""
    for child in module.children():
        if isinstance(child, BaseModule):
            yield child
        else:
            yield from _outermost(child)
