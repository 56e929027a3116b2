"""Models of transformers under ColossalAI, written for `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.model.shards import gather_full
from lockstep.runner import Runner
from lockstep.testing import run_ranks
from lockstep.weights import export_checkpoint

WORDS = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
OPTIONS = {"plugin": "lowlevel_zero", "stage": 2}


def make() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **shape))


def train_and_save(folder: Path) -> dict[str, Any]:
    samples = [{"input_ids": row, "labels": row} for row in WORDS]
    runner = Runner(
        make(), folder / "work", train_dataloader={"dataset": samples, "batch_size": 2}, train_cfg={"max_iters": 2},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-2}}, strategy={"type": "colossalai", **OPTIONS},
        log_level="WARNING",
    )  # fmt: skip
    runner.train()
    runner.save_pretrained(folder / "saved")
    return {n: gather_full(value).clone() for n, value in runner.run.strategy.model_state().items()}


@torch.no_grad()
def logits(model: LlamaForCausalLM) -> torch.Tensor:
    return model.eval()(input_ids=WORDS).logits


def test_what_is_saved_and_exported_is_loaded_and_computes_the_same(tmp_path: Path) -> None:
    states = run_ranks(2, train_and_save, tmp_path)
    export_checkpoint(tmp_path / "work", tmp_path / "exported", "hf")
    model = make()
    before = logits(model)
    model.load_state_dict(states[0])
    expected = logits(model)
    assert not torch.equal(expected, before)
    for folder in ("saved", "exported"):
        again, info = LlamaForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        loaded = again.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in states[0].items())
        # This transformers (4.51) computes otherwise after loading, in the last bits.
        torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-6)
