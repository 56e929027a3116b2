"""`OptimWrapperDict`: several optimizers, each with a wrapper and a name of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import did_you_mean
from lockstep.model import ModelWrapper
from lockstep.optim.wrapper import OptimWrapper
from lockstep.registry import OPTIM_WRAPPERS


def _refused(method: str) -> Callable[..., NoReturn]:
    """Return a method that asks which of the optim wrappers is meant."""

    def refuse(wrappers: OptimWrapperDict, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: which of them is meant?"""
        first = next(iter(wrappers))
        raise TypeError(
            f"{method} must be called on one of the optim wrappers ({', '.join(wrappers)}), but was called on all of "
            f"them. Override train_step of the model, and call optim_wrapper[{first!r}].{method}(...) there"
        )

    return refuse


@OPTIM_WRAPPERS.register_module()
class OptimWrapperDict(OptimWrapper):
    """Optim wrappers by name, for a model that trains its parts in turn, such as a GAN.

    The model's `train_step` takes each by its name:

    ```python
    with optim_wrapper["generator"].optim_context(self.generator):
        loss = ...
    optim_wrapper["generator"].update_params(loss)
    ```

    Args:
        **optim_wrappers: the wrappers.
    """

    def __init__(self, **optim_wrappers: OptimWrapper) -> None:
        for name, wrapper in optim_wrappers.items():
            if not isinstance(wrapper, OptimWrapper) or isinstance(wrapper, OptimWrapperDict):
                raise TypeError(
                    f"`{name}` must be an OptimWrapper, but is {wrapper!r} of type {type(wrapper).__name__}"
                )
        if not optim_wrappers:
            raise ValueError("`optim_wrappers` must hold at least one wrapper, but is empty")
        self.optim_wrappers = optim_wrappers
        self.needs_closure = False  # of each by itself

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

    def initialize_count_status(self, model: nn.Module, init_counts: int = 0, max_counts: int | None = None) -> None:
        """Say to each wrapper how many batches there have been and will be."""
        for wrapper in self.values():
            wrapper.initialize_count_status(model, init_counts, max_counts)

    def count_samples(self, own: float, mean: float) -> None:
        """Say to each wrapper how many samples the batch to come has."""
        for wrapper in self.values():
            wrapper.count_samples(own, mean)

    @contextmanager
    def driven_by(self, model: ModelWrapper) -> Iterator[None]:
        """Let a model's wrapper see the losses of all wrappers before their backward passes."""
        with ExitStack() as stack:
            for wrapper in self.values():
                stack.enter_context(wrapper.driven_by(model))
            yield

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Enter the contexts of all wrappers, for a forward pass whose loss several of them use."""
        with ExitStack() as stack:
            for wrapper in self.values():
                stack.enter_context(wrapper.optim_context(model))
            yield

    update_params = _refused("update_params")
    scale_loss = _refused("scale_loss")
    backward = _refused("backward")
    step = _refused("step")
    should_sync = _refused("should_sync")
    should_update = _refused("should_update")

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of all."""
        for wrapper in self.values():
            wrapper.zero_grad(**kwargs)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of all."""
        return [wrapper.optimizer for wrapper in self.values()]

    @property
    def grad_norm(self) -> Tensor | None:
        """None: each wrapper has its own."""
        return None

    @property
    def inner_count(self) -> int:
        """Number of batches that the wrapper which has seen most has seen."""
        return max(wrapper.inner_count for wrapper in self.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimizers, one after the other."""
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
            KeyError: the names are not those of the wrappers.
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
