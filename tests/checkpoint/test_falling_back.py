"""What turns out to be unusable only while a run is restored is passed over for an older checkpoint, on every rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lockstep.checkpoint import loading, verifying
from lockstep.checkpoint.manifest import read_manifest
from lockstep.checkpoint.search import POINTER_FILE, candidates
from lockstep.checkpoint.verifying import Block, read_block
from lockstep.dist import all_gather_object, barrier, get_rank, main_process_first
from lockstep.errors import CheckpointError
from lockstep.hooks import Hook
from lockstep.launch.worker import RESUME_SINCE
from lockstep.runner import Runner
from lockstep.testing import ranks

from .test_attacks import changed


class Saves(Hook):
    """Saves what no run saves, as a state of random generators or of the optimizer."""

    def __init__(self, what: str) -> None:
        self.what = what

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        if runner.epoch == 1 and self.what == "optimizer":
            first = next(iter(checkpoint["optimizer"]["state"].values()))
            first["exp_avg"] = torch.zeros(1, 1, 1)


def trained(work_dir: Path, epochs: int, *hooks: Hook, width: int = 3, **arguments: Any) -> Runner:
    torch.manual_seed(0)
    x = torch.randn(8, width)
    data = {"dataset": torch.utils.data.TensorDataset(x, x), "batch_size": 2}
    runner = Runner(
        nn.Linear(width, width), work_dir, loss=nn.MSELoss(), train_dataloader=data, train_cfg={"max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": "AdamW"}}, custom_hooks=list(hooks), **arguments,
    )  # fmt: skip
    runner.train()
    return runner


@ranks(2)
@pytest.mark.parametrize("where", ["optimizer", "meta", "ranks"])
def test_an_older_one_is_taken_on_every_rank(tmp_path: Path, where: str) -> None:
    work_dir = tmp_path / where
    first = trained(work_dir, 2, Saves(where))
    if get_rank() == 0 and where != "optimizer":

        def change(content: dict[str, Any]) -> None:
            if where == "meta":
                del content["meta"]["seed"]
            else:
                content["state"]["ranks"]["1"]["random"]["python"]["version"] = 99

        changed(first.run_dir / "epoch_2", change)
    barrier()
    resumed = trained(work_dir, 3, resume=True)
    assert resumed.run.resume_from == first.run_dir / "epoch_1"
    assert resumed.epoch == 3


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_with_wrong_bytes_is_passed_over_when_it_is_read(tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "width": 100, "randomness": {"seed": 1}}
    first = trained(tmp_path / "one", 2, **options)
    damaged = first.run_dir / "epoch_2"
    with main_process_first():
        if get_rank() == 0:
            file = max(damaged.glob("*.safetensors"))
            content = bytearray(file.read_bytes())
            header = read_manifest(damaged).files[file.name].header
            content[(header + len(content)) // 2] ^= 1
            file.write_bytes(content)
    resumed = trained(tmp_path / "one", 3, resume=True, **options)
    assert resumed.run.resume_from == first.run_dir / "epoch_1"
    whole = trained(tmp_path / "whole", 3, **options)
    for own, other in zip(resumed.run.model.parameters(), whole.run.model.parameters(), strict=True):
        assert getattr(own, "to_local", own.clone)().tolist() == getattr(other, "to_local", other.clone)().tolist()


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_together_read_each_block_once(tmp_path: Path, strategy: str) -> None:
    trained(tmp_path, 1, strategy=strategy, width=200)
    read: list[tuple[str, Block]] = []

    def counted(file: Any, block: Block, into: memoryview) -> None:
        read.append((str(file.name), block))
        read_block(file, block, into)

    with patch.object(loading, "read_block", counted), patch.object(verifying, "read_block", counted):
        trained(tmp_path, 2, strategy=strategy, width=200, resume=True)
    blocks = [one for of_rank in all_gather_object(read) for one in of_rank if one[1].size > 50_000]
    assert len(blocks) == len(set(blocks)) == (3 if strategy == "ddp" else 6)  # the weight and two moments


def test_in_a_copy_the_newest_is_that_which_says_so(tmp_path: Path) -> None:
    first = trained(tmp_path, 2)
    (tmp_path / POINTER_FILE).unlink()
    os.utime(first.run_dir / "epoch_1" / "manifest.json", (2e9, 2e9))  # copied last
    assert [one.name for one, fault in candidates(tmp_path)] == ["epoch_2", "epoch_1"]


def test_where_no_other_is_whole_both_faults_are_said(tmp_path: Path) -> None:
    first = trained(tmp_path, 2)
    changed(
        first.run_dir / "epoch_2",
        lambda content: content["state"]["ranks"]["0"]["random"]["python"].update(version=99),
    )
    (first.run_dir / "epoch_1" / "rank_0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"epoch_2 has a state of random generators"):
        trained(tmp_path, 3, resume=True)
    log = max(tmp_path.glob("*/log.txt")).read_text()
    assert f"not resumed from: {first.run_dir}/epoch_1/rank_0.safetensors must have" in log


def test_ranks_that_start_again_fall_back_although_resume_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained(tmp_path, 2)
    changed(
        first.run_dir / "epoch_2",
        lambda content: content["state"]["ranks"]["0"]["random"]["python"].update(version=99),
    )
    monkeypatch.setenv(RESUME_SINCE, "1")
    assert trained(tmp_path, 3).run.resume_from == first.run_dir / "epoch_1"


def test_ranks_that_start_again_fall_back_beyond_their_job_if_resume_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = trained(tmp_path, 1)
    began = str(time.time())
    first = trained(tmp_path, 2, resume=True)
    changed(
        first.run_dir / "epoch_2",
        lambda content: content["state"]["ranks"]["0"]["random"]["python"].update(version=99),
    )
    monkeypatch.setenv(RESUME_SINCE, began)
    assert trained(tmp_path, 3, resume=True).run.resume_from == earlier.run_dir / "epoch_1"


def test_one_that_the_user_names_is_an_error(tmp_path: Path) -> None:
    first = trained(tmp_path / "a", 2)
    changed(first.run_dir / "epoch_2", lambda content: content["meta"].pop("seed"))
    with pytest.raises(CheckpointError, match=r"epoch_2 must have what a run saves, but `meta` must have 'seed'"):
        trained(tmp_path / "b", 3, load_from=first.run_dir / "epoch_2", resume=True)
