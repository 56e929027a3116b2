"""Averages of a model's weights over training, which often predict better than the weights of any single step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from lockstep.errors import require_count
from lockstep.model.shards import is_dtensor, own_shard
from lockstep.model.wrapper import unwrap_model
from lockstep.registry import MODELS

_logger = logging.getLogger(__name__)

_Pairs = list[tuple[Tensor, Tensor]]
"""Tensors of an averaged model, each with its counterpart in the model that is averaged."""


class BaseAveragedModel(nn.Module, ABC):
    """A copy of a model whose weights are an average over the model's training; base class.

    A subclass defines in `avg_func` how one more set of weights enters the average. If the replicas of a model are
    equal on all ranks, so are their averages; nothing is sent.

    Args:
        model: the model whose weights are averaged. The copy is `.module`; nothing in it is trained. If FSDP shards the
            model, each rank averages its shards; such a copy can't be called.
        interval: the average is updated in every `interval`-th call of `update_parameters`, beginning with the first.
        device: the device of the average; by default that of the model.
        update_buffers: also average floating-point buffers, such as the running statistics of BatchNorm; otherwise they
            are copied from the model at each update.

    Attributes:
        steps: number of calls of `update_parameters`; a buffer that stays on the CPU, where it can be read without
            waiting.
    """

    steps: Tensor

    def __init__(
        self,
        model: nn.Module,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__()
        require_count("interval", interval)
        if is_sharded(model) and device is not None:
            raise ValueError(f"`device` must be None for a sharded model, whose shards stay in place, but is {device}")
        copy = ShardedCopy(model) if is_sharded(model) else deepcopy(model, _computed(model))
        self.module = copy.requires_grad_(False)
        if device is not None:
            self.module.to(device)
        self.interval = interval
        self.update_buffers = update_buffers
        self.register_buffer("steps", torch.tensor(0, dtype=torch.int64, device="cpu"))

    @property
    def avg_parameters(self) -> dict[str, Tensor]:
        """What is averaged, by name, for a subclass with its own `update_parameters`.

        It is the parameters of the copy; with `update_buffers`, all of its state, integers included.
        """
        return self.module.state_dict() if self.update_buffers else dict(self.module.named_parameters())

    @abstractmethod
    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: Tensor) -> None:
        """Update the average of one tensor, in place.

        Args:
            averaged_param: the average so far.
            source_param: the model's present value, on the device and in the dtype of the average.
            steps: number of calls of `update_parameters` before this one.
        """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the copy."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the present weights of `model`. The first call copies them.

        Args:
            model: the model that is averaged, wrapped or not.

        **Cost**: one pass over the weights, in a few kernels for many of them together. Where the average has another
        dtype, one weight after the other is copied; where it has another device, all are, and an accelerator is waited
        for once.

        Raises:
            ValueError: `model` has weights of other shapes than the copy.
        """
        steps = int(self.steps)
        if steps % self.interval == 0:
            averaged, copied = self._pairs_with(model)
            for own, theirs in _alike(averaged) if steps else ():
                self._average(own, theirs, steps)
            for own, theirs in _alike(copied if steps else averaged + copied):
                torch._foreach_copy_(own, theirs)  # as for `_foreach_lerp_`
        self.steps += 1

    def _pairs_with(self, model: nn.Module) -> tuple[_Pairs, _Pairs]:
        """Return the tensors that are averaged and those that are copied, here and in `model`."""
        parameters, buffers = _tensors_of(self.module)
        their_parameters, their_buffers = _tensors_of(model)
        if len(their_buffers) > len(buffers):  # a forward pass has registered some since, such as masks
            theirs_by_name = dict(unwrap_model(model).named_buffers())
            names = [name for name, _ in self.module.named_buffers()]
            their_buffers = [own_shard(theirs_by_name[name]) for name in names if name in theirs_by_name]
        is_same = [x.shape for x in parameters] == [x.shape for x in their_parameters]
        if not is_same or len(buffers) != len(their_buffers):
            raise ValueError(
                f"`model` must be the {type(self.module).__name__} that is averaged, with {len(parameters)} "
                f"parameters of its shapes and {len(buffers)} buffers, but is a {type(model).__name__} with "
                f"{len(their_parameters)} and {len(their_buffers)}"
            )
        averaged, copied = _Pairs(), _Pairs()
        for pair in zip(parameters, their_parameters, strict=True):
            is_number = pair[0].is_floating_point() or pair[0].is_complex()  # not so quantized weights
            (averaged if is_number else copied).append(pair)
        for own, theirs in zip(buffers, their_buffers, strict=True):
            is_alike = own.shape == theirs.shape
            if not is_alike:  # a table that the model extends for longer inputs
                own.resize_(theirs.shape)
            (averaged if is_alike and self.update_buffers and own.is_floating_point() else copied).append((own, theirs))
        return averaged, copied

    def _average(self, averaged: list[Tensor], source: list[Tensor], steps: int) -> None:
        for averaged_param, source_param in zip(averaged, source, strict=True):
            self.avg_func(averaged_param, source_param, self.steps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        steps = self.steps
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.steps = steps
        return self


class _InterpolatedModel(BaseAveragedModel):
    """An average that moves towards the model by a fraction of their distance, the same for all weights."""

    @abstractmethod
    def lerp_weight(self, steps: int) -> float:
        """Return that fraction, given the number of earlier calls of `update_parameters`."""

    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: Tensor) -> None:
        """Move one tensor of the average towards the model."""
        averaged_param.lerp_(source_param, self.lerp_weight(int(steps)))

    def _average(self, averaged: list[Tensor], source: list[Tensor], steps: int) -> None:
        if type(self).avg_func is not _InterpolatedModel.avg_func:  # a subclass has its own rule
            super()._average(averaged, source, steps)
        else:
            # A kernel for many tensors, which torch has under no public name (2.13).
            torch._foreach_lerp_(averaged, source, self.lerp_weight(steps))


@MODELS.register_module()
class StochasticWeightAverage(_InterpolatedModel):
    """The plain mean of the weights at all updates.

    Args: those of `BaseAveragedModel`.

    **Source**: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization (2018).
    """

    def lerp_weight(self, steps: int) -> float:
        """Return 1 divided by the number of updates, including this one."""
        return 1 / (steps // self.interval + 1)


@MODELS.register_module()
class ExponentialMovingAverage(_InterpolatedModel):
    """An exponential moving average: `average = (1 - momentum) * average + momentum * weights`.

    In bfloat16 and float16 a small momentum is lost to rounding; then keep the average in float32 (`ema.float()`).

    Args:
        model: the model whose weights are averaged.
        momentum: the weight of the present values, above 0 and below 1. Other libraries call this 1 - decay.
        interval: the average is updated in every `interval`-th call of `update_parameters`, beginning with the first.
        device: the device of the average; by default that of the model.
        update_buffers: also average floating-point buffers.

    Example:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> ema = ExponentialMovingAverage(net, momentum=0.25)
        >>> for value in (0.0, 4.0, 4.0):
        ...     _ = nn.init.constant_(net.weight, value)
        ...     ema.update_parameters(net)
        >>> ema.module.weight.item()
        1.75
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__(model, interval, device, update_buffers)
        if not 0.0 < momentum < 1.0:
            raise ValueError(f"`momentum` must be above 0 and below 1, but is {momentum!r}")
        if momentum > 0.5:
            _logger.warning(
                "`momentum` is %g, so that the present weights count more than the average of all former ones; "
                "where a decay of %g was meant, it is %g",
                momentum, momentum, 1 - momentum,
            )  # fmt: skip
        self.momentum = momentum

    def lerp_weight(self, steps: int) -> float:
        """Return the momentum."""
        return self.momentum


@MODELS.register_module()
class MomentumAnnealingEMA(ExponentialMovingAverage):
    """An `ExponentialMovingAverage` whose momentum falls from 1 to its value, as `gamma / (gamma + steps)` does.

    The poor weights of early training are thus forgotten soon.

    Args:
        model: the model whose weights are averaged.
        momentum: the final momentum.
        gamma: how slowly the momentum falls: after `gamma` steps it is one half.
        interval: the average is updated in every `interval`-th call of `update_parameters`, beginning with the first.
        device: the device of the average; by default that of the model.
        update_buffers: also average floating-point buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        gamma: int = 100,
        interval: int = 1,
        device: torch.device | str | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__(model, momentum, interval, device, update_buffers)
        if gamma <= 0:
            raise ValueError(f"`gamma` must be above 0, but is {gamma!r}")
        self.gamma = gamma

    def lerp_weight(self, steps: int) -> float:
        """Return the momentum of this step."""
        return max(self.momentum, self.gamma / (self.gamma + steps))


class ShardedCopy(nn.Module):
    """A copy of a sharded model's parameters and buffers, under the same names, but without its code.

    FSDP refuses to copy a module, because it ties the module's code to its communication; the tensors can be copied.

    Args:
        model: the model; its parameters must be sharded, as they are between a backward and the next forward pass.
    """

    def __init__(self, model: nn.Module, _copies: dict[int, Any] | None = None) -> None:
        super().__init__()
        copies = {} if _copies is None else _copies  # what the model shares, the copy shares
        for name, parameter in model.named_parameters(recurse=False, remove_duplicate=False):
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            self.register_parameter(name, copies.setdefault(id(parameter), copy))
        for name, buffer in model.named_buffers(recurse=False, remove_duplicate=False):
            # No public function tells (2.13), nor lists a child under each of its names.
            is_persistent = name not in model._non_persistent_buffers_set
            self.register_buffer(name, copies.setdefault(id(buffer), buffer.clone()), is_persistent)
        for name, child in model._modules.items():
            if child is not None:
                if id(child) not in copies:
                    copies[id(child)] = ShardedCopy(child, copies)
                self.add_module(name, copies[id(child)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, because there is no code to call.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "the copy of a sharded model can't be called. Copy its parameters into the model, as EMAHook does for "
            "validation, or load them from a checkpoint"
        )


def is_sharded(model: nn.Module) -> bool:
    """Return whether this rank holds only a part of some parameter."""
    return any(map(is_dtensor, model.parameters()))


def _computed(model: nn.Module) -> dict[int, Any]:
    """Return copies of tensors in attributes that were computed from parameters, by id, which deepcopy refuses to copy.

    `torch.nn.utils.weight_norm` keeps such a tensor from each forward pass until the next one.
    """
    values = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return {id(value): value.detach().clone() for value in values if not value.is_leaf}


def _tensors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters and buffers of a model, each once; of a DTensor, this rank's shard."""
    return list(map(own_shard, model.parameters())), list(map(own_shard, model.buffers()))


def _alike(pairs: _Pairs) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield tensors, and their counterparts in the same dtype on the same device.

    They come together, but one by one where a copy in another dtype is made on the device. Those that go from an
    accelerator to the CPU are under way together, and waited for once.
    """
    together, sources = _Pairs(), set()
    for own, theirs in pairs:
        if own.device != theirs.device:
            sources.add(theirs.device)
            theirs = theirs.to(own.dtype).to(own.device, non_blocking=True)
        if own.dtype == theirs.dtype:
            together.append((own, theirs))
        else:
            yield [own], [theirs.to(own.dtype)]
    for device in sources - {torch.device("cpu")}:
        torch.accelerator.current_stream(device).synchronize()
    if together:
        yield [own for own, _ in together], [theirs for _, theirs in together]
