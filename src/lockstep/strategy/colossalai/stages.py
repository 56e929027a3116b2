"""The stages of a pipeline: which parts of a model each one holds, and the conversion of their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Size, Tensor, nn
from torch.optim import Optimizer

from lockstep.dist import all_gather_object, broadcast_object
from lockstep.errors import ConfigError
from lockstep.strategy.base import ModelState, OptimState
from lockstep.strategy.colossalai.state import StateTranslator, owned_state
from lockstep.strategy.optim_state import find_strangers, named_groups
from lockstep.strategy.resharding import shard_rows, template_of_rows

T = TypeVar("T")


class Inventory(NamedTuple):
    """The tensors of a model and its optimizer, recorded before they are cut into stages.

    Attributes:
        first: for each name in the model's state, in its order, the first name of the same tensor.
        parameters: the first names of the parameters.
        groups: the first names of the parameters in each group of the optimizer.
        shapes: shapes of the tensors in the model's state, by name.
        numel: number of elements of all parameters.
    """

    first: dict[str, str]
    parameters: list[str]
    groups: list[list[str]]
    shapes: dict[str, Size]
    numel: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Inventory:
        """Return the inventory of a whole model."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tensors = owned_state(model)
        first = {name: names.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        numel = sum(parameter.numel() for parameter in model.parameters())
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return cls(first, [name for name, _ in model.named_parameters()], groups, shapes, numel)


class Stages:
    """The stages of one pipeline, as one of them sees it.

    Args:
        inventory: the inventory of the whole model.
        core: this stage's part of the model.
        group: the ranks of the pipeline, one per stage.
        replicas: the ranks that are the same stage of all pipelines.
        shared: this rank's parameters that the policy keeps equal on several stages.
        zero: whether ZeRO shards the optimizer.

    Attributes:
        stage: the number of this stage.
        last: the number of the last stage.
        here: for the first name of each tensor that this stage holds, its name on this stage.

    **Collective**: every rank.

    Raises:
        ConfigError: on every rank, if the policy has cut the model in a way that would change the training.
    """

    def __init__(
        self, inventory: Inventory, core: nn.Module, group: Any, replicas: Any, shared: list[Tensor], zero: bool
    ) -> None:
        self.inventory = inventory
        self.group = group
        self._replicas = replicas
        self.stage: int = group.rank()
        self.last: int = group.size() - 1
        self._parameters = frozenset(inventory.parameters)
        own = owned_state(core)
        shared_ids = {id(tensor) for tensor in shared}
        self.here = {inventory.first[name]: name for name in reversed(own) if name in inventory.first}
        held = {name: own[path] for name, path in self.here.items()}
        holdings = _Holdings(
            set(held),
            {name for name, tensor in held.items() if id(tensor) in shared_ids},
            {name for name, tensor in held.items() if tensor.requires_grad},
        )
        self._check(all_gather_object(holdings, group=group), zero)

    def spread(self, name: str, make: Callable[[], T]) -> T:
        """Return on every rank what `make` returns on the first stage that holds `name` (for a buffer, of replica 0).

        **Collective**: every rank.
        """
        owner = self._owners[name]
        made = make() if owner == self.stage else None
        received: T = broadcast_object(made, src=owner, group=self.group)  # type: ignore[assignment]
        # Replicas have equal parameters but different buffers; rows from several replicas would be inconsistent.
        return received if name in self._parameters else broadcast_object(received, src=0, group=self._replicas)

    def agree(self, complaint: str | None) -> None:
        """Raise the complaint of any stage on all stages.

        **Collective**: every rank of the pipeline.

        Raises:
            ConfigError: a stage has a complaint.
        """
        for found in all_gather_object(complaint, group=self.group):
            if found is not None:
                raise ConfigError(found)

    def _check(self, stages: list[_Holdings], zero: bool) -> None:
        for stage, holdings in enumerate(stages):
            if not holdings.trained:
                raise ConfigError(
                    f"each stage of a pipeline must have parameters to train, but stage {stage} of {len(stages)} has "
                    "none. Train more of the model, choose a smaller `pp_size`, or use strategy='fsdp'"
                )
        holders: dict[str, list[int]] = {}
        for name in self.inventory.first.values():
            holders[name] = [stage for stage, holdings in enumerate(stages) if name in holdings.held]
            if not holders[name]:
                raise ConfigError(
                    f"the policy must give each parameter to a stage of the pipeline, but gives {name!r} to none. "
                    "Return its module in `get_held_layers`, or use strategy='fsdp'"
                )
        if zero:
            _check_groups(self.inventory.groups, stages)
        self._owners = {name: held[0] for name, held in holders.items()}
        for name in self.inventory.parameters:
            _check_sharing(name, holders[name], stages)


class PipelineStateTranslator(StateTranslator):
    """Translates the states of a model whose layers are divided among the stages of a pipeline.

    A tied parameter has one entry in the optimizer's state, under its first name, as in one process.

    Args:
        core: this stage's part of the user's own module.
        engine: ColossalAI's optimizer.
        tp_group: the ranks that share a stage.
        stages: the stages of the pipeline.

    **Cost**: for `model_state` and `optim_state`, one broadcast of each parameter or of its state, in addition to what
    `StateTranslator` gathers. Every rank keeps its rows of each tensor in CPU memory.
    """

    def __init__(self, core: nn.Module, engine: Any, tp_group: Any, stages: Stages) -> None:
        super().__init__(core, engine, tp_group)
        self._stages = stages

    def model_state(self) -> ModelState:
        """Return the model's state, in the precision in which it is trained. **Collective**: every rank."""
        own = self._own_state()
        kept: dict[str, Any] = {}
        for name in dict.fromkeys(self._stages.inventory.first.values()):
            here = own.get(self._stages.here.get(name, ""))
            kept[name] = _own_part(self._stages.spread(name, partial(self._canonical, here)))
        return {name: kept[first] for name, first in self._stages.inventory.first.items()}

    def load_model(self, state: ModelState) -> None:
        """Load a model's state. **Collective**: every rank, if there are DTensors in it.

        Raises:
            ConfigError: the state belongs to another model.
        """
        for name, shape in self._stages.inventory.shapes.items():
            if name in state and state[name].shape != shape:
                raise ConfigError(
                    f"`{name}` must have the shape of the model's, but has {tuple(state[name].shape)} in the state. "
                    "Load the state of this model"
                )
        super().load_model(state)

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by parameter name. **Collective**: every rank.

        A parameter that has had no update has no entry.
        """
        named = self._trained()
        state = {}
        for name in self._names_to_load(named):
            # ZeRO leaves out frozen parameters that the optimizer had.
            make: Callable[[], dict[str, Any]] = partial(self._entry, *named[name]) if name in named else dict
            entry = self._stages.spread(name, make)
            if entry:
                state[name] = {key: _own_part(value) for key, value in entry.items()}
        return {"state": state, "param_groups": self._groups()}

    def optim_template(self) -> ModelState:
        """Return tensors by name, sharded as the optimizer's state is to be read."""
        return {name: template_of_rows(shape) for name, shape in self._stages.inventory.shapes.items()}

    def _own_state(self) -> dict[str, Any]:
        return owned_state(self._core)

    def _state_names(self, present: Mapping[str, Any]) -> set[str]:
        return set(self._stages.inventory.first)

    def _names_to_load(self, own: Iterable[str]) -> Iterable[str]:
        names = {name for group in self._stages.inventory.groups for name in group}
        return [name for name in self._stages.inventory.parameters if name in names]

    def _groups(self) -> list[dict[str, Any]]:
        return named_groups(self._optimizer.param_groups, self._stages.inventory.groups)

    def _find_strangers(self, state: OptimState) -> str | None:
        # Other stages check their own parameters.
        own = {self._stages.inventory.first[name]: param for name, param in self._core.named_parameters()}
        return find_strangers(own, self._stages.inventory.groups, state, self._stages.inventory.parameters)

    def _refuse(self, complaint: str | None) -> None:
        self._stages.agree(complaint)

    def _trained(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {self._stages.inventory.first[name]: pair for name, pair in super()._trained().items()}

    def _entry(self, param: Tensor, trained: Tensor) -> dict[str, Any]:
        return super()._entry(param, trained) if self._optimizer.state.get(trained) else {}

    def _portion(self, whole: Tensor) -> Tensor:
        return whole  # until every stage has it


class _Holdings(NamedTuple):
    """First names of the tensors that a stage holds, shares with other stages and trains."""

    held: set[str]
    shared: set[str]
    trained: set[str]


def _check_groups(groups: list[list[str]], stages: list[_Holdings]) -> None:
    """Refuse a group that is not on every stage: ZeRO sums its norm over all, and stages without it do not join."""
    for index, names in enumerate(groups):
        lacking = [stage for stage, holdings in enumerate(stages) if holdings.trained.isdisjoint(names)]
        if 0 < len(lacking) < len(stages):
            raise ConfigError(
                f"each group of the optimizer must have parameters on each stage of a pipeline with zero_stage=1, but "
                f"group {index} has none on stage {lacking[0]}. Use zero_stage=0, or fewer groups"
            )


def _check_sharing(name: str, holders: list[int], stages: list[_Holdings]) -> None:
    """Refuse a parameter on several stages if its gradients would not be summed correctly."""
    if len(holders) == 1:
        return
    if not all(name in stages[stage].shared for stage in holders):
        raise ConfigError(
            f"a parameter on several stages of a pipeline must be among the policy's `get_shared_params`, but {name!r} "
            f"is on stages {holders} and is not. Name it there, untie it, or use strategy='fsdp'"
        )
    if not all(name in stages[stage].trained for stage in holders):
        raise ConfigError(
            f"a parameter that stages of a pipeline share must be trained, because ColossalAI 0.5.0 adds up its "
            f"gradients in any case, but {name!r} is frozen. Untie it, or use strategy='fsdp'"
        )


def _own_part(value: Any) -> Any:
    return shard_rows(value) if isinstance(value, Tensor) else value
