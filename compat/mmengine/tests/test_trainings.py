"""Trainings that the packages' own `tools/train.py` starts, from their own configs, on one rank and on two."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from environments import REFERENCE, run
from synthetic import cifar10, coco, drive, people, skeletons
from trainings import (
    ACTION,
    CLASSIFIER,
    DETECTOR,
    POSE,
    SEGMENTOR,
    YOLOX,
    losses,
    metrics,
    start,
)

import lockstep.weights
from mmengine.runner import CheckpointLoader, export_checkpoint

FSDP = "model_wrapper_cfg.type=MMFullyShardedDataParallel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small data of each kind."""
    cifar10(tmp_path / "data" / "cifar10", train=160, test=20)
    drive(tmp_path / "data" / "DRIVE", train=8, val=2)
    coco(tmp_path / "data" / "coco", train=8, val=2)
    people(tmp_path / "data" / "coco")
    skeletons(tmp_path / "data" / "skeleton" / "ntu60_2d.pkl")
    return tmp_path


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
def test_a_classifier_has_the_losses_of_mmengine_and_each_resumes_from_the_other(folder):
    def trained(work_dir, epochs, *arguments, python=sys.executable):
        options = [f"train_cfg.max_epochs={epochs}"]
        start("train", CLASSIFIER, folder, "--work-dir", work_dir, *arguments, options=options, python=python)
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


# How far each task trains first, and then, resumed.
LENGTHS = {
    "classifier": (CLASSIFIER, "train_cfg.max_epochs=1", "train_cfg.max_epochs=2"),
    "segmentor": (SEGMENTOR, "train_cfg.max_iters=4", "train_cfg.max_iters=6"),
    "RetinaNet": (DETECTOR, "train_cfg.max_epochs=1", "train_cfg.max_epochs=2"),
    "YOLOX": (YOLOX, "train_cfg.max_epochs=2", "train_cfg.max_epochs=3"),
}
ON_ONE_RANK = {
    "pose": (POSE, "train_cfg.max_epochs=2", "train_cfg.max_epochs=3"),
    "skeletons": (ACTION, "train_cfg.max_epochs=2", "train_cfg.max_epochs=3"),
}
# mmdet's SyncNormHook concatenates weights, which FSDP shards, and buffers, and raises; one without effect replaces it.
UNDER_FSDP = {"YOLOX": ["custom_hooks.1.type=EmptyCacheHook"]}
LAYOUTS = {"one rank": (1, []), "two ranks, DDP": (2, []), "two ranks, FSDP": (2, [FSDP])}


def trains(folder: Path, name: str, layout: str, *then: str) -> None:
    """Train, validate and save; then ``"resume"``, ``"test"`` the checkpoint, or train with ``"amp"``."""
    task, short, long = (LENGTHS | ON_ONE_RANK)[name]
    ranks, wrapper = LAYOUTS[layout]
    wrapper = [*wrapper, *(UNDER_FSDP.get(name, []) if FSDP in wrapper else [])]

    def trained(work_dir: str, length: str, *arguments: str) -> str:
        said = start("train", task, folder, "--work-dir", work_dir, *arguments, ranks=ranks, options=[length, *wrapper])
        found = losses(folder / work_dir)
        assert len(found) >= 2
        assert all(map(math.isfinite, found))
        return said

    trained("work", short)
    saved = [manifest.parent for manifest in (folder / "work").glob("*/*/manifest.json")]
    assert saved
    if ranks == 1 and REFERENCE:  # a validation between, dropout, augmentations in the main process
        start("train", task, folder, "--work-dir", "theirs", options=[short], python=REFERENCE)
        assert losses(folder / "work") == losses(folder / "theirs")
        assert metrics(folder / "work", "val") == metrics(folder / "theirs", "val") != {}
    if "test" in then:
        options = [one.replace("val_dataloader", "test_dataloader") for one in task.options if "val_dataloader" in one]
        checkpoint = str(max(saved, key=lambda one: one.stat().st_mtime))
        start("test", task, folder, checkpoint, "--work-dir", "test", ranks=ranks, options=[*options, *wrapper])
        assert metrics(folder / "test", "test") == metrics(folder / "work", "val")
    if "resume" in then:
        assert "resumed from" in trained("work", long, "--resume")
    if "amp" in then:
        trained("amp", short, "--amp")


@pytest.mark.parametrize(
    ("name", "layout", "then"),
    [
        ("segmentor", "one rank", "resume"),
        ("RetinaNet", "one rank", "test"),
        ("classifier", "two ranks, FSDP", "resume"),
        ("segmentor", "two ranks, DDP", "amp"),
        ("RetinaNet", "two ranks, FSDP", ""),
        ("pose", "one rank", ""),
        ("skeletons", "one rank", ""),
    ],
)
def test_it_trains_validates_and_saves(folder, name, layout, then):
    trains(folder, name, layout, then)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LENGTHS)
def test_it_trains_validates_saves_resumes_is_tested_and_trains_with_amp(folder, name, layout):
    trains(folder, name, layout, "test", "resume", "amp")
