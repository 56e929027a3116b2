"""What a stranger's checkpoint may hold: no way of reading it runs code, leaves its folder, or takes half for all.

The places where its text becomes a path, each with the test that leads it out:

| text | becomes | test |
|---|---|---|
| `files` in the manifest | a file that is read | `leads_out`, `absolute`, `place_leads_out` |
| `meta.weights.pretrained[].files`, `.stem` | files that an export writes | `files_lead_out`, `stem_leads_out` |
| `former_runs` in `meta.checkpoint_hook` | folders of old checkpoints | `test_retention_stays_in_the_work_dir` |
| the pointer `last_checkpoint` | the checkpoint that is read | `test_a_pointer_that_leads_out_is_refused_by_name` |
| `weight_map` in an index of weights | files that are read | `tests/weights/test_safetensors_file.py` |
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import RESUMABLE
from torch import nn
from typer.testing import CliRunner

from lockstep.checkpoint import save_state
from lockstep.checkpoint.manifest import read_manifest
from lockstep.cli.main import app
from lockstep.errors import CheckpointError, ConfigError
from lockstep.runner import Runner, load_checkpoint


class Evil:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def current(work_dir: Path) -> Path:
    """Write a checkpoint of the present format."""
    directory = work_dir / "20260101_000000" / "epoch_1"
    meta = {**RESUMABLE, "seed": 1, "epoch": 1, "iter": 4}
    save_state(directory, {"model": net().state_dict()}, meta, last_of=work_dir)
    return directory


def changed(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the digest that it then has."""
    content = json.loads((directory / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    body = json.dumps(content, indent=2).encode().removesuffix(b"\n}")
    digest = hashlib.sha256(body).hexdigest()
    (directory / "manifest.json").write_bytes(body + f',\n  "sha256": "{digest}"\n}}\n'.encode())


def pickled_manifest(work_dir: Path, mark: Path) -> str:
    (current(work_dir) / "manifest.json").write_bytes(pickle.dumps(Evil(mark)))
    return "manifest.json must be a manifest"


def leads_out(work_dir: Path, mark: Path) -> str:
    directory = current(work_dir)
    (work_dir / "out.safetensors").write_bytes((directory / "rank_0.safetensors").read_bytes())

    def change(content: dict[str, Any]) -> None:
        content["files"]["../../out.safetensors"] = content["files"].pop("rank_0.safetensors")

    changed(directory, change)
    return r"manifest.json contradicts itself: '../../out.safetensors' .* may lead out of the folder"


def absolute(work_dir: Path, mark: Path) -> str:
    changed(current(work_dir), lambda content: content["files"].update({"/etc/passwd": content["files"].popitem()[1]}))
    return r"manifest.json contradicts itself: '/etc/passwd' .* may lead out of the folder"


def place_leads_out(work_dir: Path, mark: Path) -> str:
    def change(content: dict[str, Any]) -> None:
        content["places"][0] = ["../../out.safetensors"]

    changed(current(work_dir), change)
    return "`manifest.places` must be lists of numbers of files, but is"


def place_beyond(work_dir: Path, mark: Path) -> str:
    def change(content: dict[str, Any]) -> None:
        content["places"][0] = [1]

    changed(current(work_dir), change)
    return "`places.0` must name files by their numbers, below 1, but has 1"


def described(work_dir: Path, **facts: Any) -> None:
    """Write a checkpoint whose metadata say of a model of transformers what is to be written beside its weights."""

    def change(content: dict[str, Any]) -> None:
        own = {"prefix": "", "stem": "model", "files": {"config.json": {}}, "names": None, **facts}
        content["meta"]["weights"] = {"tied": [], "pretrained": [own]}

    changed(current(work_dir), change)


def files_lead_out(work_dir: Path, mark: Path) -> str:
    described(work_dir, files={"config.json": {}, "../../mark": {"any": "text"}})
    return r"manifest.json contradicts itself: `meta.weights.pretrained.0.files` must be files of JSON by their names"


def files_are_absolute(work_dir: Path, mark: Path) -> str:
    described(work_dir, files={str(mark): {"any": "text"}})
    return r"`meta.weights.pretrained.0.files` must be files of JSON by their names, without folders"


def files_are_code(work_dir: Path, mark: Path) -> str:
    described(work_dir, files={"config.json": {}, "modeling.py": "import os"})
    return r"`meta.weights.pretrained.0.files` must be files of JSON"


def stem_leads_out(work_dir: Path, mark: Path) -> str:
    described(work_dir, stem=str(mark.with_suffix("")))
    return r"`meta.weights.pretrained.0.stem` must be the name of a file, without a folder"


def overlapping(work_dir: Path, mark: Path) -> str:
    """Cut a tensor of [2, 3] into two rows, both of which are to be the same bytes."""

    def change(content: dict[str, Any]) -> None:
        content["places"].append([0, 0])
        content["tensors"]["model.0.weight"].update(part=[1, 3], place=len(content["places"]) - 1)

    changed(current(work_dir), change)
    return "one file holds two parts of a tensor"


def not_covered(work_dir: Path, mark: Path) -> str:
    """Cut a tensor of [2, 3] into two rows, of which there is one."""
    changed(current(work_dir), lambda content: content["tensors"]["model.0.weight"].update(part=[1, 3]))
    return "model.0.weight has 2 parts, but 1 files hold it"


def cut_backwards(work_dir: Path, mark: Path) -> str:
    changed(current(work_dir), lambda content: content["tensors"]["model.0.weight"].update(part=[[0, 2, 1], 3]))
    return "model.0.weight of the length 2 cannot be cut into parts that begin at"


def bytes_of_no_tensor(work_dir: Path, mark: Path) -> str:
    """Leave bytes in a file that belong to no tensor."""

    def change(content: dict[str, Any]) -> None:
        del content["tensors"]["model.0.bias"], content["state"]["model"]["0.bias"]

    changed(current(work_dir), change)
    return "its files hold 44 bytes of tensors, which have 36"


def one_tensor_twice(work_dir: Path, mark: Path) -> str:
    """Let one tensor stand for two weights, of which only one would be read."""

    def change(content: dict[str, Any]) -> None:
        content["state"]["model"]["1.weight"] = {"$tensor": "model.0.bias"}

    changed(current(work_dir), change)
    return "the tensor model.0.bias stands for two values"


def linked_data(work_dir: Path, mark: Path) -> str:
    path = current(work_dir) / "rank_0.safetensors"
    path.symlink_to(path.rename(work_dir / "elsewhere"))
    return "rank_0.safetensors must be a file, but is a link"


def linked_manifest(work_dir: Path, mark: Path) -> str:
    path = current(work_dir) / "manifest.json"
    path.symlink_to(path.rename(work_dir / "elsewhere"))
    return "manifest.json must be a file, but is a link"


def too_large(work_dir: Path, mark: Path) -> str:
    def change(content: dict[str, Any]) -> None:
        content["tensors"]["model.0.weight"]["shape"] = [1 << 50]

    changed(current(work_dir), change)
    return "manifest.json contradicts itself"


def nested(work_dir: Path, mark: Path) -> str:
    (current(work_dir) / "manifest.json").write_text("[" * 100_000)
    return "manifest.json must be a manifest"


ATTACKS = [
    pickled_manifest, leads_out, absolute, linked_data, linked_manifest, too_large, nested, place_leads_out,
    files_lead_out, files_are_absolute, files_are_code, stem_leads_out, overlapping, not_covered, cut_backwards,
    bytes_of_no_tensor, one_tensor_twice, place_beyond,
]  # fmt: skip


def train(work_dir: Path, max_epochs: int = 2, **arguments: Any) -> None:
    x = torch.ones(16, 3)
    data = {"dataset": torch.utils.data.TensorDataset(x, x[:, :1]), "batch_size": 4}
    Runner(net(), work_dir, loss=nn.MSELoss(), train_dataloader=data, train_cfg={"max_epochs": max_epochs},
           optim_wrapper={"optimizer": {"type": "AdamW"}}, **arguments).train()  # fmt: skip


def by_loading(work_dir: Path, directory: Path) -> None:
    load_checkpoint(net(), directory)


def by_resuming_from_it(work_dir: Path, directory: Path) -> None:
    train(work_dir.with_name("another"), load_from=directory, resume=True)


def by_resuming(work_dir: Path, directory: Path) -> None:
    train(work_dir, resume=True)


def by_listing(work_dir: Path, directory: Path) -> None:
    called(["checkpoints", str(work_dir), "--verify"])


def by_showing(work_dir: Path, directory: Path) -> None:
    called(["checkpoints", "show", str(directory)])


def by_exporting(work_dir: Path, directory: Path) -> None:
    called(["export", str(directory), str(work_dir.with_name("exported"))])


def called(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    if result.exit_code != 0:
        raise ConfigError(result.output.replace("\n", " "))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize(
    "way",
    [by_loading, by_resuming, by_resuming_from_it, by_listing, by_showing, by_exporting],
    ids=lambda way: way.__name__,
)
def test_nothing_is_run_and_the_file_is_named(attack: Any, way: Any, tmp_path: Path):
    work_dir, mark = tmp_path / "work", tmp_path / "mark"
    says = attack(work_dir, mark)
    directory = next(path for path in work_dir.glob("*/*") if path.is_dir())
    with pytest.raises(ConfigError, match=says):
        way(work_dir, directory)
    assert not mark.exists()
    assert not list(tmp_path.glob("mark*"))


FILE, TENSOR = ("files", "rank_0.safetensors"), ("tensors", "model.0.weight")
CUT = object()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("written", "block"), CUT, "`manifest.written` must have 'block', but has"),
        (("written", "block"), 0, "`manifest.written.block` must be a number of bytes from 1"),
        (("places",), CUT, "`manifest` must have 'places', but has"),
        (("places",), [3], "`manifest.places` must be lists of numbers of files, but is"),
        (("places", 0), [7], "`places.0` must name files by their numbers, below 1, but has 7"),
        (("state", "model"), {"$tuple": 1}, "`state.model` is none of the forms"),
        (FILE, [1], "`manifest.files.rank_0.safetensors` must be a dict, but is"),
        ((*FILE, "size"), CUT, "`manifest.files.rank_0.safetensors` must have 'size', but has"),
        ((*FILE, "header"), 1 << 40, "`manifest.files.rank_0.safetensors.header` must be a number of bytes from 0 to"),
        (TENSOR, None, "`manifest.tensors.model.0.weight` must be a dict, but is"),
        ((*TENSOR, "dtype"), CUT, "`manifest.tensors.model.0.weight` must have 'dtype', but has"),
        ((*TENSOR, "dtype"), [], "`manifest.tensors.model.0.weight.dtype` must be the name of a dtype, but is"),
        ((*TENSOR, "shape"), None, "`manifest.tensors.model.0.weight.shape` must be a list of lengths, but is"),
        ((*TENSOR, "part"), [2, 0], "`manifest.tensors.model.0.weight.part` must be the lengths of parts, or"),
        ((*TENSOR, "part"), [2], "model.0.weight has 2 dims, but is cut along 1"),
        ((*TENSOR, "part"), [2, [1]], "model.0.weight of the length 3 cannot be cut"),
        ((*TENSOR, "place"), 9, "model.0.weight has the place 9, but there are 1"),
    ],
)
def test_the_entry_that_is_wrong_is_named(path: tuple[Any, ...], value: Any, says: str, tmp_path: Path):
    def change(content: dict[str, Any]) -> None:
        holder: Any = content
        for key in path[:-1]:
            holder = holder[key]
        if value is CUT:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value

    directory = current(tmp_path)
    changed(directory, change)
    with pytest.raises(CheckpointError, match=f"manifest.json contradicts itself: {re.escape(says)}"):
        read_manifest(directory)


def test_retention_stays_in_the_work_dir(tmp_path: Path):
    """The names of former runs in the metadata lead to no folder outside, nor to one of another kind inside."""
    outside, inside = current(tmp_path / "elsewhere"), current(tmp_path / "work" / "kept")
    train(tmp_path / "work", max_epochs=1)
    (directory,) = tmp_path.glob("work/*/epoch_1")
    runs = ["../elsewhere/20260101_000000", str(outside.parent), "kept/20260101_000000", "..", "kept"]
    former = [{"run": run, "epoch": 9, "iter": 99} for run in runs]
    changed(directory, lambda content: content["meta"].update(checkpoint_hook={"best": {}, "former_runs": former}))
    train(tmp_path / "work", resume=True, default_hooks={"checkpoint": {"max_keep_ckpts": 1}})
    assert [path.exists() for path in (outside, inside, directory)] == [True, True, False]


def pointer_to(path: str) -> bytes:
    return f"{path}\nsha256 {hashlib.sha256(path.encode()).hexdigest()}\n".encode()


@pytest.mark.parametrize("line", ["../elsewhere/20260101_000000/epoch_1", "{tmp_path}/elsewhere/x", "link/epoch_1"])
def test_a_pointer_that_leads_out_is_refused_by_name(line: str, tmp_path: Path):
    work_dir = tmp_path / "work"
    stranger = current(tmp_path / "elsewhere")
    work_dir.mkdir()
    (work_dir / "link").symlink_to(stranger.parent)
    (work_dir / "last_checkpoint").write_bytes(pointer_to(line.format(tmp_path=tmp_path)))
    with pytest.raises(ConfigError, match=r"last_checkpoint must lead to a checkpoint in .* but leads out of it"):
        train(work_dir, resume=True)


def test_a_file_of_weights_runs_nothing(tmp_path: Path):
    torch.save({"state_dict": {"0.weight": Evil(tmp_path / "mark")}}, tmp_path / "net.pth")
    with pytest.raises(ConfigError, match=r"net\.pth"):
        load_checkpoint(net(), tmp_path / "net.pth")
    with pytest.raises(ConfigError, match=r"net\.pth"):
        train(tmp_path / "work", load_from=tmp_path / "net.pth", resume=True)
    assert not (tmp_path / "mark").exists()


def test_the_attacks_would_work_where_pickles_are_loaded(tmp_path: Path):
    pickled_manifest(tmp_path / "work", tmp_path / "mark")
    pickle.loads((tmp_path / "work" / "20260101_000000" / "epoch_1" / "manifest.json").read_bytes())
    assert (tmp_path / "mark").exists()
