"""Several optimizers: of losses of their own (`OptimWrapperDict`), or of one loss (`JoinedOptimizer`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError, did_you_mean, wrong_type
from lockstep.model.wrapper import all_entered
from lockstep.optim.wrapper import OptimWrapper
from lockstep.registry import OPTIM_WRAPPERS

_PART = "part"  # in each parameter group: the place of the optimizer that updates it


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


class JoinedOptimizer(Optimizer):
    """One optimizer made of several, as of Muon for matrices and AdamW for all else.

    It has their parameter groups, in their order, and their states, so that it is clipped, scaled, sharded, saved and
    resumed as one. A schedule over one of them, made before or after, changes the rates of that one's groups.

    Args:
        optimizers: which have no parameter in common. They are used up: from now on, step this one.

    Attributes:
        parts: the optimizers.

    Raises:
        TypeError: something else than an optimizer is given.
        ConfigError: none is given, or one that needs a closure or has `train` and `eval`, as schedule-free ones have.
        ValueError: a parameter is in two of them.

    Example:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4, bias=False))
        >>> muon = torch.optim.Muon(model[1].parameters(), lr=0.02)
        >>> optimizer = JoinedOptimizer([muon, torch.optim.AdamW(model[0].parameters(), lr=1e-3)])
        >>> model(torch.arange(8)).square().mean().backward()
        >>> optimizer.step()
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.001]
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise ConfigError("`optimizer` must be an optimizer or a list of some, but is an empty list")
        for one in optimizers:
            if isinstance(one, Mapping):
                raise ConfigError(
                    f"`optimizer` must be a list of optimizers, not of configs, which do not say whose parameters are "
                    f"whose, but has {one!r}. Make the optimizers in Python"
                )
            if not isinstance(one, Optimizer):
                raise wrong_type("optimizer", "a torch.optim.Optimizer or a list of some", one)
            closure = inspect.signature(type(one).step).parameters.get("closure")
            if (closure is not None and closure.default is closure.empty) or callable(getattr(one, "train", None)):
                raise ConfigError(
                    f"`optimizer` must be a list of optimizers whose `step()` is all that they need, but has a "
                    f"{type(one).__name__}. Hand it in alone, or name each after the part of the model that a loss of "
                    "its own updates"
                )
        self.parts = tuple(optimizers)
        self._places: list[int] = []  # of each group's part
        for place, part in enumerate(self.parts):
            for group in part.param_groups:
                group[_PART] = place
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its key `part` says by which optimizer it is updated, by default the first."""
        place = param_group.setdefault(_PART, 0)
        self._places.append(place)
        for name, value in self.parts[place].defaults.items():
            param_group.setdefault(name, value)
        super().add_param_group(param_group)

    def _share(self) -> None:
        """Let the parts work on the groups and states that this optimizer has now, which loading replaces."""
        if len(self._places) == len(self.param_groups):  # the order of the parts may be another one in a checkpoint
            for group, place in zip(self.param_groups, self._places, strict=True):
                group[_PART] = place
        for place, part in enumerate(self.parts):
            part.param_groups = [group for group in self.param_groups if group[_PART] == place]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        own = {"parts": self.parts, "_places": self._places}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each part update its groups; return what `closure` has returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        for part in self.parts:
            part.step()
        return loss


def with_joined(cfg: Any) -> Any:
    """Return what describes optim wrappers, with one optimizer in the place of each list of some."""
    if isinstance(cfg, list | tuple):
        return JoinedOptimizer(cfg)
    if not isinstance(cfg, Mapping):
        return cfg
    return {
        name: with_joined(value) if isinstance(value, Mapping) or _is_of_optimizers(name, value) else value
        for name, value in cfg.items()
    }


def _is_of_optimizers(name: str, value: Any) -> bool:
    return isinstance(value, list | tuple) and (name == "optimizer" or any(isinstance(one, Optimizer) for one in value))
