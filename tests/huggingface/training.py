"""Small models of transformers and peft, trained for a few updates, and what is compared of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)  # fmt: skip
from transformers.utils import logging

from lockstep.model.shards import gather_full
from lockstep.runner import Runner

logging.disable_progress_bar()  # it starts a thread
VOCABULARY = 64
WORDS = torch.randint(0, VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(0))
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def make(kind: str) -> nn.Module:
    """Return a model with random weights; those of its embedding are tied."""
    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "loss_type": "ForCausalLM"}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, **_ENDS))
    if kind == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **_SMALL))
    heads = {"num_key_value_heads": 2, "tie_word_embeddings": True, **_ENDS}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **_SMALL, **heads))
    assert kind == "mixtral"
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_local_experts=2, **_SMALL, **heads))


class Inside(nn.Module):
    """A user's module with a model of transformers in it, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = make("gpt2")
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.scale.square().sum() * self.backbone(input_ids=input_ids, labels=labels).loss


def trained(model: nn.Module, work_dir: Path, strategy: Any = None, **options: Any) -> Runner:
    """Train a model for four updates, and return its Runner."""
    samples = [{"input_ids": row, "labels": row} for row in WORDS]
    optim = {"optimizer": {"type": "AdamW", "lr": 1e-2}}
    runner = Runner(
        model,
        work_dir,
        train_dataloader=DataLoader(samples, batch_size=2),
        train_cfg={"max_iters": 4},
        **{"optim_wrapper": optim, "log_level": "WARNING", "randomness": {"seed": 0}, **options},
        strategy=strategy,
    )
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of torch's, that logits are a view
    runner.train()
    return runner


def whole_state(runner: Runner) -> dict[str, Tensor]:
    """Return the model's state, whole, on every rank."""
    state = runner.run.strategy.model_state()
    return {name: gather_full(value).detach().clone() for name, value in state.items()}


def train_and_save(kind: str, strategy: Any, folder: Path) -> dict[str, Tensor]:
    """Train and save; return the model's state."""
    runner = trained(make(kind), folder / "work", strategy)
    runner.save_pretrained(folder / "saved")
    return whole_state(runner)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """Return what a model makes of the words, without dropout."""
    return model.eval()(input_ids=WORDS).logits


def with_state(kind: str, state: dict[str, Tensor]) -> nn.Module:
    """Return a new model with a state."""
    model = make(kind)
    model.load_state_dict(state)
    return model
