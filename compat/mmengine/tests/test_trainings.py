"""Trainings that the packages' own `tools/train.py` starts, from their own configs, on one rank and on two."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from environments import REFERENCE, run
from synthetic import cifar10, coco, drive
from trainings import CLASSIFIER, DETECTOR, SEGMENTOR, Task, losses, train

import lockstep.weights
from mmengine.runner import CheckpointLoader, export_checkpoint

FSDP = "model_wrapper_cfg.type=MMFullyShardedDataParallel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small data of each kind."""
    cifar10(tmp_path / "data" / "cifar10", train=160, test=20)
    drive(tmp_path / "data" / "DRIVE", train=8, val=2)
    coco(tmp_path / "data" / "coco", train=8, val=2)
    return tmp_path


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
def test_a_classifier_has_the_losses_of_mmengine_and_each_resumes_from_the_other(folder):
    def trained(work_dir, epochs, *arguments, python=sys.executable):
        train(CLASSIFIER, folder, "--work-dir", work_dir, *arguments, options=[f"train_cfg.max_epochs={epochs}"],
              python=python)  # fmt: skip
        return losses(folder / work_dir)

    theirs = trained("theirs", 2, python=REFERENCE)
    ours = trained("ours", 2)
    assert len(theirs) == 20
    assert ours == theirs  # data order, augmentations of two workers, initial weights, BatchNorm, a schedule

    file = folder / "theirs" / "epoch_2.pth"
    on = trained("theirs_on", 3, "--resume", str(file), python=REFERENCE)
    assert len(on) == 10
    assert trained("ours_from_theirs", 3, "--resume", str(file)) == on

    # Its weights alone are read by MMEngine, too.
    lockstep.weights.export_checkpoint(folder / "ours", folder / "weights.pth", "torch")
    script = f"""
from mmengine.runner.checkpoint import _load_checkpoint
answers["names"] = sorted(_load_checkpoint({str(folder / "weights.pth")!r}, map_location="cpu")["state_dict"])
"""
    weights = CheckpointLoader.load_checkpoint(file)["state_dict"]
    assert run(REFERENCE, script, folder)["names"] == sorted(weights)

    export_checkpoint(folder / "ours", folder / "ours.pth")
    assert trained("theirs_from_ours", 3, "--resume", str(folder / "ours.pth"), python=REFERENCE) == on


@pytest.mark.parametrize(
    ("task", "ranks", "arguments", "options", "longer"),
    [
        (SEGMENTOR, 1, [], [], ["train_cfg.max_iters=6"]),
        (DETECTOR, 1, [], [], []),
        (CLASSIFIER, 2, [], ["train_cfg.max_epochs=1", FSDP], ["train_cfg.max_epochs=2", FSDP]),
        (SEGMENTOR, 2, ["--amp"], [], []),
        (DETECTOR, 2, [], [FSDP], []),
    ],
    ids=lambda value: value.package if isinstance(value, Task) else None,
)
def test_it_trains_validates_saves_and_resumes(folder, task, ranks, arguments, options, longer):
    start = ["2"] if ranks == 2 else []
    train(task, folder, *start, "--work-dir", "work", *arguments, options=options)
    found = losses(folder / "work")
    assert len(found) >= 2
    assert all(map(math.isfinite, found))
    assert list((folder / "work").glob("*/*/manifest.json"))
    if ranks == 1 and REFERENCE:  # a validation between, dropout, augmentations in the main process
        train(task, folder, "--work-dir", "theirs", options=options, python=REFERENCE)
        assert found == losses(folder / "theirs")
    if longer:
        said = train(task, folder, *start, "--work-dir", "work", "--resume", *arguments, options=longer)
        assert "resumed from" in said
        assert all(map(math.isfinite, losses(folder / "work")))
