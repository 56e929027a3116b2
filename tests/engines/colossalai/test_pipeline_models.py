"""Models of HuggingFace's that ColossalAI's own policies cut into stages, or split, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.model import predict_step, train_step
from lockstep.strategy import build_strategy
from lockstep.strategy.colossalai.pipeline import MEASURED
from lockstep.testing import run_ranks

from ..training import whole
from .test_pipeline import HYBRID
from .training import kept

WORDS, CLASSES, SAMPLES, LENGTH, LAYERS = 100, 4, 8, 12, 3
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
# Dropout is off: the ranks draw other random numbers than one process does.
OPTIONS: dict[str, dict[str, Any]] = {
    "Bert": {
        **SIZES, "intermediate_size": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "num_labels": CLASSES,
    },
    "Bloom": {
        "vocab_size": WORDS, "hidden_size": 16, "n_layer": LAYERS, "n_head": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "Falcon": {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "ViT": {
        "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 24,
        "image_size": 16, "patch_size": 4, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    **{
        family: {
            **SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "pad_token_id": 0,
            "num_labels": CLASSES,
        }
        for family in ("Llama", "Mistral", "Qwen2")
    },
}  # fmt: skip


def make(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(4)
    (family,) = (family for family in OPTIONS if name.startswith(family))
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**OPTIONS[family]))


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    """Return a batch for the task, its texts of several lengths."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator), "labels": classes[:, 0]}
    mask = (torch.arange(LENGTH) < (4 + torch.arange(SAMPLES))[:, None]).long()
    words = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator) * mask
    if name.endswith("SequenceClassification"):
        return {"input_ids": words, "attention_mask": mask, "labels": classes[:, 0]}
    labels = classes if name.endswith("TokenClassification") else words
    return {"input_ids": words, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def train(name: str, layout: dict[str, Any]) -> tuple[list[float], list[float], Tensor, dict[str, Any]]:
    """Return losses, norms, what is predicted of another batch, and the model's state."""
    strategy = kept(build_strategy(layout))
    optim = {"optimizer": {"type": "AdamW", "lr": 3e-3}, "clip_grad": {"max_norm": 0.5}}
    model, optim_wrapper = strategy.prepare(make(name), optim)
    step = getattr(model, "train_step", partial(train_step, model))
    losses, norms = [], []
    for index in range(4):
        losses.append(step(batch_of(name, index), optim_wrapper)["loss"].item())
        norms.append(optim_wrapper.grad_norm.item())
    model.eval()
    with torch.no_grad():
        batch = batch_of(name, 9)
        predicted = getattr(model, "val_step", partial(predict_step, model))(batch)
    rows = batch["attention_mask"].bool() if predicted.logits.dim() == 3 else slice(None)
    return losses, norms, predicted.logits[rows], whole(strategy.model_state())


def assert_as_in_one_process(name: str, ranks: int, **options: Any) -> None:
    losses, norms, logits, state = run_ranks(1, train, name, {"type": "SingleDeviceStrategy"})[0]
    for rank_losses, rank_norms, rank_logits, rank_state in run_ranks(ranks, train, name, {**HYBRID, **options}):
        assert rank_losses == pytest.approx(losses, abs=5e-6, rel=0)
        assert rank_norms == pytest.approx(norms, rel=1e-5)
        assert torch.allclose(rank_logits, logits, atol=1e-4)
        assert rank_state.keys() == state.keys()
        assert all(torch.allclose(rank_state[key], value, atol=1e-4) for key, value in state.items())


@pytest.mark.parametrize("name", MEASURED)
def test_each_model_in_stages_does_as_in_one_process(name: str):
    assert_as_in_one_process(name, 2, pp_size=2)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "BloomForCausalLM"])
def test_models_that_are_split_predict_the_whole_vocabulary(name: str):
    assert_as_in_one_process(name, 2, tp_size=2)
