"""All models: those of HuggingFace and those written by hand here, those of other subjects in files of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.models import (
    data,
    detection,
    diffusion,
    held_parameters,
    huggingface,
    own,
    own_steps,
    self_supervised,
    several_passes,
    written_weights,
)
from benchmarks.models.row import EPOCH_STEPS, PERCEPTRON, UNUSED, UNUSED_NOTE, Row
from lockstep.hooks import Hook
from lockstep.model import unwrap_model

GATED = ("gate", "up", "down")
LAYERS = {"*.layer.?.intermediate.dense": "colwise", "*.layer.?.output.dense": "rowwise"}
ATTENTION = {f"*.{name}_proj": "colwise" for name in "qkv"} | {"*.o_proj": "rowwise"}
WAV2VEC2 = {"*.intermediate_dense": "colwise", "*.output_dense": "rowwise"}


class Unfreezing(Hook):
    """Lets a backbone learn from the second epoch on."""

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch >= 1:
            unwrap_model(runner.model).backbone.requires_grad_(True)


def unfreeze_by_hand(model: nn.Module, epoch: int) -> None:
    if epoch >= 1:
        model.get_submodule("backbone").requires_grad_(True)


ROWS = (
    Row("GPT-2, tied", huggingface.gpt2, data.token_columns),
    Row("Llama, GQA", huggingface.llama, data.token_columns),
    Row("T5", huggingface.t5, data.pair_columns, plan={"*.wi": "colwise", "*.wo": "rowwise"}),
    Row("BERT", huggingface.bert, data.sentence_columns, plan=LAYERS),
    Row("ViT", huggingface.vit, data.image_columns, plan={"*.fc1": "colwise", "*.fc2": "rowwise"}),
    Row("Mixtral", huggingface.mixtral, data.token_columns, plan=ATTENTION),
    Row(
        "Qwen2-MoE",
        huggingface.qwen2_moe,
        data.token_columns,
        plan={f"*.shared_expert.{name}_proj": "rowwise" if name == "down" else "colwise" for name in GATED},
        note="the shared expert is what tensor parallelism splits.",
    ),
    Row("Qwen 3", huggingface.qwen3, data.token_columns),
    Row("Gemma 2", huggingface.gemma2, data.token_columns),
    Row("Gemma 3", huggingface.gemma3, data.token_columns),
    Row("Phi-3", huggingface.phi3, data.token_columns),
    Row("DeepSeek V3", huggingface.deepseek_v3, data.token_columns),
    Row("Mamba 2", huggingface.mamba2, data.token_columns),
    Row(
        "RWKV",
        huggingface.rwkv,
        data.token_columns,
        updates_before=10,
        note="a validation divides weights of each block by powers of two; where it is refused, the error comes there.",
    ),
    Row(
        "Llama, means of tokens",
        huggingface.llama,
        data.padded_columns,
        counts=data.count_labels,
        note="labels of 1 to 11 tokens, the others -100; `batch_size_of` counts them.",
    ),
    Row(
        "wav2vec 2.0",
        huggingface.wav2vec2,
        data.waveform_columns,
        plan=WAV2VEC2,
        options=UNUSED,
        note=f"nothing is masked, so the vector that would replace what is masked gets no gradient. {UNUSED_NOTE}",
    ),
    Row("Whisper", huggingface.whisper, data.speech_columns, plan={"*.fc1": "colwise", "*.fc2": "rowwise"}),
    Row(
        "LoRA on Llama",
        huggingface.lora,
        data.token_columns,
        plan={f"*.{name}_proj": "rowwise" if name == "down" else "colwise" for name in GATED},
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
        own.towers_step,
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
    *diffusion.ROWS,
    *detection.ROWS,
    *self_supervised.ROWS,
    *several_passes.ROWS,
    *written_weights.ROWS,
    *held_parameters.ROWS,
)
BY_NAME = {row.name: row for row in ROWS}
