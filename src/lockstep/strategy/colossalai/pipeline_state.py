"""From the stages of a pipeline to the state of the whole model, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.strategy.base import ModelState, OptimState
from lockstep.strategy.colossalai.stages import Stages, owned_state
from lockstep.strategy.colossalai.state import StateTranslator
from lockstep.strategy.layout import layout_of_rows, own_rows
from lockstep.strategy.optim_state import find_strangers, options_of


class PipelineStateTranslator(StateTranslator):
    """Translates the states of a model of which each stage of a pipeline holds some layers.

    What is tied has one entry in the optimizer's state, under its first name, as in one process.

    Args:
        core: what is left here of the user's own module.
        engine: ColossalAI's optimizer.
        tp_group: the ranks that share a stage.
        stages: of the pipeline.

    **Cost**: of `model_state` and `optim_state`: one broadcast per parameter, of it and of its state, after what
    `StateTranslator` gathers. Of each tensor every rank keeps its rows in CPU memory.
    """

    def __init__(self, core: nn.Module, engine: Any, tp_group: Any, stages: Stages) -> None:
        super().__init__(core, engine, tp_group)
        self._stages = stages

    def model_state(self) -> ModelState:
        """Return the model's state, in the precision in which it is trained. **Collective**: every rank."""
        own = self._own_state()
        kept: dict[str, Any] = {}
        for name in dict.fromkeys(self._stages.inventory.first.values()):
            here = own.get(self._stages.name_here(name) or "")
            kept[name] = _own_part(self._stages.spread(name, partial(self._canonical, here)))
        return {name: kept[first] for name, first in self._stages.inventory.first.items()}

    def load_model(self, state: ModelState) -> None:
        """Take over a model's state. **Collective**: every rank, if there are DTensors in it.

        Raises:
            ConfigError: it is that of another model.
        """
        for name, shape in self._stages.inventory.shapes.items():
            if name in state and state[name].shape != shape:
                raise ConfigError(f"`{name}` has not the shape that is to be loaded, {tuple(state[name].shape)}")
        super().load_model(state)

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by parameter name. **Collective**: every rank.

        A parameter that has had no update has no entry.
        """
        named = self._trained()
        state = {}
        for name in self._names_to_load(named):
            # ZeRO leaves frozen parameters out, which the optimizer had.
            make: Callable[[], dict[str, Any]] = partial(self._entry, *named[name]) if name in named else dict
            entry = self._stages.spread(name, make)
            if entry:
                state[name] = {key: _own_part(value) for key, value in entry.items()}
        return {"state": state, "param_groups": self._groups()}

    def optim_layout(self) -> ModelState:
        """Return tensors by name laid out as the optimizer's state is to be read."""
        return {name: layout_of_rows(shape) for name, shape in self._stages.inventory.shapes.items()}

    def _own_state(self) -> dict[str, Any]:
        return owned_state(self._core)

    def _state_names(self, present: Mapping[str, Any]) -> set[str]:
        return set(self._stages.inventory.first)

    def _names_to_load(self, own: Iterable[str]) -> Iterable[str]:
        names = {name for group in self._stages.inventory.groups for name in group}
        return [name for name in self._stages.inventory.parameters if name in names]

    def _groups(self) -> list[dict[str, Any]]:
        groups = zip(self._optimizer.param_groups, self._stages.inventory.groups, strict=True)
        return [{**options_of(group), "params": list(names)} for group, names in groups]

    def _find_strangers(self, state: OptimState) -> str | None:
        # Of the parameters on other stages those will complain.
        own = {self._stages.first_name(name): param for name, param in self._core.named_parameters()}
        return find_strangers(own, self._stages.inventory.groups, state, self._stages.inventory.parameters)

    def _refuse(self, complaint: str | None) -> None:
        self._stages.agree(complaint)

    def _trained(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {self._stages.first_name(name): pair for name, pair in super()._trained().items()}

    def _entry(self, param: Tensor, trained: Tensor) -> dict[str, Any]:
        return super()._entry(param, trained) if self._optimizer.state.get(trained) else {}

    def _portion(self, whole: Tensor) -> Tensor:
        return whole  # until every stage has it


def _own_part(value: Any) -> Any:
    return own_rows(value) if isinstance(value, Tensor) else value
