"""Checkpoints out: which weights, under which names, in which form, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Runner, Session
from lockstep.checkpoint.drafts import name_of_draft
from lockstep.errors import ConfigError
from lockstep.location import Location, locate
from lockstep.testing import ranks, run_ranks
from lockstep.weights import export_checkpoint, open_source
from lockstep.weights.export import save_pretrained, select_weights
from lockstep.weights.safetensors_file import TensorInfo

WORDS = torch.arange(12) % 5
EMA = {"type": "EMAHook", "momentum": 0.5}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def train(work_dir: Path, strategy: str | None = None, **options: Any) -> Runner:
    torch.manual_seed(0)
    loader = {"dataset": TensorDataset(WORDS, WORDS), "batch_size": 2}
    runner = Runner(
        Tied(), work_dir, train_dataloader=loader, loss=nn.CrossEntropyLoss(), train_cfg={"max_epochs": 2},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.5}}, strategy=strategy, log_level="WARNING",
        randomness={"seed": 0}, **options,
    )  # fmt: skip
    runner.train()
    return runner


def train_and_save(folder: Path, strategy: str) -> dict[str, Tensor]:
    runner = train(folder / "work", strategy)
    runner.save_pretrained(folder / "saved")
    state = runner.run.strategy.model_state()
    return {name: getattr(value, "full_tensor", value.detach)().clone() for name, value in state.items()}


def content(path: Location) -> dict[str, Tensor]:
    source = open_source(path)
    return {name: source.read(name) for name in source.tensors}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_form_holds_what_was_trained(strategy: str, tmp_path: Path) -> None:
    (state, _) = run_ranks(2, train_and_save, tmp_path, strategy)
    once = {name: value for name, value in state.items() if name != "head.weight"}
    assert equal(content(tmp_path / "saved"), once)
    done = export_checkpoint(tmp_path / "work", tmp_path / "folder", max_shard_size=40)
    assert (done.tensors, done.nbytes, done.left_out) == (4, 80 + 20 + 3 + 8, [])
    assert equal(content(tmp_path / "folder"), once)
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 111}
    assert {*index["weight_map"].values()} == {f.name for f in (tmp_path / "folder").glob("*.safetensors")}
    export_checkpoint(next((tmp_path / "work").glob("*/epoch_1")), tmp_path / "one.safetensors")
    assert not equal(content(tmp_path / "one.safetensors"), once)
    export_checkpoint(tmp_path / "work", tmp_path / "new" / "net.pth", "torch")
    loaded = torch.load(tmp_path / "new" / "net.pth", weights_only=True)
    assert equal(loaded, state)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["folder", "new", "one.safetensors", "saved", "work"]


def test_parts_names_and_dtypes(tmp_path: Path) -> None:
    train(tmp_path / "work")
    work = tmp_path / "work"
    done = export_checkpoint(work, tmp_path / "head", prefix="head", dtype="bfloat16")
    assert {n: (t.dtype, t.shape) for n, t in content(tmp_path / "head").items()} == {
        "weight": (torch.bfloat16, (5, 4)), "bias": (torch.bfloat16, (5,)),
    }  # fmt: skip
    assert done.left_out == ["mask", "count"]  # words.weight is head.weight


def test_names_of_a_description_that_two_weights_would_have() -> None:
    stored = {name: TensorInfo((1,), torch.float32) for name in "ab"}
    adapter = {"prefix": "", "stem": "adapter_model", "files": {}, "names": {"a": "x", "b": "x"}}
    with pytest.raises(ConfigError, match="two of net would be called `x`"):
        select_weights(stored, {"pretrained": [adapter]}, "hf", what="net")


def test_averaged_and_trained_weights(tmp_path: Path) -> None:
    runner = train(tmp_path / "work", custom_hooks=[EMA])
    for ema in (None, True, False):
        export_checkpoint(tmp_path / "work", tmp_path / f"exported-{ema}", ema=ema)
        runner.save_pretrained(tmp_path / f"saved-{ema}", ema=ema)
        assert equal(content(tmp_path / f"exported-{ema}"), content(tmp_path / f"saved-{ema}"))
    assert equal(content(tmp_path / "saved-None"), content(tmp_path / "saved-True"))
    assert torch.equal(content(tmp_path / "saved-False")["head.bias"], runner.model.head.bias)
    assert not torch.equal(content(tmp_path / "saved-True")["head.bias"], runner.model.head.bias)


def test_without_an_average_none_is_written(tmp_path: Path) -> None:
    runner = train(tmp_path / "work")
    with pytest.raises(ConfigError, match="must have averaged weights, as EMAHook saves them, but has none"):
        export_checkpoint(tmp_path / "work", tmp_path / "out", ema=True)
    with pytest.raises(ConfigError, match="`ema` must be True only beside EMAHook"):
        runner.save_pretrained(tmp_path / "out", ema=True)
    assert not (tmp_path / "out").exists()
    evaluating = Runner(runner.model, tmp_path, val_dataloader=runner.train_dataloader)
    evaluating.val()
    with pytest.raises(ConfigError, match="`ema` must be None in a run that does not train"):
        evaluating.save_pretrained(tmp_path / "out", ema=True)


def test_a_session_saves_its_models(tmp_path: Path) -> None:
    session = Session(tmp_path / "work", log_level="WARNING")
    models = {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}
    optimizer = torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1)
    model, _, loader = session.prepare(models, optimizer, [torch.ones(2, 2)] * 2)
    for _ in session.epochs(1):
        for batch in loader:
            session.step(model["b"](model["a"](batch).expand(2, 2)).mean())
    session.save_pretrained(tmp_path / "all")
    session.save_pretrained(tmp_path / "b", prefix="b")
    assert content(tmp_path / "all").keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert equal(content(tmp_path / "b"), dict(model["b"].state_dict()))


def test_a_bucket_is_written_and_loaded_from(tmp_path: Path) -> None:
    train(tmp_path / "work")
    for to, out in (("safetensors", "memory://bucket/folder"), ("torch", "memory://bucket/net.pth")):
        export_checkpoint(tmp_path / "work", out, to, max_shard_size=40)
        with pytest.raises(ConfigError, match=f"what is written must go to a new .*, but {out} is a "):
            export_checkpoint(tmp_path / "work", out, to)
        again = train(tmp_path / "again", load_from=out, default_hooks={"checkpoint": None})
        assert "loaded the weights" in (again.run_dir / "log.txt").read_text()
    assert len(fsspec.filesystem("memory").ls("/bucket/folder")) > 2
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"checkpoint": "none"},
            "a checkpoint, the folder of a run, or a work_dir, but none does not exist",
        ),
        ({"checkpoint": "file"}, "but file is a file"),
        ({"checkpoint": "empty"}, "but empty holds no complete checkpoint"),
        ({"checkpoint": "draft"}, "but draft holds no complete checkpoint"),
        ({"checkpoint": "s3://bucket/epoch_1"}, "s3://bucket/epoch_1"),
        ({"checkpoint": "memory://x"}, "the folder of a run, or a work_dir, but memory://x does not exist"),
        ({"out": "work"}, "what is written must go to a new or empty folder, but work is a folder that holds "),
        ({"out": "file"}, "what is written must go to a new or empty folder, but file is a file"),
        ({"out": "file", "to": "torch"}, "what is written must go to a new file, but file is a file"),
        ({"out": "empty", "to": "torch"}, "what is written must go to a new file, but empty is a folder"),
        ({"out": "file/folder"}, "file/folder cannot be written|cannot be reached"),
        ({"out": "file/net.pth", "to": "torch"}, "file/net.pth cannot be written|cannot be reached"),
        ({"out": "net.pth"}, "`out` must be a folder for 'safetensors', but has the name 'net.pth'"),
        ({"to": "onnx"}, "`to` must be 'safetensors', 'hf' or 'torch', but is 'onnx'"),
        ({"to": "hf"}, "must have a config of HuggingFace's to be written for from_pretrained, but has none. Write"),
        ({"dtype": "int8"}, "`dtype` must be one of float32, float16, bfloat16, float64, but is 'int8'"),
        ({"max_shard_size": "5 apples"}, "`max_shard_size` must be a size as 5GB"),
        (
            {"prefix": "body"},
            "must be the name of a part of .*, out of count, head, mask, words, but is 'body'",
        ),
        ({"files_from": "empty"}, "`files_from` must be a folder with a config or a tokenizer, but empty has neither"),
        ({"files_from": "none", "to": "torch"}, "`files_from` must be left out where `out` is one file, but is 'none'"),
        ({"files_from": "none"}, "`files_from` must be a folder of HuggingFace's, but none cannot be read"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_says_why(
    options: dict[str, Any], says: str, trained_once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained_once)
    arguments = {"checkpoint": "work", "out": "out", **options}
    with pytest.raises(ConfigError, match=says):
        export_checkpoint(**arguments)
    assert not Path("out").exists()
    assert not list(Path().glob(".*.draft*"))


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder / "work")
    (folder / "file").write_text("")
    for name in ("empty", "draft"):
        (folder / name).mkdir()
    (folder / "draft" / ".metadata").write_text("")
    return folder


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_what_another_export_is_writing_is_left_alone_until_it_has_ended(
    to: Any, trained_once: Path, tmp_path: Path
) -> None:
    says = "from lockstep.checkpoint.drafts import name_of_draft as n; print(n('out'), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", says], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        draft = tmp_path / other.stdout.readline().strip()
        draft.mkdir()
        (draft / "half").write_text("")
        export_checkpoint(trained_once / "work", tmp_path / "out", to=to)
        assert (draft / "half").exists()
        other.communicate("\n")
    remove = shutil.rmtree if to == "safetensors" else os.unlink
    remove(tmp_path / "out")
    export_checkpoint(trained_once / "work", tmp_path / "out", to=to)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_damaged_checkpoint_leaves_nothing_behind(to: Any, tmp_path: Path) -> None:
    train(tmp_path / "work")
    data = next((tmp_path / "work").glob("*/epoch_2/rank_0.safetensors"))
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="damaged"):
        export_checkpoint(tmp_path / "work", tmp_path / "out", to)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["work"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "work")

    def full(file: Any, tensor: Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lockstep.weights.safetensors_file.write_tensor", full)
    with pytest.raises(ConfigError, match=r"out cannot be written: \[Errno 28\] No space left on device"):
        export_checkpoint(tmp_path / "work", tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["work"]


@pytest.mark.parametrize("out", ["{folder}/net.pth", "memory://interrupted/net.pth"])
def test_an_interrupted_export_leaves_nothing_behind(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "work")

    def interrupted(value: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(tmp_path / "work", out.format(folder=tmp_path), "torch")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["work"]
    assert not fsspec.filesystem("memory").exists("/interrupted/net.pth")


def test_files_of_a_tokenizer_are_copied_but_no_folder_of_one(trained_once: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline" / "tokenizer").mkdir(parents=True)  # as diffusers has it
    (tmp_path / "pipeline" / "config.json").write_text("{}")
    export_checkpoint(trained_once / "work", tmp_path / "out", "hf", files_from=tmp_path / "pipeline")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


@ranks(2)
def test_a_dtype_that_files_cannot_hold_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`phase` must have a dtype that safetensors files can hold"):
        save_pretrained(nn.Linear(1, 1), {"phase": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "out", {})
    assert not list(tmp_path.iterdir())


@ranks(2)
@pytest.mark.parametrize("place", ["{}/saved", "memory://saved"])
def test_a_former_export_is_replaced_on_demand_and_nothing_of_it_is_left(tmp_path: Path, place: str) -> None:
    runner, out = train(tmp_path / "work"), locate(place.format(tmp_path))
    runner.save_pretrained(str(out), max_shard_size=40)
    if runner.rank == 0:
        for name in ("tokenizer.json", "adapter_config.json", "adapter_model.safetensors"):
            with (out / name).open("wb") as file:
                file.write(b"{}")
    with pytest.raises(Exception, match="or overwrite=True, which replaces weights there"):
        runner.save_pretrained(str(out))
    runner.save_pretrained(str(out), overwrite=True)
    if runner.rank == 0:  # a bucket in memory is each rank's own
        assert {"model.safetensors", "tokenizer.json"} == {file.name for file in out.iterdir()}
        assert content(out / "model.safetensors").keys() == {"words.weight", "head.bias", "mask", "count"}


@ranks(1)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_there_is_filled_and_not_replaced(tmp_path: Path, overwrite: bool) -> None:
    runner = train(tmp_path / "work", "single")
    (tmp_path / "disk" / "saved").mkdir(parents=True)
    (tmp_path / "saved").symlink_to(tmp_path / "disk" / "saved")
    *owner, _, host = name_of_draft("saved").split(".", 5)
    (tmp_path / "saved" / ".".join([*owner, "1", host])).mkdir()  # left by a process that began long ago
    if overwrite:
        (tmp_path / "saved" / "model.safetensors").write_bytes(b"former")
    before = (tmp_path / "saved").stat().st_ino
    runner.save_pretrained(tmp_path / "saved", overwrite=overwrite)
    assert (tmp_path / "saved").stat().st_ino == before  # it may be a volume, or belong to a parent that is not ours
    assert content(tmp_path / "saved" / "model.safetensors")
    assert os.listdir(tmp_path / "disk" / "saved") == ["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "saved", "work"]


@ranks(2)
def test_a_rank_that_cannot_write_tells_the_others(tmp_path: Path) -> None:
    runner = train(tmp_path / "work", "fsdp")
    with pytest.raises(Exception, match="what is written must go to a new or empty folder") as caught:
        runner.save_pretrained(tmp_path / "work")
    assert type(caught.value).__name__ == ("ConfigError" if runner.rank == 0 else "PeerError")
    runner.save_pretrained(tmp_path / "saved")  # the group is usable
