"""Options of how a device computes: the layout of images, the precision of products, batches on their way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.testing import ranks

DATA = TensorDataset(torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2)
STRATEGIES = ["single", "ddp"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.formats: set[bool] = set()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.conv(x)
        self.formats.add(features.is_contiguous(memory_format=torch.channels_last))
        return nn.functional.cross_entropy(self.linear(features.mean((2, 3))), y)


class Losses(Hook):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append(outputs["loss"].item())


def train(work_dir: Path, strategy: str, *, epochs: int = 1, **options: Any) -> tuple[Net, list[float]]:
    losses, model = Losses(), Net()
    Runner(
        model,
        work_dir,
        train_dataloader={"dataset": DATA, "batch_size": 4 // get_world_size(), "shuffle": False},
        train_cfg={"max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.05}},
        strategy=strategy,
        custom_hooks=[losses],
        log_level="ERROR",
        **options,
    ).train()
    return model, losses.seen


def check_channels_last(tmp_path: Path, strategy: str) -> None:
    model, losses = train(tmp_path, strategy, channels_last=True)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    assert model.formats == {True}
    plain, expected = train(tmp_path / "plain", strategy)
    assert plain.formats == {False}
    assert losses == pytest.approx(expected, abs=1e-6)
    # Either layout resumes from the other one's checkpoint.
    _, resumed = train(tmp_path, strategy, epochs=2, resume=True)
    _, other = train(tmp_path / "plain", strategy, epochs=2, resume=True, channels_last=True)
    assert resumed == pytest.approx(other, abs=1e-5)


@ranks(1)
def test_channels_last_is_refused_for_volumes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`channels_last` is for images, .* 0\.weight has five"):
        Runner(
            nn.Sequential(nn.Conv3d(1, 1, 1)),
            tmp_path,
            DataLoader([torch.ones(1)]),
            train_cfg={"max_epochs": 1},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
            channels_last=True,
        ).train()


@ranks(1)
def test_channels_last_converts_weights_and_so_what_they_compute(tmp_path: Path) -> None:
    check_channels_last(tmp_path, "single")


@ranks(2)
def test_channels_last_converts_the_replicas_of_ddp(tmp_path: Path) -> None:
    check_channels_last(tmp_path, "ddp")


@ranks(1, 2)
def test_channels_last_is_refused_where_weights_are_sharded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`channels_last` must be False under FSDPStrategy, .*images.to\(memory_f"):
        train(tmp_path, "fsdp", channels_last=True)


@ranks(1, 2)
def test_a_session_takes_channels_last(tmp_path: Path) -> None:
    session = Session(tmp_path, channels_last=True, prefetch_to_device=True, log_level="ERROR")
    model = Net()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA))
    for _ in session.epochs(1):
        for x, y in batches:
            session.step(model(x, y))
    assert model.formats == {True}


@ranks(1, 2)
def test_batches_are_taken_as_they_are_where_there_is_no_accelerator(tmp_path: Path) -> None:
    strategy = STRATEGIES[get_world_size() - 1]
    _, losses = train(tmp_path, strategy, prefetch_to_device=True)
    assert losses == train(tmp_path / "plain", strategy)[1]


@ranks(1)
def test_the_precision_of_products_is_set_and_else_left_as_it_is(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        train(tmp_path, "single", env_cfg={"float32_matmul_precision": "high"})
        assert torch.get_float32_matmul_precision() == "high"
        train(tmp_path, "single")
        assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(
            ConfigError, match=r"`env_cfg\.float32_matmul_precision` must be 'highest', 'high' or 'medi"
        ):
            train(tmp_path, "single", env_cfg={"float32_matmul_precision": "tf32"})
    finally:
        torch.set_float32_matmul_precision(before)


@ranks(1)
@pytest.mark.parametrize("chosen", [True, False])
def test_cudnn_searches_algorithms_if_the_user_has_said_so(tmp_path: Path, chosen: bool) -> None:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = chosen
    try:
        train(tmp_path, "single")
        assert torch.backends.cudnn.benchmark is chosen
    finally:
        torch.backends.cudnn.benchmark = before
