"""Which stage of a pipeline holds what of a model, by the names that the whole model has for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Size, Tensor, nn
from torch.optim import Optimizer

from lockstep.dist import all_gather_object, broadcast_object
from lockstep.errors import ConfigError

T = TypeVar("T")


class Inventory(NamedTuple):
    """What a model and its optimizer consist of, noted before they are cut into stages.

    Attributes:
        first: by the names in the model's state, in its order: the first name of the same tensor.
        parameters: the first names of the parameters.
        groups: the first names of the parameters in each group of the optimizer.
        shapes: of the tensors in the model's state.
        numel: number of elements of all parameters.
    """

    first: dict[str, str]
    parameters: list[str]
    groups: list[list[str]]
    shapes: dict[str, Size]
    numel: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Inventory:
        """Take the inventory of a model that is whole."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tensors = owned_state(model)
        first = {name: names.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        numel = sum(parameter.numel() for parameter in model.parameters())
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return cls(first, [name for name, _ in model.named_parameters()], groups, shapes, numel)


class Stages:
    """The stages of one pipeline, seen from one of them.

    Args:
        inventory: of the whole model.
        core: what is left of it here.
        group: the ranks of the pipeline, one per stage.
        replicas: the ranks that are the same stage of all pipelines.
        shared: this rank's parameters that the policy keeps equal on several stages.
        zero: whether ZeRO shards the optimizer.

    **Collective**: every rank.

    Raises:
        ConfigError: on every rank, if the policy has cut the model in a way that would train something else.
    """

    def __init__(
        self,
        inventory: Inventory,
        core: nn.Module,
        group: Any,
        replicas: Any,
        shared: list[Tensor],
        *,
        zero: bool = False,
    ) -> None:
        self.inventory = inventory
        self.group = group
        self._replicas = replicas
        self.stage: int = group.rank()
        self._parameters = frozenset(inventory.parameters)
        own = owned_state(core)
        for parameter in core.parameters():
            parameter.pipeline_stage = self.stage  # type: ignore[attr-defined]  # who averages weights looks for it
        shared_ids = {id(tensor) for tensor in shared}
        self._here = {inventory.first[name]: name for name in reversed(own) if name in inventory.first}
        holdings = _Holdings(
            list(self._here),
            [name for name, path in self._here.items() if id(own[path]) in shared_ids],
            [name for name, path in self._here.items() if own[path].requires_grad],
        )
        self._check(all_gather_object(holdings, group=group), zero)

    def name_here(self, name: str) -> str | None:
        """Return the name that something has on this stage, by its first name; None where it is on others."""
        return self._here.get(name)

    def first_name(self, name: str) -> str:
        """Return the first name of something that has another one here."""
        return self.inventory.first[name]

    def spread(self, name: str, make: Callable[[], T]) -> T:
        """Return what the first stage that holds something makes of it; of a buffer that of the first replica.

        **Collective**: every rank.
        """
        owner = self._owners[name]
        made = make() if owner == self.stage else None
        received: T = broadcast_object(made, src=owner, group=self.group)  # type: ignore[assignment]
        # Parameters of replicas are equal, but their buffers are their own, and rows of several would make a mixture.
        return received if name in self._parameters else broadcast_object(received, src=0, group=self._replicas)

    def agree(self, complaint: str | None) -> None:
        """Raise a stage's complaint on all of them.

        **Collective**: every rank of the pipeline.

        Raises:
            ConfigError: one of them has one.
        """
        for found in all_gather_object(complaint, group=self.group):
            if found is not None:
                raise ConfigError(found)

    def _check(self, stages: list[_Holdings], zero: bool) -> None:
        holders: dict[str, list[int]] = {}
        for stage, holdings in enumerate(stages):
            for name in holdings.held:
                holders.setdefault(name, []).append(stage)
            if not holdings.trained:
                raise ConfigError(
                    f"each stage of a pipeline must have parameters to train, but stage {stage} of {len(stages)} has "
                    "none. Train more of the model, choose a smaller `pp_size`, or use strategy='fsdp'"
                )
        missing = [name for name in self.inventory.first.values() if name not in holders]
        if missing:
            raise ConfigError(
                f"the policy must give each parameter to a stage of the pipeline, but gives {missing[0]!r} to none. "
                "Return its module in `get_held_layers`, or use strategy='fsdp'"
            )
        if zero:
            _check_groups(self.inventory.groups, stages)
        self._owners = {name: held[0] for name, held in holders.items()}
        for name in self.inventory.parameters:
            _check_sharing(name, holders[name], stages)


class _Holdings(NamedTuple):
    """First names of what a stage holds, shares with others and trains."""

    held: list[str]
    shared: list[str]
    trained: list[str]


def owned_state(core: nn.Module) -> dict[str, Any]:
    """Return the parameters and persistent buffers of a model as they are held here, by name."""
    # Not by `state_dict`, in which parallel layers would gather their parameters, all at once.
    state: dict[str, Any] = {}
    for path, module in core.named_modules(remove_duplicate=False):
        buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        owned: Mapping[str, Any] = {**module._parameters, **buffers}
        state |= {f"{path}.{name}".lstrip("."): value for name, value in owned.items() if value is not None}
    return state


def _check_groups(groups: list[list[str]], stages: list[_Holdings]) -> None:
    """Refuse a group that is not on every stage: ZeRO adds up its norm over all, and those without do not take part."""
    for index, names in enumerate(groups):
        lacking = [stage for stage, holdings in enumerate(stages) if not set(names) & set(holdings.trained)]
        if 0 < len(lacking) < len(stages):
            raise ConfigError(
                f"each group of the optimizer must have parameters on each stage of a pipeline with zero_stage=1, but "
                f"group {index} has none on stage {lacking[0]}. Use zero_stage=0, or fewer groups"
            )


def _check_sharing(name: str, holders: list[int], stages: list[_Holdings]) -> None:
    """Refuse a parameter of several stages whose gradients would not be added up."""
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
