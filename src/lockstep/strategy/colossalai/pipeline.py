"""A pipeline: one replica in stages, which process the micro-batches of a batch one after another; and its states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Size, Tensor, cat, nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.dist import all_gather_object, broadcast_object
from lockstep.errors import ConfigError
from lockstep.model import steps
from lockstep.model.shards import shard_rows, template_of_rows
from lockstep.strategy.base import ModelState, OptimState
from lockstep.strategy.colossalai.state import ColossalAIState, owned_state
from lockstep.strategy.engine_strategy import check_shape
from lockstep.strategy.optim_state import named_groups

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


class PipelineState(ColossalAIState):
    """Translates the states of a model whose layers are divided among the stages of a pipeline.

    A tied parameter has one entry in the optimizer's state, under its first name, as in one process.

    Args:
        core: this stage's part of the user's own module.
        engine: ColossalAI's optimizer.
        tp_group: the ranks that share a stage.
        stages: the stages of the pipeline.

    **Cost**: for `model_state` and `optim_state`, one broadcast of each parameter or of its state, in addition to what
    `ColossalAIState` gathers. Every rank keeps its rows of each tensor in CPU memory.
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
            if name in state:
                check_shape(name, state[name], shape)
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

    def _parameters(self) -> dict[str, Tensor]:
        # By the names in the whole model. Other stages check their own parameters.
        return {self._stages.inventory.first[name]: param for name, param in self._core.named_parameters()}

    def _names_elsewhere(self) -> Collection[str]:
        return self._stages.inventory.parameters

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


Criterion = Callable[[Any, Any], Tensor]

# For these models, ColossalAI's policies have been compared with one process; others fail or have not been tested.
MEASURED = (
    "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification", "BloomForCausalLM",
    "FalconForCausalLM", "LlamaForCausalLM", "LlamaForSequenceClassification", "MistralForCausalLM",
    "Qwen2ForCausalLM", "ViTForImageClassification",
)  # fmt: skip
_IGNORED = -100  # the label that HuggingFace's losses ignore
_SHIFTED = ("ForCausalLM", "LMHeadModel")  # classes that predict the next token, so the first label is not scored
_WHOLE = (bool, int, float, str, type(None))


class MicroBatches(NamedTuple):
    """A batch cut into micro-batches.

    Attributes:
        parts: arguments of `forward`, by name.
        sizes: the number of samples in each micro-batch.
    """

    parts: list[dict[str, Any]]
    sizes: list[int]


class Cutting(NamedTuple):
    """How a batch is cut into pieces.

    Attributes:
        number: the number of pieces; None if the size is given.
        size: the maximum number of samples in a piece.
    """

    number: int | None = None
    size: int | None = None

    def sizes(self, samples: int) -> list[int]:
        """Return the number of samples in each piece: as even as possible, and at least one.

        >>> Cutting(number=4).sizes(10), Cutting(number=4).sizes(3), Cutting(size=4).sizes(10)
        ([3, 3, 2, 2], [1, 1, 1], [4, 3, 3])
        """
        wanted = -(-samples // self.size) if self.size else self.number or 1
        pieces = min(wanted, samples)
        return [samples // pieces + (index < samples % pieces) for index in range(pieces)]


@dataclass(frozen=True, eq=False, slots=True)
class Pipeline:
    """The stages that compute on one batch together, as one of them sees it.

    Args:
        execute: runs ColossalAI's schedule: takes micro-batches, a criterion, and the optimizer (None for predictions).
        no_sync: returns the context in which a schedule does not average gradients.
        engine: ColossalAI's optimizer.
        core: this stage's part of the user's own module.
        stages: the stages of the pipeline.
        cutting: how a batch is cut into micro-batches.
    """

    execute: Callable[[list[dict[str, Any]], Criterion, Any], None]
    no_sync: Callable[[], AbstractContextManager[Any]]
    engine: Any
    core: nn.Module
    stages: Stages
    cutting: Cutting

    def train(self, model: nn.Module, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on this replica's batch, and return its values to log, which are means over its samples.

        Args:
            model: the wrapper, for its `no_sync`.
            data: the batch, the same on every rank of the replica.
            optim_wrapper: a `ColossalAIOptimWrapper`, which clips and updates.

        **Collective**: every rank of the pipeline; at the end of a window, every rank of the job.
        """
        batches = self._cut(data, "loss", training=True)
        parse = getattr(self.core, "parse_losses", steps.parse_losses)
        means: dict[str, Tensor] = {}

        def run(factor: float) -> None:
            weights = iter(weights_of(self.core, batches) if self.stages.stage == self.stages.last else ())

            def criterion(outputs: Any, _: Any) -> Tensor:
                weight = next(weights)
                if weight == 0:  # no label in it counts, and the mean over no labels is NaN
                    return _zero(outputs)
                loss, log_vars = parse(outputs)
                for name, value in log_vars.items():
                    means[name] = means[name] + value * weight if name in means else value * weight
                # The schedule divides by the number of micro-batches, as if they were equal.
                return loss * (weight * len(batches.parts) * factor)

            with self._own_randomness():
                self.execute(batches.parts, criterion, self.engine)

        optim_wrapper.update_by(model, run)
        return broadcast_object(means, src=self.stages.last, group=self.stages.group)

    def predict(self, data: Any) -> Any:
        """Return the model's predictions for this replica's batch, on each of its ranks.

        **Collective**: every rank of the pipeline.
        """
        batches = self._cut(data, "predict", training=False)
        outputs: list[Any] = []

        def criterion(output: Any, _: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros(())

        with torch.no_grad(), self._own_randomness(), self.no_sync():
            self.execute(batches.parts, criterion, None)
        whole = merged(outputs, weights_of(self.core, batches), batches.sizes) if outputs else None
        return broadcast_object(whole, src=self.stages.last, group=self.stages.group)

    def _cut(self, data: Any, mode: steps.Mode, *, training: bool) -> MicroBatches:
        batch = steps.preprocess(self.core, data, training=training)
        return cut(by_name(type(self.core).forward, batch, mode), self.cutting)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Let the stage draw its own random numbers; the generators of the replica stay equal on all its ranks."""
        seed = int(torch.randint(2**62, ()))
        device = get_device()
        devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
        with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
            torch.manual_seed(seed + self.stages.stage)
            yield


def check_model(model: nn.Module, *, has_policy: bool, has_custom_policy: bool) -> None:
    """Refuse a model that cannot be cut into stages, or that has its own steps.

    Raises:
        ConfigError: the model is of either kind.
    """
    name = type(model).__name__
    if not has_custom_policy and not (has_policy and name in MEASURED):
        raise ConfigError(
            f"the model must be one of {', '.join(MEASURED)} of HuggingFace's with `pp_size` above 1, or come "
            f"with a `custom_policy` that says how it is cut into stages, but is a {name}. Use tp_size, or "
            "strategy='fsdp'"
        )
    for step in ("train_step", "val_step", "test_step"):
        if steps.defines_step(model, step):
            raise ConfigError(
                f"the model must leave `{step}` to lockstep with `pp_size` above 1, because no stage has all of the "
                f"model, but {name} has one of its own, or is trained by a Session. Move what it does into `forward` "
                "and use a Runner, or use strategy='fsdp'"
            )


def _zero(outputs: Any) -> Tensor:
    """Return a loss of 0 with gradients of 0 for everything that the outputs depend on."""
    values = outputs.values() if hasattr(outputs, "values") else [outputs]
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return max(tensors, key=Tensor.dim).sum() * 0  # prefers scores to the loss


def by_name(forward: Callable[..., Any], batch: Any, mode: str) -> dict[str, Any]:
    """Return a batch as keyword arguments of a module's `forward`, with `mode` if `forward` has it.

    Raises:
        ConfigError: `forward` has fewer arguments than the batch has parts.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    if isinstance(batch, Mapping):
        named = dict(batch)
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        if len(values) > len(names):
            raise ConfigError(
                f"`forward` must name an argument for each part of a batch in a pipeline, but names {names}, and there "
                f"are {len(values)} parts"
            )
        named = dict(zip(names, values, strict=False))
    return {**named, "mode": mode} if "mode" in names else named


def cut(batch: Mapping[str, Any], cutting: Cutting) -> MicroBatches:
    """Cut a batch along the first dim of its tensors.

    Lists and tuples are also cut; tensors without dims, numbers, strings and None are copied to each piece.

    Raises:
        ConfigError: a part of it cannot be cut like this.
    """
    lengths = [value.size(0) for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if not lengths or not lengths[0]:
        raise ConfigError(f"a batch must hold samples to be cut into micro-batches, but holds {_described(batch)}")
    sizes = cutting.sizes(lengths[0])
    stops = list(accumulate(sizes))
    pieces = {name: _cut_value(name, value, sizes, stops) for name, value in batch.items()}
    return MicroBatches([{name: pieces[name][index] for name in batch} for index in range(len(sizes))], sizes)


def weights_of(core: nn.Module, cut_up: MicroBatches) -> list[float]:
    """Return the share of each piece in the mean over the batch; they add up to 1.

    It is the piece's share of the samples. If the batch has integer `labels`, it is the piece's share of the labels
    other than -100, because HuggingFace's models take the mean over those. Models that predict the next token do not
    score the first label.
    """
    counts = [float(size) for size in cut_up.sizes]
    labels = [label for part in cut_up.parts if isinstance(label := part.get("labels"), Tensor)]
    if labels and not labels[0].is_floating_point():
        shift = type(core).__name__.endswith(_SHIFTED) and labels[0].dim() > 1
        scored = [float((label[:, 1:] if shift else label).ne(_IGNORED).sum()) for label in labels]
        counts = scored if sum(scored) else counts
    return [count / sum(counts) for count in counts]


def merged(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    """Merge a model's predictions for the pieces of a batch into its prediction for the whole batch.

    Tensors are concatenated; tensors without dims become their mean weighted by `weights`. Mappings and tuples keep
    their structure, and lists, which hold one entry per sample, are joined.

    Raises:
        ConfigError: a part of them cannot be merged like this.
    """
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, Tensor) and first.dim() == 0:
        kept = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if weight]
        return sum((output * weight for output, weight in kept[1:]), start=kept[0][0] * kept[0][1])
    if isinstance(first, Mapping):
        entries = {name: merged([output[name] for output in outputs], weights, sizes) for name in first}
        return entries if type(first) is dict else type(first)(**entries)
    if isinstance(first, tuple):
        parts = [merged(values, weights, sizes) for values in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, Tensor | list) and [len(output) for output in outputs] == list(sizes):
        return cat(list(outputs)) if isinstance(first, Tensor) else list(chain(*outputs))
    raise ConfigError(
        "what a model predicts in a pipeline must be tensors or lists with one entry per sample, scalars or None, or "
        f"dicts and tuples of these, but {_described(first)} came for {sizes[0]} samples. Return such, or use "
        "strategy='fsdp'"
    )


def _cut_value(name: str, value: Any, sizes: list[int], stops: list[int]) -> Sequence[Any]:
    if isinstance(value, _WHOLE) or (isinstance(value, Tensor) and value.dim() == 0):
        return [value] * len(sizes)
    if isinstance(value, Tensor | list | tuple) and len(value) == stops[-1]:
        return [value[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
    raise ConfigError(
        f"each part of a batch must have one entry for each of its {stops[-1]} samples in a pipeline, which cuts it, "
        f"but {name!r} is {_described(value)}. Let the dataset give it per sample, or use strategy='fsdp'"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    length = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{length}"
