"""Packages that were written for MMEngine: they import, their models have MMEngine's weights, losses and gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environments import run

IMPORTS = """
import importlib
for name in ("mmcv", "mmpretrain", "mmseg", "mmdet", "mmpose", "mmaction", "mmocr", "mmyolo"):
    answers[name] = importlib.import_module(name).__version__
    if name != "mmcv":
        for part in ("registry", "models", "datasets", "engine", "evaluation", "visualization"):
            if importlib.util.find_spec(f"{name}.{part}"):
                importlib.import_module(f"{name}.{part}")
    if name not in ("mmcv", "mmyolo"):
        importlib.import_module(f"{name}.apis")
"""

# Which names of MMEngine they use, and what is missing of them: `compat/mmengine/uses.py`, by the same Python.
USES = """
import runpy, sys
from importlib.util import find_spec
from pathlib import Path
uses = runpy.run_path(USES_OF)
packages = ("mmcv", "mmpretrain", "mmseg", "mmdet", "mmpose", "mmaction", "mmocr", "mmyolo")
found = uses["find_uses"]([Path(find_spec(name).origin).parent for name in packages])
answers["used"] = sorted(found)
answers["missing"] = {name: why for name in found if (why := uses["resolve"](name)[1])}
"""

BEGIN = """
import importlib
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import set_random_seed
from pathlib import Path

def build(package, config):
    there = importlib.import_module(package)
    cfg = Config.fromfile(Path(there.__file__).parent / ".mim" / "configs" / config)
    init_default_scope(package)
    models = importlib.import_module(package + ".registry").MODELS
    set_random_seed(3)
    if "data_preprocessor" in cfg:
        cfg.model.setdefault("data_preprocessor", cfg.data_preprocessor)
    cfg.model.backbone.pop("init_cfg", None)  # weights behind addresses
    cfg.model.pop("pretrained", None)
    for part in cfg.model.values():
        if isinstance(part, dict) and "norm_cfg" in part:
            part["norm_cfg"]["type"] = part["norm_cfg"]["type"].replace("SyncBN", "BN")
    model = models.build(cfg.model)
    model.init_weights()
    model.train()
    return model

def train(model, data):
    answers["parameters"] = sum(one.numel() for one in model.parameters())
    answers["weights"] = {name: one.double().sum().item() for name, one in model.state_dict().items()}
    set_random_seed(4)
    losses = model(**model.data_preprocessor(data, training=True), mode="loss")
    loss, values = model.parse_losses(losses)
    loss.backward()
    answers["losses"] = {name: one.item() for name, one in values.items()}
    grads = {name: one.grad for name, one in model.named_parameters()}
    answers["gradients"] = {name: one.double().sum().item() for name, one in grads.items() if one is not None}

def images(count, size):
    return list(torch.randint(0, 255, (count, 3, size, size), dtype=torch.uint8))
"""

CLASSIFIER = """
from mmpretrain.structures import DataSample
model = build("mmpretrain", CONFIG)
train(model, dict(inputs=images(4, SIZE), data_samples=[DataSample().set_gt_label(index) for index in range(4)]))
"""

DETECTOR = """
from mmdet.structures import DetDataSample
from mmengine.logging import MessageHub
from mmengine.structures import InstanceData
model = build("mmdet", CONFIG)
MessageHub.get_instance("test").update_info("iter", 1)  # YOLOX asks for it
samples = []
for index in range(2):
    boxes = torch.tensor([[4.0, 4, 30 + index, 40], [20, 10, 60, 50]])
    sample = DetDataSample(metainfo=dict(img_shape=(64, 64), ori_shape=(64, 64), scale_factor=(1.0, 1.0)))
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.tensor([index, 3]))
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    samples.append(sample)
train(model, dict(inputs=images(2, 64), data_samples=samples))
"""

SEGMENTOR = """
from mmseg.structures import SegDataSample
from mmengine.structures import PixelData
model = build("mmseg", CONFIG)
samples = []
for _ in range(2):
    sample = SegDataSample(metainfo=dict(img_shape=(64, 64), ori_shape=(64, 64)))
    sample.gt_sem_seg = PixelData(data=torch.randint(0, 19, (1, 64, 64)))
    samples.append(sample)
train(model, dict(inputs=images(2, 64), data_samples=samples))
"""


def test_packages_import(both):
    ours, theirs = both(IMPORTS)
    assert ours == theirs
    assert len(ours) == 8


def test_every_name_of_mmengine_that_they_use_is_there(tmp_path):
    found = run(sys.executable, USES.replace("USES_OF", repr(str(Path(__file__).parents[1] / "uses.py"))), tmp_path)
    assert len(found["used"]) > 250
    assert found["missing"] == {}


@pytest.mark.parametrize(
    ("script", "config", "size"),
    [
        (CLASSIFIER, "resnet/resnet18_8xb16_cifar10.py", 32),
        (CLASSIFIER, "mobilenet_v2/mobilenet-v2_8xb32_in1k.py", 64),
        (CLASSIFIER, "swin_transformer/swin-tiny_16xb64_in1k.py", 224),
        (DETECTOR, "retinanet/retinanet_r18_fpn_1x_coco.py", 64),
        (DETECTOR, "yolox/yolox_tiny_8xb8-300e_coco.py", 64),
        (SEGMENTOR, "pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py", 64),
    ],
)
def test_a_model_has_the_weights_losses_and_gradients_of_mmengine(both, script, config, size):
    ours, theirs = both(BEGIN + script.replace("CONFIG", repr(config)).replace("SIZE", str(size)))
    for what in ("parameters", "weights", "losses", "gradients"):
        assert ours[what] == theirs[what], what


# One model after the other, each from the same seed, as `build_models.py` builds and sums them up.
WEIGHTS = """
import importlib, logging
import build_models
importlib.import_module(PACKAGE + ".models")
for config in CONFIGS:
    cfg, model = build_models._build(PACKAGE, config)
    answers[config] = {name: build_models._digest(one) for name, one in model.state_dict().items()}
"""
SEEDED = {
    "mmpose": [
        "body_2d_keypoint/topdown_heatmap/coco/td-hm_hrnet-w32_8xb64-210e_coco-256x192.py",
        "body_2d_keypoint/topdown_heatmap/coco/td-hm_ViTPose-small_8xb64-210e_coco-256x192.py",
        "body_2d_keypoint/topdown_regression/coco/td-reg_res50_8xb64-210e_coco-256x192.py",
        "body_2d_keypoint/simcc/coco/simcc_res50_8xb64-210e_coco-256x192.py",
        "body_2d_keypoint/rtmpose/coco/rtmpose-t_8xb256-420e_coco-256x192.py",
        "body_2d_keypoint/rtmo/coco/rtmo-s_8xb32-600e_coco-640x640.py",
    ],
    "mmaction": [
        "recognition/tsn/tsn_imagenet-pretrained-r50_8xb32-1x1x3-100e_kinetics400-rgb.py",
        "recognition/slowonly/slowonly_r50_8xb16-4x16x1-256e_kinetics400-rgb.py",
        "recognition/mvit/mvit-small-p244_32xb16-16x4x1-200e_kinetics400-rgb.py",
        "recognition/x3d/x3d_s_13x6x1_facebook-kinetics400-rgb.py",
        "localization/bmn/bmn_2xb8-400x100-9e_activitynet-feature.py",
        "skeleton/stgcn/stgcn_8xb16-joint-u100-80e_ntu60-xsub-keypoint-2d.py",
    ],
    "mmocr": [
        "textdet/dbnet/dbnet_resnet18_fpnc_1200e_icdar2015.py",
        "textdet/maskrcnn/mask-rcnn_resnet50_fpn_160e_icdar2015.py",
        "textrecog/crnn/crnn_mini-vgg_5e_mj.py",
        "textrecog/satrn/satrn_shallow-small_5e_st_mj.py",
        "textrecog/svtr/svtr-tiny_20e_st_mj.py",
        "kie/sdmgr/sdmgr_unet16_60e_wildreceipt.py",
    ],
    "mmyolo": [
        "yolov5/yolov5_n-v61_syncbn_fast_8xb16-300e_coco.py",
        "yolov6/yolov6_n_syncbn_fast_8xb32-400e_coco.py",
        "yolov7/yolov7_tiny_syncbn_fast_8x16b-300e_coco.py",
        "yolov8/yolov8_n_syncbn_fast_8xb16-500e_coco.py",
        "rtmdet/rtmdet_tiny_syncbn_fast_8xb32-300e_coco.py",
        "ppyoloe/ppyoloe_plus_s_fast_8xb8-80e_coco.py",
    ],
}


@pytest.mark.parametrize("package", SEEDED)
def test_models_have_the_seeded_weights_of_mmengine(both, package):
    ours, theirs = both(WEIGHTS.replace("PACKAGE", repr(package)).replace("CONFIGS", repr(SEEDED[package])))
    assert ours == theirs
    assert len(ours) == 6
