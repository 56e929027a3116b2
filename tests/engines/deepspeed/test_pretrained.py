"""Models of transformers under ZeRO: written for `from_pretrained`, and loaded from its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GPT2LMHeadModel

from lockstep.testing import run_ranks
from lockstep.weights import export_checkpoint

from ...huggingface.training import logits, make, train_and_save, trained, whole_state, with_state

ROWS = [{"stage": 2}, {"stage": 3}, {"stage": 3, "bf16": True}]


@pytest.mark.parametrize("options", ROWS, ids=str)
def test_what_is_saved_and_exported_is_loaded_and_computes_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    states = run_ranks(2, train_and_save, "gpt2", {"type": "deepspeed", **options}, tmp_path)
    export_checkpoint(tmp_path / "work", tmp_path / "exported", "hf")
    expected = logits(with_state("gpt2", states[0]))
    assert not torch.equal(expected, logits(make("gpt2")))
    for folder in ("saved", "exported"):
        model, info = GPT2LMHeadModel.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values())
        assert model.dtype == torch.float32
        assert torch.equal(logits(model), expected)
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            assert {"lm_head.weight", *file.keys()} == states[0].keys()
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict


def load(folder: Path, stage: int) -> dict[str, Tensor]:
    still = {"optimizer": {"type": "SGD", "lr": 0.0}}
    strategy = {"type": "deepspeed", "stage": stage}
    return whole_state(
        trained(make("gpt2"), folder / "work", strategy, load_from=str(folder / "theirs"), optim_wrapper=still)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_a_folder_of_transformers_is_loaded(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which transformers sets by way of accelerate
    theirs = make("gpt2")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(1.0)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    for state in run_ranks(2, load, tmp_path, stage):
        assert all(torch.equal(state[name], value) for name, value in theirs.state_dict().items())
