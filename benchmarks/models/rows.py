"""The models: how each is made, its data, its optimizer, and what a config would say besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.models import data, huggingface, own, own_steps
from benchmarks.models.data import Batch, Samples
from lockstep.hooks import Hook
from lockstep.model import unwrap_model

EPOCHS, EPOCH_STEPS, GLOBAL_BATCH, VALIDATED = 2, 5, 8, 13
STEPS = EPOCHS * EPOCH_STEPS
MAX_NORM = 0.1
# A larger eps than usual, lest Adam make a step of the rounding errors of gradients that are 0, as those of the biases
# of attention's keys are; and so that clipping changes something, which Adam would divide out again.
ADAMW = {"type": "AdamW", "lr": 3e-3, "eps": 1e-4, "weight_decay": 0.05}

Losses = dict[str, Tensor]
# Calls `update(loss)`, or `update(loss, part)` for the optimizer of one part; returns losses by name.
ByHand = Callable[[Any, Batch, Callable[..., None]], Losses]


def plain_step(model: nn.Module, batch: Batch, update: Callable[..., None]) -> Losses:
    """Train on one batch with a model that returns its loss."""
    mode = {"mode": "loss"} if isinstance(model, own.Classifier) else {}
    loss = model(**batch, **mode)["loss"]
    update(loss)
    return {"loss": loss}


def towers_step(model: own.TwoTowers, batch: Batch, update: Callable[..., None]) -> Losses:
    """Train on one batch, with no gathering."""
    towers = model.image(batch["images"]), model.caption(batch["captions"])
    loss = own.contrastive_loss(*map(nn.functional.normalize, towers), model.logit_scale)
    update(loss)
    return {"loss": loss}


class Unfreezing(Hook):
    """Lets a backbone learn from the second epoch on."""

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch >= 1:
            unwrap_model(runner.model).backbone.requires_grad_(True)


def unfreeze_by_hand(model: nn.Module, epoch: int) -> None:
    if epoch >= 1:
        model.get_submodule("backbone").requires_grad_(True)


@dataclass(frozen=True)
class Row:
    """A model, and how it is trained.

    Attributes:
        name: in the tables.
        make: makes it, with torch's random numbers.
        columns: draws so many samples.
        by_hand: one training step in plain torch.
        optimizer: config of the optimizer.
        parts: names of the parts that have an optimizer each; empty for one optimizer.
        clips: whether gradients are clipped; torch can't clip sparse ones.
        plan: how it is split where ranks compute it together; None leaves it to the model, or to ColossalAI's policy.
        colossalai_plan: whether ColossalAI is given that plan, too, having no policy for the model.
        options: what a config says of a strategy besides, by column.
        hooks: make further hooks.
        epoch_by_hand: what they do, by hand, before an epoch.
        cfg: further keys of a config.
        updates_before: number of updates before what is special about it begins; it can't be refused earlier.
        note: what to know of it, for the page.
    """

    name: str
    make: Callable[[], nn.Module]
    columns: Callable[[int, Generator], Batch]
    by_hand: ByHand = plain_step
    optimizer: Mapping[str, Any] = field(default_factory=lambda: ADAMW)
    parts: tuple[str, ...] = ()
    clips: bool = True
    plan: Mapping[str, str] | None = None
    colossalai_plan: bool = True
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hooks: tuple[Callable[[], Hook], ...] = ()
    epoch_by_hand: Callable[[nn.Module, int], None] | None = None
    cfg: Mapping[str, Any] = field(default_factory=dict)
    updates_before: int = 0
    note: str = ""

    def build(self, seed: int = 0) -> nn.Module:
        """Return the model as a seed makes it, no parameter of which is 0 or 1 everywhere."""
        torch.manual_seed(seed)
        model = self.make()
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
        return model

    def samples(self, *, training: bool) -> Samples:
        """Return the data."""
        count = EPOCH_STEPS * GLOBAL_BATCH if training else VALIDATED
        return Samples(self.columns(count, torch.Generator().manual_seed(7 if training else 8)))


PERCEPTRON = {"*up": "colwise", "*down": "rowwise"}
GATED = ("gate", "up", "down")
LAYERS = {"*.layer.?.intermediate.dense": "colwise", "*.layer.?.output.dense": "rowwise"}
ATTENTION = {f"*.{name}_proj": "colwise" for name in "qkv"} | {"*.o_proj": "rowwise"}
UNUSED = {name: {"find_unused_parameters": True} for name in ("DDP-2", "ColossalAI TP-2")}
UNUSED_NOTE = "Under `ddp` and `hybrid` with `find_unused_parameters=True`."


def _hf(name: str, make: Callable[[], nn.Module], columns: Callable[[int, Generator], Batch], **options: Any) -> Row:
    return Row(name, make, columns, **{"colossalai_plan": False, **options})


ROWS = (
    _hf("GPT-2, tied", huggingface.gpt2, data.token_columns),
    _hf("Llama, GQA", huggingface.llama, data.token_columns),
    _hf("T5", huggingface.t5, data.pair_columns, plan={"*.wi": "colwise", "*.wo": "rowwise"}),
    _hf("BERT", huggingface.bert, data.sentence_columns, plan=LAYERS),
    _hf("ViT", huggingface.vit, data.image_columns, plan={"*.fc1": "colwise", "*.fc2": "rowwise"}),
    _hf("Mixtral", huggingface.mixtral, data.token_columns, plan=ATTENTION),
    _hf(
        "Qwen2-MoE",
        huggingface.qwen2_moe,
        data.token_columns,
        plan={f"*.shared_expert.{name}_proj": "rowwise" if name == "down" else "colwise" for name in GATED},
        colossalai_plan=True,
        note="the shared expert is what tensor parallelism splits; ColossalAI has no policy for the model.",
    ),
    _hf("Whisper", huggingface.whisper, data.speech_columns, plan={"*.fc1": "colwise", "*.fc2": "rowwise"}),
    _hf(
        "LoRA on Llama",
        huggingface.lora,
        data.token_columns,
        plan={f"*.{name}_proj": "rowwise" if name == "down" else "colwise" for name in GATED},
        colossalai_plan=True,
    ),
    Row(
        "resnet18, SyncBN",
        own.ResNet18,
        lambda count, generator: data.image_columns(count, generator, "inputs"),
        cfg={"sync_bn": "torch"},
        note='`sync_bn="torch"` in the config, SiLU for ReLU; by hand, BatchNorm over the global batch.',
    ),
    Row(
        "GAN",
        own_steps.Gan,
        data.noise_columns,
        own_steps.gan_by_hand,
        parts=("generator", "discriminator"),
        plan={"generator.0": "colwise", "generator.2": "rowwise"},
        note="two optimizers, so two norms, both compared; the step calls `self.generator` and `self.discriminator`.",
    ),
    Row(
        "mixup",
        own_steps.Mixup,
        data.mixed_columns,
        own_steps.mixup_by_hand,
        plan=PERCEPTRON,
        note="the step calls `self(...)`; the dataset fixes which samples are mixed, however they are batched.",
    ),
    Row(
        "distillation, EMA teacher",
        own_steps.Distillation,
        data.vector_columns,
        own_steps.distillation_by_hand,
        plan=PERCEPTRON,
        note="the teacher is a frozen submodule, which the step moves towards the student after each update.",
    ),
    Row(
        "two towers",
        own.TwoTowers,
        data.view_columns,
        towers_step,
        note="a contrastive loss over the global batch, by `all_gather(x, sync_grads=True)`, and a 0-dim temperature.",
    ),
    Row(
        "experts of a ModuleList",
        own.Experts,
        data.vector_columns,
        plan=PERCEPTRON,
        options=UNUSED,
        note=f"each rank sends its samples to different experts. {UNUSED_NOTE}",
    ),
    Row(
        "unfrozen at epoch 2",
        own.Backbone,
        data.vector_columns,
        plan=PERCEPTRON,
        hooks=(Unfreezing,),
        epoch_by_hand=unfreeze_by_hand,
        updates_before=EPOCH_STEPS,
        note="a hook calls `requires_grad_(True)` on the backbone; where it is refused, the error comes at that point.",
    ),
    Row(
        "unused parameters",
        own.SpareBranch,
        data.vector_columns,
        plan={"main.up": "colwise", "main.down": "rowwise"},
        options=UNUSED,
        note=f"a branch that never gets a gradient, and so no weight decay. {UNUSED_NOTE}",
    ),
    Row("float64 beside float32", own.MixedDtypes, data.vector_columns, plan={"up": "colwise", "exact": "rowwise"}),
    Row("0-dim parameter", own.Scaled, data.vector_columns, plan=PERCEPTRON),
    Row("complex parameter", own.Complex, data.vector_columns),
    Row("complex, 15 rows", lambda: own.Complex(15), data.vector_columns, note="neither 2 nor 4 divides its 15 rows."),
    Row(
        "sparse embedding",
        own.SparseWords,
        data.word_columns,
        optimizer={"type": "SGD", "lr": 0.5},
        clips=False,
        note="SGD, no clipping: torch has no norm of sparse gradients, so there is none to compare.",
    ),
)
BY_NAME = {row.name: row for row in ROWS}
