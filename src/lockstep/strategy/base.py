"""The verbs of a strategy, and the choice of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias, overload

from torch import nn
from torch.optim import Optimizer

from lockstep.dist import get_dist_info, get_world_size
from lockstep.errors import ConfigError
from lockstep.model import compile_in_place
from lockstep.optim import OptimWrapper, ParamScheduler, build_param_schedulers
from lockstep.registry import MODELS, STRATEGIES

ModelState: TypeAlias = dict[str, Any]
OptimState: TypeAlias = dict[str, Any]
OptimLike: TypeAlias = OptimWrapper | Optimizer | Mapping[str, Any]
Prepared: TypeAlias = tuple[nn.Module, OptimWrapper | None]


class Strategy(ABC):
    """How a model is laid over ranks.

    Backward passes and updates go through the optim wrapper that `prepare` returns. States are exchanged in one
    canonical form whatever the strategy is: parameters by their full name, without the prefixes of wrappers, and the
    optimizer's state by parameter name. A strategy writes no files, logs nothing and owns no directories.

    Attributes:
        own_optim_wrapper: what a Runner that is given no optim wrapper takes, where the strategy's own config names an
            optimizer.
        own_schedule: what changes the learning rates by itself, where the strategy's own config names a schedule.
    """

    own_optim_wrapper: Mapping[str, Any] | None = None
    own_schedule: str | None = None

    @overload
    def prepare(
        self,
        model: nn.Module | Mapping[str, Any],
        optim_wrapper: OptimLike | None = None,
        *,
        param_scheduler: None = None,
        compile: bool | Mapping[str, Any] = False,
        dispatch_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[nn.Module, OptimWrapper | None]: ...
    @overload
    def prepare(
        self,
        model: nn.Module | Mapping[str, Any],
        optim_wrapper: OptimLike,
        *,
        param_scheduler: Any,
        compile: bool | Mapping[str, Any] = False,
        dispatch_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[nn.Module, OptimWrapper, list[ParamScheduler]]: ...
    def prepare(
        self,
        model: nn.Module | Mapping[str, Any],
        optim_wrapper: OptimLike | None = None,
        *,
        param_scheduler: Any = None,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002
        dispatch_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lay `model` over the ranks, and build its optim wrapper and schedules where they are asked for.

        Args:
            model: the user's module, or the config of one; or one that is wrapped already, which is taken as it is.
            optim_wrapper: an optim wrapper, an optimizer, or the config of an optim wrapper; None to evaluate only.
            param_scheduler: schedules, as for a Runner, of a single optimizer.
            compile: compile the model, or those of its parts that the strategy names; a dict has arguments for
                `torch.compile`.
            dispatch_kwargs: `max_epochs` and `max_iters`, by which schedules without an end are closed. Other keys of
                MMEngine's do nothing.

        Returns:
            The model to train and to validate, and its optim wrapper or None; with `param_scheduler`, the list of
            schedules as well.

        **Collective**: every rank, once.

        Raises:
            ConfigError: `param_scheduler` comes without an optimizer, or with several.
        """
        built: nn.Module = MODELS.build(model) if isinstance(model, Mapping) else model
        if compile is not False:
            options = compile if isinstance(compile, Mapping) else {}
            compile_in_place(built, self.compiled_parts(built), options)
        parallelized, wrapper = self.parallelize(built, optim_wrapper)
        if param_scheduler is None:
            return parallelized, wrapper
        if wrapper is None or len(wrapper.optimizers) != 1:
            count = 0 if wrapper is None else len(wrapper.optimizers)
            raise ConfigError(
                f"`param_scheduler` must come with one optimizer, but comes with {count}. Give an `optim_wrapper`, or "
                "let a Runner build the schedules of several"
            )
        lengths = dispatch_kwargs or {}
        schedules = build_param_schedulers(
            wrapper.optimizer, param_scheduler, max_epochs=lengths.get("max_epochs"), max_iters=lengths.get("max_iters")
        )
        return parallelized, wrapper, schedules

    @abstractmethod
    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Do what `prepare` is for: a strategy's own part of it.

        Args:
            model: the user's module, or one that is wrapped already, which is taken as it is.
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
        """Return the optimizer's state in canonical form, of a model prepared with one.

        `{"state": {parameter name: {...}}, "param_groups": [{..., "params": [names]}]}`. A parameter that has no state
        yet has no entry. Nothing is changed by it, whenever it is called.

        **Collective**: every rank.
        """

    @abstractmethod
    def load_state(self, model_state: ModelState | None = None, optim_state: OptimState | None = None) -> None:
        """Take over states in canonical form; what is None stays as it is.

        **Collective**: every rank.
        """

    def optim_template(self) -> Mapping[str, Any]:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read; as the model's.

        **Collective**: every rank.
        """
        return self.model_state()

    def compiled_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of a model, not prepared yet, that are compiled each by itself: the whole, in one."""
        return [model]

    @property
    def data_shard(self) -> tuple[int, int]:
        """Which shard of the data this rank sees, and of how many: its rank, and the world size.

        Ranks that compute on the same samples together, as in tensor parallelism, see one shard. It is known when the
        model is prepared.
        """
        return get_dist_info()


def build_strategy(strategy: Strategy | Mapping[str, Any] | str | None) -> Strategy:
    """Return the strategy that is meant by an object, a config or a name.

    None means DDP where there are several ranks, else a single device.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy is None:
        strategy = "single" if get_world_size() == 1 else "ddp"
    cfg = {"type": strategy} if isinstance(strategy, str) else strategy
    built = STRATEGIES.build(cfg)
    if not isinstance(built, Strategy):
        raise TypeError(f"`strategy` must build a Strategy, but built {built!r}")
    return built
