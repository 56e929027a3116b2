"""The interface of strategies, and the function that builds one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, TypeAlias
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.optim import Optimizer

from lockstep.dist import get_dist_info, get_world_size
from lockstep.errors import ConfigError, wrong_type
from lockstep.groups import this_rank
from lockstep.model import compile_in_place, is_model_wrapper
from lockstep.model.parts import leave_out_cache
from lockstep.optim import OptimWrapper
from lockstep.optim.several import with_joined
from lockstep.registry import CONVERTERS, MODELS, STRATEGIES
from lockstep.watch.failures import backend_errors_translated

ModelState: TypeAlias = dict[str, Any]
OptimState: TypeAlias = dict[str, Any]
OptimLike: TypeAlias = OptimWrapper | Optimizer | Sequence[Optimizer] | Mapping[str, Any]
Converter: TypeAlias = Callable[[nn.Module], nn.Module]
Prepared: TypeAlias = tuple[nn.Module, OptimWrapper | None]

_logger = logging.getLogger(__name__)
# Of a model, and of what became of it: what has converted it, and into what.
_CONVERSIONS: WeakKeyDictionary[nn.Module, tuple[tuple[Converter, ...], ref[nn.Module]]] = WeakKeyDictionary()


class Strategy(ABC):
    """How a model is distributed over ranks; base class of all strategies.

    Backward passes and updates go through the optim wrapper that `prepare` returns. All strategies exchange states in
    one canonical form: parameters by their full name, without the prefixes of wrappers, and the optimizer's state by
    parameter name. A strategy writes no files and owns no directories.

    Attributes:
        converters: functions that are called with the model, one after the other, before it is compiled and
            distributed; each changes it in place, or returns another one.
        package: the package that it needs besides torch; None if there is none.
        keeps_memory_format: whether weights may be in `torch.channels_last`; shards and flat buffers are contiguous.
    """

    converters: Sequence[Converter] = ()
    package: ClassVar[str | None] = None
    keeps_memory_format: ClassVar[bool] = False

    def prepare(
        self,
        model: nn.Module | Mapping[str, Any],
        optim_wrapper: OptimLike | None = None,
        *,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002
    ) -> Prepared:
        """Convert, compile and distribute `model`, and build its optim wrapper if one is given.

        Args:
            model: the user's module, or the config of one; a module that is already wrapped is used unchanged.
            optim_wrapper: an optim wrapper, an optimizer, a list of some that are joined (`JoinedOptimizer`), or the
                config of an optim wrapper; None to evaluate only.
            compile: compile the model, or the parts of it that the strategy names; a dict gives arguments for
                `torch.compile`.

        Returns:
            The model to train and to validate, and its optim wrapper or None.

        **Collective**: every rank, once.
        """
        built: nn.Module = MODELS.build(model) if isinstance(model, Mapping) else model
        built = self.convert(built)
        leave_out_cache(built, of_packed=True)
        if compile is not False:
            options = compile if isinstance(compile, Mapping) else {}
            compile_in_place(built, self.compiled_parts(built), options)
        with backend_errors_translated():
            parallelized, wrapper = self.parallelize(built, with_joined(optim_wrapper))
        if wrapper is not None:
            wrapper.bind(parallelized)
        return parallelized, wrapper

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model after all `converters`: the part of `prepare` that comes first.

        A model that is wrapped is returned unchanged. Of one that was converted before, also by another strategy, the
        result is, and those converters that have done it are not called again.
        """
        if not self.converters or is_model_wrapper(model):
            return model
        done, result = _CONVERSIONS.get(model, ((), ref(model)))
        if (converted := result()) is None:  # nobody has it any more
            done, converted = (), model
        new = [converter for converter in self.converters if converter not in done]
        for converter in new:
            if done:
                _logger.warning(
                    "%s has been converted by %s before, and is converted by %r as well (%s). If that is the same "
                    "again, hand in the same function both times, or leave it out of `converters`",
                    type(model).__name__, list(done), converter, this_rank(),
                )  # fmt: skip
            returned = converter(converted)
            converted = converted if returned is None else returned  # one that changes it in place may return nothing
        _CONVERSIONS[model] = _CONVERSIONS[converted] = ((*done, *new), ref(converted))
        return converted

    @abstractmethod
    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Distribute `model` and build its optim wrapper: the part of `prepare` that a subclass implements.

        Args:
            model: the user's module; a module that is already wrapped is used unchanged.
            optim_wrapper: an optim wrapper, an optimizer, or the config of an optim wrapper; None to evaluate only.

        Returns:
            The model to train and to validate, and its optim wrapper.
        """

    @abstractmethod
    def model_state(self) -> ModelState:
        """Return the model's state in canonical form.

        **Collective**: every rank.
        """

    @abstractmethod
    def optim_state(self) -> OptimState:
        """Return the optimizer's state in canonical form; the model must be prepared with an optimizer.

        `{"state": {parameter name: {...}}, "param_groups": [{..., "params": [names]}]}`. A parameter that has no state
        yet has no entry. The call changes nothing and may be made at any time.

        **Collective**: every rank.
        """

    @abstractmethod
    def load_state(self, model_state: ModelState | None = None, optim_state: OptimState | None = None) -> None:
        """Load states in canonical form; a state that is None is not changed.

        **Collective**: every rank.
        """

    def optim_template(self) -> Mapping[str, Any]:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read: here the model's.

        **Collective**: every rank.
        """
        return self.model_state()

    def compiled_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of a model, not prepared yet, that are compiled separately: here the whole model."""
        return [model]

    @property
    def data_shard(self) -> tuple[int, int]:
        """This rank's shard of the data and the number of shards: here its rank and the world size.

        Ranks that compute on the same samples together, as in tensor parallelism, share one shard. It is known once the
        model is prepared.
        """
        return get_dist_info()


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model whose parameters and buffers have no values yet.

    Raises:
        ConfigError: one is on the meta device.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"`{name}` must have values, but is on the meta device ({this_rank()}). Use strategy 'fsdp', which "
                "materializes such a model part by part, or make it on a device"
            )


def build_strategy(strategy: Strategy | Mapping[str, Any] | str | None) -> Strategy:
    """Return the strategy that an object, a config or a name describes.

    None means DDP on several ranks, else a single device. A config may have a key `converters`: a list of functions,
    names in `CONVERTERS`, or dicts with such a `type` and its options; see `Strategy.converters`.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy is None:
        strategy = "single" if get_world_size() == 1 else "ddp"
    if not isinstance(strategy, str | Mapping):
        raise wrong_type("strategy", "a Strategy, a name or a config dict", strategy)
    cfg = {"type": strategy} if isinstance(strategy, str) else dict(strategy)
    converters = cfg.pop("converters", ())
    if "compile" in cfg:
        raise ConfigError("`compile` must be an argument of the Runner or the Session, but is one of the strategy")
    built = STRATEGIES.build(cfg)
    if not isinstance(built, Strategy):
        raise TypeError(f"`strategy` must build a Strategy, but built {built!r}")
    if converters:
        built.converters = _build_converters(converters)
    return built


def _build_converters(converters: Any) -> list[Converter]:
    if not isinstance(converters, list | tuple):
        raise wrong_type("converters", "a list of converters", converters)
    built: list[Converter] = []
    for converter in converters:
        given = {"type": converter} if isinstance(converter, str) else converter
        made = CONVERTERS.build(given) if isinstance(given, Mapping) else given
        if not callable(made):
            raise wrong_type("converters", "a list of functions of a model, names or config dicts", converters)
        built.append(_FromConfig(dict(given), made) if isinstance(given, Mapping) else made)
    return built


@dataclass(frozen=True)
class _FromConfig:
    """A converter that a config describes; equal to another one of the same config."""

    given: Mapping[str, Any]
    converter: Converter = field(compare=False, repr=False)

    def __call__(self, model: nn.Module) -> nn.Module:
        return self.converter(model)
