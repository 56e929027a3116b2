"""Checkpoints that are damaged or somebody else's: every rank says which file or entry, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import load_state, read_meta, save_state
from lockstep.dist import get_rank, get_world_size, main_process_first
from lockstep.errors import ConfigError
from lockstep.testing import ranks

VALUES = torch.arange(600.0)


def written(path: Path) -> dict[str, Any]:
    """Write a checkpoint of which each rank has a share; return what asks for it."""
    entries = {f"w{rank}": {"exp_avg": VALUES + rank, "step": torch.tensor(3.0)} for rank in range(get_world_size())}
    optimizer = {"state": entries, "param_groups": [{"lr": 0.1, "params": sorted(entries)}]}
    save_state(path, {"model": dict.fromkeys(entries, VALUES), "optimizer": optimizer}, {"format": 1})
    return {"model": {name: torch.zeros_like(VALUES) for name in entries}, "optimizer": {}}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@ranks(1, 2)
@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("__{last}_0.distcp", Path.unlink, r"__{last}_0.distcp must have \d+ bytes, but is not there. .* is damaged"),
        ("__{last}_0.distcp", cut, r"__{last}_0.distcp must have \d+ bytes, but has \d+. The checkpoint is damaged"),
        (".metadata", cut, r"three/.metadata cannot be read: .* The checkpoint is damaged: copy it again"),
        (
            ".metadata",
            Path.unlink,
            r"must be a directory with .metadata and meta.json in it, but .*three lacks one of them",
        ),
    ],
)
def test_a_damaged_file_is_named_on_every_rank(name: str, damage: Callable[[Path], None], message: str, tmp_path: Path):
    wanted, last = written(tmp_path / "three"), get_world_size() - 1
    with main_process_first():
        if get_rank() == 0:
            damage(tmp_path / "three" / name.format(last=last))
    with pytest.raises(ConfigError, match=message.replace("{last}", str(last))):
        load_state(tmp_path / "three", wanted)


def test_damaged_facts_are_named(tmp_path: Path):
    written(tmp_path / "three")
    cut(tmp_path / "three" / "meta.json")
    with pytest.raises(ConfigError, match=r"three/meta.json must hold JSON, but cannot be read: .* is damaged"):
        read_meta(tmp_path / "three")


@ranks(1, 2)
def test_what_is_not_there_is_named_with_a_remedy(tmp_path: Path):
    wanted = written(tmp_path / "three")
    wanted["model"]["head"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"three does not fit: .*Missing key .* model.head.*load what fits of the"):
        load_state(tmp_path / "three", wanted)
    wanted["model"] = {"w0": torch.zeros(2)}
    with pytest.raises(ConfigError, match=r"three does not fit: .*Size mismatch .* for model.w0.*by `load_from`"):
        load_state(tmp_path / "three", wanted)


@ranks(1, 2)
def test_the_optimizers_state_is_read_as_it_was_saved(tmp_path: Path):
    entry = {"exp_avg": VALUES, "lists": [[VALUES, None], [VALUES[:0]]], "none": None, "betas": (0.9, 0.1)}
    group = {"lr": torch.tensor(0.1), "params": ["a.b"], "names": []}
    saved = {"state": {"a.b": entry}, "param_groups": [group, {"lr": 0.2, "params": []}]}
    save_state(tmp_path / "four", {"optimizer": saved}, {})
    (read,) = load_state(tmp_path / "four", {"optimizer": {"state": {"x": 1}}}).values()
    found = read["state"]["a.b"]
    assert {name: list(part) for name, part in read.items()} == {"state": ["a.b"], "param_groups": read["param_groups"]}
    assert torch.equal(found["exp_avg"], VALUES)
    assert found["lists"][0][1] is None
    assert torch.equal(found["lists"][0][0], VALUES)
    assert found["lists"][1][0].shape == (0,)
    assert (found["none"], found["betas"]) == (None, (0.9, 0.1))
    assert read["param_groups"] == saved["param_groups"]
    save_state(tmp_path / "five", {"optimizer": {"state": {}, "param_groups": [{"lr": 0.2, "params": ["a"]}]}}, {})
    (read,) = load_state(tmp_path / "five", {"optimizer": {}}).values()
    assert read == {"state": {}, "param_groups": [{"lr": 0.2, "params": ["a"]}]}
