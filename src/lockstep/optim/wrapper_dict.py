"""`OptimWrapperDict`: several optimizers, each with its own name and wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import did_you_mean, wrong_type
from lockstep.model.wrapper import all_entered
from lockstep.optim.wrapper import OptimWrapper
from lockstep.registry import OPTIM_WRAPPERS


def _refused(method: str) -> Callable[..., NoReturn]:
    """Return a method that raises an error, because it must be called on one of the optim wrappers."""

    def refuse(wrappers: OptimWrapperDict, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error that tells how to call the method on one optim wrapper."""
        first = next(iter(wrappers))
        raise NotImplementedError(
            f"{method} must be called on one of the optim wrappers ({', '.join(wrappers)}), but was called on all of "
            f"them. Call optim_wrapper[{first!r}].{method}(...), as in a train_step of the model's own"
        )

    return refuse


def _on_each(method: str) -> Callable[..., None]:
    """Return a method that calls the one of each optim wrapper."""

    @wraps(getattr(OptimWrapper, method))
    def call(wrappers: OptimWrapperDict, *args: Any, **kwargs: Any) -> None:
        for wrapper in wrappers.values():
            getattr(wrapper, method)(*args, **kwargs)

    return call


@OPTIM_WRAPPERS.register_module()
class OptimWrapperDict(OptimWrapper):
    """Optim wrappers by name, for a model that trains its parts in turn, such as a GAN.

    The model's `train_step` gets each wrapper by its name:

    ```python
    with optim_wrapper["generator"].optim_context(self.generator):
        loss = ...
    optim_wrapper["generator"].update_params(loss)
    ```
    """

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            if not isinstance(wrapper, OptimWrapper) or isinstance(wrapper, OptimWrapperDict):
                raise wrong_type(name, "an OptimWrapper", wrapper)
        if not optim_wrappers:
            raise ValueError("`optim_wrappers` must hold at least one wrapper, but is empty")
        self.optim_wrappers = optim_wrappers

    def __getitem__(self, name: str) -> OptimWrapper:
        if name not in self.optim_wrappers:
            raise KeyError(f"there is no optim wrapper {name!r}{did_you_mean(name, self.optim_wrappers)}")
        return self.optim_wrappers[name]

    def __contains__(self, name: object) -> bool:
        return name in self.optim_wrappers

    def __len__(self) -> int:
        return len(self.optim_wrappers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.optim_wrappers)

    def keys(self) -> Iterator[str]:
        """Yield the names."""
        yield from self.optim_wrappers

    def values(self) -> Iterator[OptimWrapper]:
        """Yield the wrappers."""
        yield from self.optim_wrappers.values()

    def items(self) -> Iterator[tuple[str, OptimWrapper]]:
        """Yield names and wrappers."""
        yield from self.optim_wrappers.items()

    initialize_count_status = _on_each("initialize_count_status")
    warn_of_open_window = _on_each("warn_of_open_window")
    begin_iteration = _on_each("begin_iteration")
    count_samples = _on_each("count_samples")
    bind = _on_each("bind")
    zero_grad = _on_each("zero_grad")

    def optim_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter the contexts of all wrappers, for a forward pass that several of them use."""
        return all_entered(wrapper.optim_context(model) for wrapper in self.values())

    update_params = _refused("update_params")
    scale_loss = _refused("scale_loss")
    backward = _refused("backward")
    step = _refused("step")
    add_param_group = _refused("add_param_group")
    should_sync = _refused("should_sync")
    should_update = _refused("should_update")

    @property
    def accumulative_counts(self) -> int:
        """The largest number of calls of `update_params` in a window; setting it sets that of each wrapper."""
        return max(wrapper.accumulative_counts for wrapper in self.values())

    @accumulative_counts.setter
    def accumulative_counts(self, counts: int) -> None:
        for wrapper in self.values():
            wrapper.accumulative_counts = counts

    @property
    def has_open_window(self) -> bool:
        """Whether gradients of some wrapper wait for the batches that complete its window."""
        return any(wrapper.has_open_window for wrapper in self.values())

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of all wrappers."""
        return [wrapper.optimizer for wrapper in self.values()]

    @property
    def grad_norm(self) -> Tensor | None:
        """None: each wrapper has its own norm."""
        return None

    @property
    def has_skipped(self) -> bool:
        """Whether the last update of some optimizer was skipped."""
        return any(wrapper.has_skipped for wrapper in self.values())

    @property
    def inner_count(self) -> int:
        """Number of backward passes of all wrappers so far."""
        return sum(wrapper.inner_count for wrapper in self.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for wrapper in self.values() for group in wrapper.param_groups]

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rates, as `{"generator.lr": [...], ...}`."""
        return {f"{name}.{key}": values for name, wrapper in self.items() for key, values in wrapper.get_lr().items()}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momenta, as `{"generator.momentum": [...], ...}`."""
        return {
            f"{name}.{key}": values for name, wrapper in self.items() for key, values in wrapper.get_momentum().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each wrapper under its name."""
        return {name: wrapper.state_dict() for name, wrapper in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            KeyError: the names differ from those of the wrappers.
        """
        if state_dict.keys() != self.optim_wrappers.keys():
            raise KeyError(f"`state_dict` must have the keys {sorted(self)}, but has {sorted(state_dict)}")
        for name, wrapper in self.items():
            wrapper.load_state_dict(state_dict[name])

    def extra_state(self) -> dict[str, Any]:
        """Return the extra state of each wrapper under its name."""
        return {name: wrapper.extra_state() for name, wrapper in self.items()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `extra_state` returned."""
        for name, wrapper in self.items():
            wrapper.load_extra_state(state.get(name, {}))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={wrapper!r}' for name, wrapper in self.items())})"
