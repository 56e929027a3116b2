"""The verbs of a strategy, and the choice of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from lockstep.dist import get_dist_info, get_world_size
from lockstep.optim import OptimWrapper
from lockstep.registry import STRATEGIES

ModelState: TypeAlias = dict[str, Any]
OptimState: TypeAlias = dict[str, Any]
OptimLike: TypeAlias = OptimWrapper | Optimizer | Mapping[str, Any]


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

    @abstractmethod
    def prepare(
        self, model: nn.Module, optim_wrapper: OptimLike | None = None
    ) -> tuple[nn.Module, OptimWrapper | None]:
        """Lay `model` over the ranks, and build its optim wrapper where one is asked for.

        Args:
            model: the user's module, or one that is wrapped already, which is taken as it is.
            optim_wrapper: an optim wrapper, an optimizer, or the config of an optim wrapper; None to evaluate only.

        Returns:
            The model to train and to validate, and its optim wrapper.

        **Collective**: every rank, once.
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

    def optim_layout(self) -> Mapping[str, Any]:
        """Return tensors by parameter name that are laid out as the optimizer's state is to be read; as the model's.

        **Collective**: every rank.
        """
        return self.model_state()

    def compiled_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of a model, not prepared yet, that are compiled each by itself: the whole, in one."""
        return [model]

    @property
    def data_share(self) -> tuple[int, int]:
        """Which share of the samples this rank sees, and of how many: its rank, and the world size.

        Ranks that compute on the same samples together, as in tensor parallelism, have one share. It is known when the
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
