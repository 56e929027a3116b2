"""Texts that are packed into a row, and told apart by `position_ids` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from lockstep.runner import Runner
from lockstep.testing import run_ranks

from .training import WORDS, make, whole_state

TEXTS = [{"input_ids": row[: 3 + i % 4].tolist()} for i, row in enumerate(WORDS)]


def by_text(texts: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [dict.fromkeys(("input_ids", "labels"), torch.tensor([text["input_ids"]])) for text in texts]


def count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def train(folder: Path, strategy: str) -> tuple[dict[str, Tensor], float, bool]:
    model = make("llama")
    options = {"batch_size": 2, "collate_fn": DataCollatorWithFlattening()}
    runner = Runner(
        model,
        folder,
        train_dataloader=DataLoader(TEXTS, **options),
        val_dataloader=DataLoader(TEXTS, **options),
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.5}},
        train_cfg={"max_epochs": 1, "batch_size_of": count},
        strategy=strategy,
        log_level="WARNING",
    )
    runner.train()
    return whole_state(runner), runner.val()["loss"], model.config.use_cache


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_text_does_not_attend_to_its_neighbours(strategy: str, tmp_path: Path) -> None:
    state, validated, keeps_cache = run_ranks(2, train, tmp_path, strategy)[0]
    model = make("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for begin in range(0, len(TEXTS), 4):
        batches = by_text(TEXTS[begin : begin + 4])
        for batch in batches:
            (model(**batch).loss * count(batch) / sum(map(count, batches))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        expected = sum(model(**batch).loss.item() * count(batch) for batch in by_text(TEXTS))
    assert validated == pytest.approx(expected / sum(map(count, by_text(TEXTS))), rel=1e-5)
    assert keeps_cache
