"""Starting `tools/train.py` and `tools/test.py` of packages for MMEngine, and reading what they have found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
_NO_METRICS = {"utc", "mode", "epoch", "iter", "step", "time", "data_time", "memory", "memory_mib"}


class Task(NamedTuple):
    """A training of a package.

    Attributes:
        package: whose `tools/train.py` starts it.
        config: one of its configs.
        options: what makes it small, for `--cfg-options`.
        more: what the config lacks, as text in a config of its own that has this one as its base.
    """

    package: str
    config: str
    options: Sequence[str]
    more: str = ""


NO_WORKERS = [
    f"{mode}_dataloader.{key}" for mode in ("train", "val") for key in ("num_workers=0", "persistent_workers=False")
]
CLASSIFIER = Task(
    "mmpretrain",
    "resnet/resnet18_8xb16_cifar10.py",
    ["model.backbone.base_channels=8", "model.backbone.stem_channels=8", "model.head.in_channels=64",
     "param_scheduler.milestones=[1]", "param_scheduler.end=9", "default_hooks.logger.interval=1"],
    more="custom_imports = dict(imports=['own_cifar'])\n"
    "custom_hooks = [dict(type='EMAHook', momentum=0.01)]\n"
    "log_processor = dict(window_size=1)\n"
    "randomness = dict(seed=3)\n",
)  # fmt: skip
SEGMENTOR = Task(
    "mmseg",
    "unet/unet-s5-d16_fcn_4xb4-40k_drive-64x64.py",
    ["model.backbone.base_channels=4", "model.decode_head.in_channels=4", "model.decode_head.channels=8",
     "model.auxiliary_head.in_channels=8", "model.auxiliary_head.channels=8",
     "train_dataloader.dataset.dataset.pipeline.2.scale=(64,64)", "val_dataloader.dataset.pipeline.1.scale=(64,64)",
     "train_dataloader.dataset.times=10", "train_cfg.max_iters=4", "train_cfg.val_interval=2",
     "default_hooks.checkpoint.interval=2", "default_hooks.logger.interval=1", "log_processor.window_size=1",
     "randomness.seed=3", *NO_WORKERS],
)  # fmt: skip
DETECTOR = Task(
    "mmdet",
    "retinanet/retinanet_r18_fpn_1x_coco.py",
    ["model.backbone.init_cfg=None", "model.neck.out_channels=16", "model.bbox_head.in_channels=16",
     "model.bbox_head.feat_channels=16", "model.bbox_head.stacked_convs=1", "model.bbox_head.num_classes=2",
     "model.test_cfg.score_thr=0.0",
     "train_dataloader.dataset.pipeline.2.scale=(96,96)", "val_dataloader.dataset.pipeline.1.scale=(96,96)",
     "train_cfg.max_epochs=1", "default_hooks.logger.interval=1", "log_processor.window_size=1", "randomness.seed=3",
     *NO_WORKERS],
)  # fmt: skip


# Mosaic, an exponential average, another pipeline in the last epoch, images of another size in each batch.
YOLOX = Task(
    "mmdet",
    "yolox/yolox_tiny_8xb8-300e_coco.py",
    ["model.backbone.widen_factor=0.125", "model.neck.in_channels=[32,64,128]", "model.neck.out_channels=32",
     "model.bbox_head.in_channels=32", "model.bbox_head.feat_channels=32", "model.bbox_head.num_classes=2",
     "model.test_cfg.score_thr=0.0",
     "model.data_preprocessor.batch_augments.0.random_size_range=(64,128)",
     "model.data_preprocessor.batch_augments.0.interval=1",
     "train_dataloader.dataset.pipeline.0.img_scale=(96,96)", "train_dataloader.dataset.pipeline.1.border=(-48,-48)",
     "train_dataloader.dataset.pipeline.4.scale=(96,96)", "val_dataloader.dataset.pipeline.1.scale=(96,96)",
     "test_dataloader.dataset.pipeline.1.scale=(96,96)",
     "train_dataloader.batch_size=2", "train_cfg.max_epochs=2", "train_cfg.val_interval=1",
     "custom_hooks.0.num_last_epochs=1", "default_hooks.checkpoint.interval=1", "default_hooks.logger.interval=1",
     "log_processor.window_size=1", "randomness.seed=3", *NO_WORKERS],
)  # fmt: skip

_FOR_ALL = ["default_hooks.logger.interval=1", "log_processor.window_size=1", "randomness.seed=3", *NO_WORKERS]
POSE = Task(
    "mmpose",
    "body_2d_keypoint/topdown_heatmap/coco/td-hm_res50_8xb64-210e_coco-256x192.py",
    ["model.backbone.depth=18", "model.backbone.init_cfg=None", "model.head.in_channels=512",
     "model.head.deconv_out_channels=(16,16)", "model.head.deconv_kernel_sizes=(4,4)",
     "train_dataloader.batch_size=2", "train_dataloader.dataset.pipeline.6.encoder.heatmap_size=(24,32)",
     "model.head.decoder.heatmap_size=(24,32)", "val_dataloader.dataset.bbox_file=",
     "test_dataloader.dataset.bbox_file=", "param_scheduler.0.end=3", "param_scheduler.1.milestones=[1]",
     "train_cfg.val_interval=1", "default_hooks.checkpoint.interval=1", *_FOR_ALL],
)  # fmt: skip
ACTION = Task(
    "mmaction",
    "skeleton/stgcn/stgcn_8xb16-joint-u100-80e_ntu60-xsub-keypoint-2d.py",
    ["model.backbone.base_channels=8", "model.cls_head.num_classes=4", "model.cls_head.in_channels=32",
     "train_dataloader.batch_size=2", "train_dataloader.dataset.times=1", "test_dataloader.batch_size=2",
     "train_dataloader.dataset.dataset.pipeline.2.clip_len=20", "val_dataloader.dataset.pipeline.2.clip_len=20",
     "test_dataloader.dataset.pipeline.2.clip_len=20",
     "param_scheduler.0.T_max=2", "param_scheduler.0.end=3", *_FOR_ALL],
)  # fmt: skip
READER = Task(
    "mmocr",
    "textrecog/crnn/crnn_mini-vgg_5e_toy.py",
    ["train_dataloader.batch_size=2", "train_cfg.val_interval=1", *_FOR_ALL],
)
# Mosaic, parameter groups of its own, a hook that sets their rates, an average that updates itself.
YOLOV5 = Task(
    "mmyolo",
    "yolov5/yolov5_n-v61_syncbn_fast_8xb16-300e_coco.py",
    ["train_dataloader.batch_size=2", "train_dataloader.dataset.pipeline.2.img_scale=(96,96)",
     "train_dataloader.dataset.pipeline.3.border=(-48,-48)", "train_dataloader.dataset.filter_cfg.min_size=1",
     "val_dataloader.dataset.pipeline.1.scale=(96,96)", "val_dataloader.dataset.pipeline.2.scale=(96,96)",
     "test_dataloader.dataset.pipeline.1.scale=(96,96)", "test_dataloader.dataset.pipeline.2.scale=(96,96)",
     "val_dataloader.dataset.batch_shapes_cfg=None", "test_dataloader.dataset.batch_shapes_cfg=None",
     "model.bbox_head.head_module.num_classes=2", "model.test_cfg.score_thr=0.0",
     "default_hooks.param_scheduler.warmup_mim_iter=2", "default_hooks.param_scheduler.warmup_epochs=0",
     "train_cfg.val_interval=1", "default_hooks.checkpoint.interval=1", *_FOR_ALL],
    more="pipeline = [one for one in _base_.train_dataloader.dataset.pipeline if one['type'] != 'mmdet.Albu']\n"
    "train_dataloader = dict(dataset=dict(pipeline=pipeline))\n",  # without albumentations
)  # fmt: skip


def start(
    tool: str,
    task: Task,
    folder: Path,
    *arguments: str,
    ranks: int = 1,
    options: Sequence[str] = (),
    python: str = sys.executable,
) -> str:
    """Run a tool of a package in a folder, and return what it says.

    Args:
        tool: ``"train"`` or ``"test"``.
        task: what is trained; its data lie under `data` in the folder.
        folder: where it runs.
        *arguments: further arguments of the tool; the checkpoint comes first, where it takes one.
        ranks: where there are several, the package's `dist_train.sh` or `dist_test.sh` starts them.
        options: further `--cfg-options`.
        python: this Python, or that of another environment.
    """
    root = Path(find_spec(task.package).origin).parent / ".mim"
    config = root / "configs" / task.config
    if task.more:
        (folder / config.name).write_text(f"_base_ = [{str(config)!r}]\n{task.more}")
        config = folder / config.name
    checkpoint, arguments = (arguments[:1], arguments[1:]) if tool == "test" else ((), arguments)
    if ranks == 1:
        command = [python, str(root / "tools" / f"{tool}.py"), str(config), *checkpoint]
    else:
        command = ["bash", str(root / "tools" / f"dist_{tool}.sh"), str(config), *checkpoint, str(ranks)]
    command += [*arguments, "--cfg-options", *task.options, *options]
    paths = [str(HERE / "site"), str(HERE), str(folder / "data" / "cifar10")]
    if python == sys.executable:
        paths += [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    environ = {
        **os.environ,
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "PORT": str(29500 + os.getpid() % 1000),
        "OMP_NUM_THREADS": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0" if python == sys.executable else "1",
    }
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    return done.stdout + done.stderr


def losses(work_dir: Path) -> list[float]:
    """Return the loss of each iteration of the last run in a folder, of lockstep or of MMEngine."""
    return [one["loss"] for one in _records(work_dir) if "loss" in one and one.get("mode", "train") == "train"]


def metrics(work_dir: Path, mode: str) -> dict[str, float]:
    """Return the last metrics of the last run in a folder, of its validations (``"val"``) or of its test."""
    last = [one for one in _records(work_dir) if one.get("mode", mode) == mode and "loss" not in one][-1]
    return {name: value for name, value in last.items() if name not in _NO_METRICS}


def _records(work_dir: Path) -> list[dict[str, Any]]:
    ours, theirs = sorted(work_dir.glob("*/metrics.jsonl")), sorted(work_dir.glob("*/vis_data/scalars.json"))
    return [json.loads(line) for line in (ours or theirs)[-1].read_text().splitlines()]
