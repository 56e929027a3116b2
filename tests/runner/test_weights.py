"""Weights from elsewhere: tied ones, and what is no file of weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.runner import Runner
from lockstep.testing import ranks
from lockstep.weights import load_checkpoint

WORDS = torch.arange(12) % 5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def load(path: Path, work_dir: Path, **options: Any) -> Runner:
    loader = {"dataset": TensorDataset(WORDS, WORDS), "batch_size": 4}
    still = {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.0}}, "train_cfg": {"max_epochs": 1}}
    runner = Runner(
        Tied(), work_dir, train_dataloader=loader, loss=nn.CrossEntropyLoss(), load_from=path, **still, **options
    )
    runner.train()
    return runner


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["words.weight", "head.weight"])
def test_tied_weights_may_come_under_one_of_their_names(strategy: str, name: str, tmp_path: Path) -> None:
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    torch.save({name: weight}, tmp_path / "tied.pth")
    runner = load(tmp_path / "tied.pth", tmp_path / "work", strategy=strategy)
    for value in runner.run.strategy.model_state().values():
        assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, weight)
    assert "do not fit" not in (runner.run_dir / "log.txt").read_text()


def test_they_fit_strictly_too(tmp_path: Path) -> None:
    model = Tied()
    torch.save({"head.weight": torch.ones(5, 4)}, tmp_path / "tied.pth")
    load_checkpoint(model, tmp_path / "tied.pth", strict=True)
    assert torch.equal(model.words.weight, torch.ones(5, 4))


def test_what_is_not_there_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "none.pth", "does not exist"),
        (tmp_path, "is a folder without a complete checkpoint"),
    ):
        with pytest.raises(ConfigError, match=f"{path.name} {says}"):
            load_checkpoint(Tied(), path)


@given(st.binary(max_size=200))
def test_whatever_the_bytes_the_file_is_named(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "garbage.pth"
        path.write_bytes(content)
        with pytest.raises(
            ConfigError, match=r"garbage\.pth must (be a file that torch\.save has written|hold weights)"
        ):
            load_checkpoint(Tied(), path)
