"""What models of transformers and peft generate under FSDP, where `generate` calls parts of a model by themselves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from lockstep.dist import get_rank
from lockstep.model import unwrap_model
from lockstep.testing import run_ranks

from .training import VOCABULARY, WORDS, make, trained


def model_of(kind: str) -> nn.Module:
    if kind == "lora on llama":
        with warnings.catch_warnings():  # peft asks transformers for what has another name by now
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            return get_peft_model(make("llama"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **shape))


def generated(model: nn.Module, length: int) -> Tensor:
    """Return what a model appends to the words; it knows no end."""
    words = {"input_ids": WORDS[:4], "attention_mask": torch.ones_like(WORDS[:4])}
    ends = {"eos_token_id": None, "pad_token_id": 0}
    return model.eval().generate(**words, **ends, max_new_tokens=length, do_sample=False)


def train_and_generate(kind: str, strategy: Any, folder: Path) -> list[list[int]]:
    """Train, and generate more on rank 0 than on others."""
    runner = trained(model_of(kind), folder, strategy)
    return generated(unwrap_model(runner.model), 5 if get_rank() else 7).tolist()


@pytest.mark.parametrize("kind", ["t5", "lora on llama"])
def test_parts_that_generate_calls_find_their_weights(kind: str, tmp_path: Path) -> None:
    expected = run_ranks(2, train_and_generate, kind, "ddp", tmp_path / "ddp")
    assert len(expected[0][0]) == len(expected[1][0]) + 2
    assert run_ranks(2, train_and_generate, kind, "fsdp", tmp_path / "fsdp") == expected
