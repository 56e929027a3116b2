"""A small batch of noise for any model of mmpretrain, mmdet or mmseg, from the seeded generators of NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

BATCH = 2


def batches(package: str, cfg: Any, model: torch.nn.Module) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield what batches for a model's data preprocessor are made of, and what makes them, the most telling first."""
    if package == "mmpretrain":
        yield from _classification(cfg, model)
        return
    for size in (64, 128):
        make = _detection if package == "mmdet" else _segmentation
        yield f"images of {size} x {size}", partial(make, size)


def _classification(cfg: Any, model: torch.nn.Module) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    labels = [1, 0] if "MultiLabel" in str(cfg.model.get("head", {}).get("type")) else 1
    pipeline = _find(cfg.get("train_dataloader") or {}, "pipeline")
    if pipeline:
        yield "images of its own pipeline", partial(_through, pipeline, labels)
    size = getattr(getattr(model, "backbone", None), "img_size", 224)
    yield "images", partial(_plain, np.broadcast_to(size, 2).tolist(), labels)


def _through(pipeline: list[Any], labels: int | list[int]) -> dict[str, Any]:
    from mmengine.dataset import Compose, default_collate

    steps = Compose([one for one in pipeline if "Load" not in str(one["type"])])
    return default_collate([steps(dict(_picture(), gt_label=labels)) for _ in range(BATCH)])


def _plain(size: list[int], labels: int | list[int]) -> dict[str, Any]:
    from mmpretrain.structures import DataSample

    inputs = list(torch.randint(0, 256, (BATCH, 3, *size), dtype=torch.uint8))
    return {"inputs": inputs, "data_samples": [DataSample().set_gt_label(labels) for _ in inputs]}


def _picture() -> dict[str, Any]:
    image = np.random.randint(0, 256, (256, 256, 3), dtype=np.uint8)
    return {"img": image, "img_shape": (256, 256), "ori_shape": (256, 256), "img_path": "noise.png", "sample_idx": 0}


def _find(cfg: dict[str, Any], key: str) -> Any:
    """Return the pipeline of a dataset, which wrappers may hold."""
    while cfg and key not in cfg:
        cfg = cfg.get("dataset")
    return cfg and cfg[key]


def _images(size: int) -> list[torch.Tensor]:
    return list(torch.randint(0, 256, (BATCH, 3, size, size), dtype=torch.uint8))


def _metainfo(size: int) -> dict[str, Any]:
    shape = (size, size)
    return {"img_shape": shape, "ori_shape": shape, "pad_shape": shape, "scale_factor": (1.0, 1.0), "flip": False,
            "img_path": "noise.png", "img_id": 0, "homography_matrix": np.eye(3),
            "text": "person. car. bicycle.", "custom_entities": True}  # fmt: skip


def _detection(size: int) -> dict[str, Any]:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    from mmengine.structures import InstanceData, PixelData

    samples = []
    for number in range(BATCH):
        sample = DetDataSample(metainfo=_metainfo(size))
        boxes = torch.tensor([[4.0, 4, 30 + number, 40], [20, 10, 60, 50]])
        masks = np.zeros((2, size, size), np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        labels = torch.tensor([number % 2, 0])
        sample.gt_instances = InstanceData(bboxes=boxes, labels=labels, masks=BitmapMasks(masks, size, size))
        sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
        sample.proposals = InstanceData(bboxes=boxes + 2, scores=torch.ones(2))
        sample.gt_sem_seg = PixelData(sem_seg=torch.randint(0, 2, (1, size, size)))
        samples.append(sample)
    return {"inputs": _images(size), "data_samples": samples}


def _segmentation(size: int) -> dict[str, Any]:
    from mmseg.structures import SegDataSample

    from mmengine.structures import PixelData

    samples = []
    for _ in range(BATCH):
        sample = SegDataSample(metainfo=_metainfo(size))
        sample.gt_sem_seg = PixelData(data=torch.randint(0, 2, (1, size, size)))
        sample.gt_edge_map = PixelData(data=torch.randint(0, 2, (1, size, size)))
        sample.gt_depth_map = PixelData(data=torch.rand(1, size, size))
        samples.append(sample)
    return {"inputs": _images(size), "data_samples": samples}
