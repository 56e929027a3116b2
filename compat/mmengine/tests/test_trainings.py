"""Trainings that the packages' own `tools/train.py` starts, from their own configs, on one rank and on two."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from environments import REFERENCE, run
from synthetic import cifar10, coco, drive, people, skeletons, words
from trainings import (
    ACTION,
    CLASSIFIER,
    DETECTOR,
    NO_WORKERS,
    POSE,
    READER,
    SEGMENTOR,
    YOLOV5,
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
    words(tmp_path / "tests" / "data" / "rec_toy_dataset")
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
answers["names"] = sorted(_load_checkpoint({str(folder / "weights.pth")!r}, map_location="cpu"))
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
    "pose": (POSE, "train_cfg.max_epochs=2", "train_cfg.max_epochs=3"),
    "skeletons": (ACTION, "train_cfg.max_epochs=2", "train_cfg.max_epochs=3"),
    "words": (READER, "train_cfg.max_epochs=2", "train_cfg.max_epochs=3"),
    "YOLOv5": (YOLOV5, "train_cfg.max_epochs=2", "train_cfg.max_epochs=3"),
}
# Saves in the middle of an epoch, on one rank or on two.
OFTEN = [f"default_hooks.checkpoint.{one}" for one in ("by_epoch=False", "interval=3", "max_keep_ckpts=-1")]
# Of each package that is not compared in one longer training of its own.
PACKAGES = ["skeletons", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("pose", "words", "YOLOv5"))]


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
@pytest.mark.parametrize("name", PACKAGES)
def test_each_resumes_from_a_file_of_the_other(folder, name):
    task, short, long = LENGTHS[name]

    def trained(work_dir, length, python, file=None):
        if file is not None:  # `--resume` looks it up there
            (folder / work_dir).mkdir()
            (folder / work_dir / "last_checkpoint").write_text(str(file))
        resume = [] if file is None else ["--resume"]
        start("train", task, folder, "--work-dir", work_dir, *resume, options=[length], python=python)
        return losses(folder / work_dir)

    theirs = trained("theirs", short, REFERENCE)
    assert trained("ours", short, sys.executable) == theirs
    file = folder / "theirs" / "epoch_2.pth"
    on = trained("theirs_on", long, REFERENCE, file)
    assert len(on) == 4
    assert trained("ours_from_theirs", long, sys.executable, file) == on
    export_checkpoint(folder / "ours", folder / "ours.pth")
    assert trained("theirs_from_ours", long, REFERENCE, folder / "ours.pth") == on


ON_TWO_RANKS = ["env_cfg.dist_cfg.backend=gloo", "model_wrapper_cfg.type=MMDistributedDataParallel"]
# MMEngine gives DDP a device by itself, and torch's DDP takes no SyncBatchNorm on the CPU.
THEIRS_ON_TWO_RANKS = ["model_wrapper_cfg.device_ids=None"]
WITHOUT_SYNC = {"YOLOv5": ["model.use_syncbn=False"]}


@pytest.mark.skipif(
    not REFERENCE, reason="MMENGINE_REFERENCE must be the Python of an environment with MMEngine 0.10.7"
)
@pytest.mark.parametrize("name", PACKAGES)
def test_each_rank_has_its_losses_of_mmengines_ddp(folder, name):
    task, length, _ = LENGTHS[name]
    note = "custom_imports = dict(imports=['rank_losses'])\ndefault_hooks = dict(noted=dict(type='RankLosses'))\n"
    task = task._replace(more=task.more + note)
    for work_dir, python, more in (("ours", sys.executable, []), ("theirs", REFERENCE, THEIRS_ON_TWO_RANKS)):
        options = [length, *ON_TWO_RANKS, *WITHOUT_SYNC.get(name, []), *more]
        start("train", task, folder, "--work-dir", work_dir, ranks=2, options=options, python=python)
    ours, theirs = (
        [(folder / work_dir / f"losses_{rank}.txt").read_text().split() for rank in (0, 1)]
        for work_dir in ("ours", "theirs")
    )
    assert ours == theirs
    assert [len(one) for one in ours] == [4, 4]


# mmdet's SyncNormHook concatenates weights, which FSDP shards, and buffers, and raises; one without effect replaces it.
UNDER_FSDP = {"YOLOX": ["custom_hooks.1.type=EmptyCacheHook"]}
# Its model makes arrays of numpy, which has no bfloat16. So does that of "pose", which float16 makes slow on a CPU.
AMP = {"skeletons": ["optim_wrapper.dtype=float16"]}
# Without what no checkpoint holds, here and there: the numbers of workers, the size that YOLOX has drawn for the next
# batch; and without the change of its pipeline, which comes so many epochs before the end.
STILL = {
    "classifier": NO_WORKERS,
    "YOLOX": ["model.data_preprocessor.batch_augments=None", "custom_hooks.0.num_last_epochs=300"],
}
LAYOUTS = {"one rank": (1, []), "two ranks, DDP": (2, []), "two ranks, FSDP": (2, [FSDP])}


def trains(folder: Path, name: str, layout: str, *then: str) -> None:
    """Train, validate and save; then ``"resume"``, ``"test"`` the checkpoint, or train with ``"amp"``."""
    task, short, long = LENGTHS[name]
    ranks, wrapper = LAYOUTS[layout]
    wrapper = [*wrapper, *(UNDER_FSDP.get(name, []) if FSDP in wrapper else [])]

    def trained(work_dir: str, length: str, *arguments: str, options: Sequence[str] = ()) -> list[float]:
        options = [length, *wrapper, *options]
        start("train", task, folder, "--work-dir", work_dir, *arguments, ranks=ranks, options=options)
        found = losses(folder / work_dir)
        assert found
        assert all(map(math.isfinite, found))
        return found

    found = trained("work", short)
    saved = [manifest.parent for manifest in (folder / "work").glob("*/*/manifest.json")]
    assert saved
    if name != "YOLOX":  # which finds nothing yet
        assert set(metrics(folder / "work", "val").values()) - {0.0, -1.0}
    if ranks == 1 and REFERENCE:  # a validation between, dropout, augmentations in the main process
        start("train", task, folder, "--work-dir", "theirs", options=[short], python=REFERENCE)
        assert found == losses(folder / "theirs")
        assert metrics(folder / "work", "val") == metrics(folder / "theirs", "val")
    if "test" in then:
        options = [one.replace("val_dataloader", "test_dataloader") for one in task.options if "val_dataloader" in one]
        checkpoint = str(max(saved, key=lambda one: one.stat().st_mtime))
        start("test", task, folder, checkpoint, "--work-dir", "test", ranks=ranks, options=[*options, *wrapper])
        assert metrics(folder / "test", "test") == metrics(folder / "work", "val")
    if "resume" in then:
        still = STILL.get(name, [])
        first = trained("work", short, options=still) if still else found
        whole = trained("whole", long, options=[*OFTEN, *still])
        middle = next((folder / "whole").glob("*/iter_3"))
        shutil.copytree(middle, folder / "middle" / middle.parent.name / middle.name)
        for resumed, done in (("work", len(first)), ("middle", 3)):
            assert trained(resumed, long, "--resume", options=still) == whole[done:]
            assert metrics(folder / resumed, "val") == metrics(folder / "whole", "val")
    if "amp" in then and name != "pose":
        trained("amp", short, "--amp", options=AMP.get(name, []))


@pytest.mark.parametrize(
    ("name", "layout", "then"),
    [
        ("segmentor", "one rank", "resume"),
        ("RetinaNet", "one rank", "test"),
        ("classifier", "two ranks, FSDP", "resume"),
        ("segmentor", "two ranks, DDP", "amp"),
        ("RetinaNet", "two ranks, FSDP", ""),
        ("pose", "one rank", "resume"),
        ("skeletons", "one rank", "resume"),
        ("words", "one rank", "resume"),
        ("YOLOv5", "one rank", "resume"),
        ("skeletons", "two ranks, DDP", ""),
    ],
)
def test_it_trains_validates_and_saves(folder, name, layout, then):
    trains(folder, name, layout, then)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LENGTHS)
def test_it_trains_validates_saves_resumes_is_tested_and_trains_with_amp(folder, name, layout):
    trains(folder, name, layout, "test", "resume", "amp")
