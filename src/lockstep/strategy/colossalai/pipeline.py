"""One replica in stages, through which the pieces of a batch follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.device import get_device
from lockstep.dist import broadcast_object
from lockstep.errors import ConfigError
from lockstep.model import steps
from lockstep.strategy.colossalai.micro_batches import Cutting, MicroBatches, by_name, cut, merged, shares
from lockstep.strategy.colossalai.optim import ColossalAIOptimWrapper
from lockstep.strategy.colossalai.stages import Stages

Criterion = Callable[[Any, Any], Tensor]

# For these ColossalAI's policies have been compared with one process; others fail, or have not been looked at.
MEASURED = (
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "ViTForImageClassification",
)


class Pipeline:
    """The stages that compute on one batch together, seen from one of them.

    Args:
        execute: runs ColossalAI's schedule: given micro-batches, a criterion, and the optimizer in training.
        no_sync: makes the context in which a schedule averages no gradients.
        engine: ColossalAI's optimizer.
        core: what is left here of the user's own module.
        stages: of the pipeline.
        cutting: into how many micro-batches a batch is cut.

    Attributes:
        full_numel: number of elements of the parameters of all stages.
    """

    def __init__(
        self,
        execute: Callable[[list[dict[str, Any]], Criterion, Any], None],
        no_sync: Callable[[], AbstractContextManager[Any]],
        engine: Any,
        core: nn.Module,
        stages: Stages,
        cutting: Cutting,
    ) -> None:
        self._execute = execute
        self._no_sync = no_sync
        self._engine = engine
        self._core = core
        self._stages = stages
        self._cutting = cutting
        self._last: int = stages.group.size() - 1
        self.full_numel = stages.inventory.numel

    def train(self, model: nn.Module, data: Any, optim_wrapper: ColossalAIOptimWrapper) -> dict[str, Tensor]:
        """Train on this replica's batch, and return its values to log, which are means over its samples.

        Args:
            model: the wrapper, for its `no_sync`.
            data: the batch, the same on every rank of the replica.
            optim_wrapper: clips and updates.

        **Collective**: every rank of the pipeline; at the end of a window every rank.
        """
        batches = self._cut(data, "loss", training=True)
        parse = getattr(self._core, "parse_losses", steps.parse_losses)
        means: dict[str, Tensor] = {}

        def run(factor: float) -> None:
            weights = iter(shares(self._core, batches) if self._stages.stage == self._last else ())

            def criterion(outputs: Any, _: Any) -> Tensor:
                weight = next(weights)
                if weight == 0:  # no label in it counts, and the mean over none is no number
                    return _zero(outputs)
                loss, log_vars = parse(outputs)
                for name, value in log_vars.items():
                    means[name] = means[name] + value * weight if name in means else value * weight
                # The schedule divides by the number of micro-batches, as if they were equal.
                return loss * (weight * len(batches.parts) * factor)

            with self._own_randomness():
                self._execute(batches.parts, criterion, self._engine)

        optim_wrapper.update_by(model, run)
        return broadcast_object(means, src=self._last, group=self._stages.group)

    def predict(self, data: Any) -> Any:
        """Return what the model predicts for this replica's batch, on each of its ranks.

        **Collective**: every rank of the pipeline.
        """
        batches = self._cut(data, "predict", training=False)
        outputs: list[Any] = []

        def criterion(output: Any, _: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros(())

        with torch.no_grad(), self._own_randomness(), self._no_sync():
            self._execute(batches.parts, criterion, None)
        whole = merged(outputs, shares(self._core, batches), batches.sizes) if outputs else None
        return broadcast_object(whole, src=self._last, group=self._stages.group)

    def _cut(self, data: Any, mode: steps.Mode, *, training: bool) -> MicroBatches:
        batch = steps.preprocess(self._core, data, training=training)
        return cut(by_name(type(self._core).forward, batch, mode), self._cutting)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Let the stage draw random numbers of its own; those of the replica stay the same on all of its ranks."""
        seed = int(torch.randint(2**62, ()))
        device = get_device()
        devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
        with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
            torch.manual_seed(seed + self._stages.stage)
            yield


def check_model(model: nn.Module, *, has_policy: bool, has_custom_policy: bool) -> None:
    """Refuse a model that can't be cut into stages, or whose steps are its own.

    Raises:
        ConfigError: it is one.
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
                f"model, but {name} has one of its own. Move what it does into `forward`, or use strategy='fsdp'"
            )


def _zero(outputs: Any) -> Tensor:
    """Return 0, whose gradients are 0 for all that led to the outputs."""
    values = outputs.values() if hasattr(outputs, "values") else [outputs]
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return max(tensors, key=Tensor.dim).sum() * 0  # rather of scores than of the loss
