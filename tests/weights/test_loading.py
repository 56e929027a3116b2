"""Weights from elsewhere: tied ones, other names, folders of runs, URLs, and what is no file of weights."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import save_state
from lockstep.dist import get_rank, is_main_process, main_process_first
from lockstep.errors import ConfigError
from lockstep.runner import Runner
from lockstep.testing import ranks
from lockstep.weights import load_checkpoint
from lockstep.weights.source import TorchFile

WORDS = torch.arange(12) % 5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def load(path: Path | str, work_dir: Path, **options: Any) -> Runner:
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
    with main_process_first():
        if is_main_process():
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


def test_a_work_dir_without_its_last_checkpoint_names_the_newest_one(tmp_path: Path) -> None:
    run = load(written(tmp_path), tmp_path / "work").run_dir
    (tmp_path / "work" / "last_checkpoint").unlink()
    newest = re.escape(str(run / "epoch_1"))
    with pytest.raises(
        ConfigError, match=f"has no last_checkpoint that leads to one. The newest one in it is {newest}"
    ):
        load_checkpoint(Tied(), tmp_path / "work")


@given(st.binary(max_size=200))
def test_whatever_the_bytes_the_file_is_named(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "garbage.pth"
        path.write_bytes(content)
        with pytest.raises(
            ConfigError, match=r"garbage\.pth must (be a file that torch\.save has written|hold weights)"
        ):
            load_checkpoint(Tied(), path)


def written(folder: Path, prefix: str = "") -> Path:
    """Write the weights of a tied model, with a prefix before their names."""
    weight = torch.arange(20.0).reshape(5, 4)
    torch.save({f"{prefix}words.weight": weight}, folder / "net.pth")
    return folder / "net.pth"


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.extra = Tied(), nn.Linear(1, 1)


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "a.b."])
def test_a_prefix_that_only_the_file_has_is_left_out(prefix: str, tmp_path: Path, caplog: Any) -> None:
    model = Tied()
    with caplog.at_level("INFO"):
        load_checkpoint(model, written(tmp_path, prefix), strict=True)
    assert model.head.weight[4, 3] == 19
    assert ("have the prefix `a.b.`, which the model's lack" in caplog.text) == (prefix == "a.b.")


def test_a_prefix_that_only_the_model_has_is_added(tmp_path: Path, caplog: Any) -> None:
    model = Inside()
    load_checkpoint(model, written(tmp_path))
    assert model.backbone.head.weight[4, 3] == 19
    assert "missing: extra.weight, extra.bias" in caplog.text


def test_names_of_the_models_own_are_not_revised(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 1), "other": nn.Linear(2, 1)})
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "net.pth")
    load_checkpoint(model, tmp_path / "net.pth", strict=True)
    assert model["module"].weight.sum() == 2


def test_which_of_two_prefixes_is_meant_is_not_guessed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "net.pth")
    with pytest.raises(ConfigError, match=r"missing: a.weight.*unknown to the model: weight, bias.*Rename them, by"):
        load_checkpoint(model, tmp_path / "net.pth")
    load_checkpoint(model, tmp_path / "net.pth", revise_keys=[("^", "a.")])


def test_a_checkpoint_without_a_tensor_where_the_model_has_one_is_told(tmp_path: Path) -> None:
    save_state(tmp_path / "epoch_1", {"model": {"weight": torch.ones(1, 2), "bias": [1, 2]}}, {"iter": 1})
    with pytest.raises(ConfigError, match=r"of another shape: bias no tensor, not \(1,\)"):
        load_checkpoint(nn.Linear(2, 1), tmp_path / "epoch_1", strict=True)


def test_modules_of_experts_of_which_some_differ_are_loaded(tmp_path: Path, caplog: Any) -> None:
    experts = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    torch.save({f"mlp.experts.{n}.weight": torch.ones(1, 1) for n in (0, 2)}, tmp_path / "net.pth")
    load_checkpoint(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})}), tmp_path / "net.pth")
    assert experts[0].weight == 1
    assert "unknown to the model: mlp.experts.2.weight" in caplog.text


def test_a_shape_that_differs_is_shown(tmp_path: Path) -> None:
    torch.save({"words.weight": torch.ones(6, 4)}, tmp_path / "net.pth")
    with pytest.raises(ConfigError, match=r"words.weight \(6, 4\), not \(5, 4\).* a model of another size: build"):
        load_checkpoint(Tied(), tmp_path / "net.pth")


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_form_is_loaded_by_each_rank(strategy: str, tmp_path: Path) -> None:
    saved = load(written_by_main(tmp_path), tmp_path / "work", strategy=strategy)
    saved.save_pretrained(tmp_path / "folder", max_shard_size=40)
    forms = [tmp_path / "work", saved.run_dir, saved.run_dir / "epoch_1", tmp_path / "folder"]
    for n, form in enumerate(forms):
        again = load(form, tmp_path / f"again{n}", strategy=strategy)
        for value in again.run.strategy.model_state().values():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(whole, torch.arange(20.0).reshape(5, 4)), form
        assert "do not fit" not in (again.run_dir / "log.txt").read_text()


@ranks(2)
def test_what_all_ranks_need_whole_is_read_once_and_a_rank_that_cannot_is_named_on_all(tmp_path: Path) -> None:
    file, weight = tmp_path / "net.pth", torch.arange(20.0).reshape(5, 4)
    with main_process_first():
        if is_main_process():
            torch.save({"words.weight": weight.half()}, file)
    read, rows = TorchFile.read, []

    def noted(self: TorchFile, name: str, some: slice | None = None) -> Tensor:
        rows.append(some)
        return read(self, name, some)

    def failing(self: TorchFile, name: str, some: slice | None = None) -> Tensor:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lockstep.weights.loading._MOST_AT_ONCE", 16)  # two rows in half precision
        monkeypatch.setattr(TorchFile, "read", noted)
        runner = load(file, tmp_path / "work", strategy="ddp")
        for value in runner.run.strategy.model_state().values():
            assert torch.equal(value, weight)
        assert rows == ([slice(0, 2), slice(4, 5)] if get_rank() == 0 else [slice(2, 4)])
        monkeypatch.setattr(TorchFile, "read", failing if get_rank() == 1 else read)
        with pytest.raises(ConfigError, match=r"net\.pth cannot be read: .*Input/output error.* \(rank 1 of 2\)"):
            load(file, tmp_path / "again", strategy="ddp")


def written_by_main(folder: Path) -> Path:
    with main_process_first():
        if get_rank() == 0:
            written(folder)
    return folder / "net.pth"


def test_files_and_folders_behind_a_url_are_loaded() -> None:
    fs = fsspec.filesystem("memory")
    with fs.open("/weights/net.pth", "wb") as file:
        torch.save({"words.weight": torch.ones(5, 4)}, file)
    model = Tied()
    load_checkpoint(model, "memory://weights/net.pth", strict=True)
    assert model.head.weight.sum() == 20
    for path in ("memory://weights/none.pth", "memory://nothing"):
        with pytest.raises(ConfigError, match=f"{path} does not exist"):
            load_checkpoint(model, path)
    with pytest.raises(ConfigError, match=r"memory://weights is a folder without a complete .* It holds net"):
        load_checkpoint(model, "memory://weights")
    with pytest.raises(ConfigError, match=r"nosuch://a must be a path or a URL that fsspec can open, but: Protocol"):
        load_checkpoint(model, "nosuch://a")
    fs.rm("/weights", recursive=True)


def test_a_url_without_a_checkpoint_cannot_be_resumed_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`load_from` must be a checkpoint, .* but memory://x does not exist"):
        load("memory://x", tmp_path / "work", resume=True)


def test_a_run_resumes_from_the_folder_of_another(tmp_path: Path) -> None:
    first = load(written(tmp_path), tmp_path / "work")
    again = load(first.run_dir, tmp_path / "again", resume=True)
    assert "resumed from" in (again.run_dir / "log.txt").read_text()


class Observer(nn.Module):
    """Sizes a buffer by its first batch, as observers of quantization-aware training do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([]))
        self.out = nn.Linear(2, 1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}least" in state_dict:
            self.least = torch.empty_like(state_dict[f"{prefix}least"])
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("strict", [False, True])
def test_a_buffer_that_its_module_sizes_is_loaded(strict: bool, tmp_path: Path) -> None:
    trained = Observer()
    trained.least = torch.tensor([1.0, 2.0])
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    fresh = nn.Sequential(Observer())
    load_checkpoint(fresh, tmp_path / "weights.pth", strict=strict)
    assert fresh[0].least.tolist() == [1.0, 2.0]
