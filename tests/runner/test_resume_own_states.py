"""Resuming what modules keep beside their parameters: an extra state, and buffers that they size themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint import read_meta
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.runner import Runner, load_checkpoint
from lockstep.testing import ranks

pytestmark = pytest.mark.checkpoints


class Net(nn.Module):
    """Keeps new keys and a longer tensor as it trains, and a buffer that the first batch sizes."""

    observed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.names, self.seen = nn.Linear(3, 3), dict[str, int](), torch.zeros(0)
        self.register_buffer("observed", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.names[f"call_{len(self.names)}"] = len(self.names)
            self.seen = torch.cat([self.seen, torch.ones(1)])
            self.observed.resize_(3).fill_(float(len(self.names)))
        return self.linear(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"names": dict(self.names), "seen": self.seen, 7: (1, "x")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.names, self.seen = dict(state["names"]), state["seen"].clone()
        assert state[7] == (1, "x")

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        self.observed.resize_(state[f"{prefix}observed"].shape)
        super()._load_from_state_dict(state, prefix, *others)


class Recording(Net):
    """Notes what it got before the first batch."""

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self.got = len(self.names), len(self.seen)


def trained(model: nn.Module, work_dir: Path, epochs: int, **arguments: Any) -> Runner:
    x = torch.ones(8, 3)
    data = {"dataset": torch.utils.data.TensorDataset(x, x), "batch_size": 2}
    runner = Runner(
        model, work_dir, loss=nn.MSELoss(), train_dataloader=data, train_cfg={"max_epochs": epochs},
        default_hooks={"sync_buffers": None}, **arguments,
    )  # fmt: skip
    runner.train()
    return runner


def comes_back(work_dir: Path, strategy: str) -> None:
    first = Net()
    trained(first, work_dir, 1, strategy=strategy)
    done = len(first.names)
    second = Recording()
    trained(second, work_dir, 2, resume=True, strategy=strategy)
    assert second.got == (done, done)
    assert len(second.names) == len(second.seen) == 2 * done
    assert second.observed.tolist() == [2.0 * done] * 3


def test_they_come_back_whole(tmp_path: Path) -> None:
    comes_back(tmp_path, "single")


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_they_come_back_whole_on_two_ranks(tmp_path: Path, strategy: str) -> None:
    comes_back(tmp_path / strategy, strategy)


def quantized() -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model.qconfig = get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return prepare_qat(model.train())


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*reduce_range:UserWarning")
def test_observers_of_quantization_are_resumed(tmp_path: Path) -> None:
    first, second = quantized(), quantized()
    trained(first, tmp_path, 1)
    trained(second, tmp_path, 1, resume=True)  # nothing is left to train
    state = second.state_dict()
    for name, value in first.state_dict().items():
        assert torch.equal(state[name], value), name


def test_the_weights_of_a_compiled_inner_module_are_loaded_both_ways(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), torch.compile(nn.Linear(3, 1), backend="eager"))
    for source, target in ((plain, inner), (inner, plain)):
        with torch.no_grad():
            source[2].weight.add_(1.0)
        torch.save(source.state_dict(), tmp_path / "weights.pth")
        load_checkpoint(target, tmp_path / "weights.pth", strict=True)
        assert torch.equal(target[2].weight, source[2].weight)


class Counting(Hook):
    """Saves what it has counted, in several kinds of values."""

    count = 0
    got: Any = None

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count
        checkpoint["more"] = {"tensor": torch.arange(3), "word": "x", "none": None, "list": [1, torch.ones(1)]}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        self.got = checkpoint["count"], checkpoint.get("more")


@ranks(1, 2)
def test_what_a_hook_adds_comes_back_without_asking(tmp_path: Path) -> None:
    trained(nn.Linear(3, 3), tmp_path, 1, custom_hooks=[hook := Counting()])
    trained(nn.Linear(3, 3), tmp_path, 2, custom_hooks=[later := Counting()], resume=True)
    count, more = later.got
    assert count == hook.count
    assert (more["word"], more["none"]) == ("x", None)
    assert torch.equal(more["tensor"], torch.arange(3))
    assert more["list"][1].item() == 1


@ranks(2)
def test_what_each_rank_adds_under_its_number_comes_back_on_every_rank(tmp_path: Path) -> None:
    class Own(Hook):
        got: Any = None

        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {str(runner.rank): {"rows": torch.arange(3 + runner.rank), "number": runner.rank}}

        def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            self.got = {key: (len(own["rows"]), own["number"]) for key, own in checkpoint["own"].items()}

    trained(nn.Linear(3, 3), tmp_path, 1, custom_hooks=[Own()])
    trained(nn.Linear(3, 3), tmp_path, 2, custom_hooks=[later := Own()], resume=True)
    assert later.got == {"0": (3, 0), "1": (4, 1)}


@ranks(1, 2)
def test_what_a_hook_sets_up_before_the_run_does_not_replace_what_it_has_saved(tmp_path: Path) -> None:
    class SetsUp(Hook):
        def before_run(self, runner: Any) -> None:
            self.count = 0

        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            self.count += 1

        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["count"] = self.count

        def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            self.count = checkpoint["count"]

    trained(nn.Linear(3, 3), tmp_path, 1, custom_hooks=[hook := SetsUp()])
    trained(nn.Linear(3, 3), tmp_path, 3, custom_hooks=[later := SetsUp()], resume=True)
    assert later.count == 3 * hook.count


def test_what_is_too_large_for_every_rank_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(nn.Linear(3, 3), tmp_path, 1, custom_hooks=[Counting()])
    monkeypatch.setattr("lockstep.runner.resuming._MOST_UNASKED", 20)
    trained(nn.Linear(3, 3), tmp_path, 2, custom_hooks=[later := Counting()], resume=True)
    assert later.got == (4, None)
    assert "`more` (0 MiB) is not loaded: no hook asks for it in before_load_checkpoint" in capsys.readouterr().out


class SavesAfterThird(Hook):
    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter == 2:
            runner.save_checkpoint("third")


@ranks(1, 2)
def test_what_a_hook_saves_after_an_iteration_counts_it(tmp_path: Path) -> None:
    whole = trained(nn.Linear(3, 3), tmp_path / "whole", 2, custom_hooks=[SavesAfterThird()], randomness={"seed": 1})
    third = whole.run_dir / "third"
    assert read_meta(third)["iter"] == 3
    options: Any = {"load_from": str(third), "resume": True, "randomness": {"seed": 1}}
    again = trained(nn.Linear(3, 3), tmp_path / "again", 2, **options)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@ranks(2)
def test_the_log_of_each_rank_says_why_a_run_has_failed(tmp_path: Path) -> None:
    class Fails(Hook):
        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            raise ValueError("no such thing: password=hunter2")

    with pytest.raises(ValueError, match="no such thing"):
        trained(nn.Linear(3, 3), tmp_path, 1, custom_hooks=[Fails()])
    name = "log.txt" if get_rank() == 0 else "log_rank1.txt"
    log = next(tmp_path.glob(f"*/{name}")).read_text()
    assert "ValueError: no such thing" in log
    assert "hunter2" not in log


class Unsaveable(Net):
    def get_extra_state(self) -> dict[str, Any]:
        return {"act": torch.nn.functional.gelu}  # as neuralop's models keep the arguments of their constructor


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_state_that_cannot_be_saved_is_told_before_the_training(strategy: str, tmp_path: Path):
    model = Unsaveable()
    with pytest.raises(ConfigError, match=r"`model\._extra_state\.act` must be a tensor"):
        trained(model, tmp_path, 1, strategy=strategy)
    assert not model.names
