"""A small batch of noise for any model of the packages, from the seeded generators of NumPy and torch."""

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
    if package == "mmaction":
        for shape in CLIPS:
            yield f"clips of {' x '.join(map(str, shape))}", partial(_action, shape)
        return
    words = [(32, 100), (32, 128), (64, 256)] if "Recog" in type(model.data_preprocessor).__name__ else [(128, 128)]
    sizes = {"mmpose": [(256, 192), (256, 256), (64, 64)], "mmocr": words}
    make = {"mmdet": _detection, "mmyolo": _fast_detection, "mmpose": _pose, "mmocr": _text}.get(package, _segmentation)
    for height, width in sizes.get(package, [(64, 64), (128, 128)]):
        size = (height,) if height == width else (height, width)
        yield f"images of {height} x {width}", partial(make, *size)
        if package == "mmyolo":
            yield f"listed images of {height} x {width}", partial(_fast_detection, height, is_list=True)


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


def _images(height: int, width: int | None = None) -> list[torch.Tensor]:
    return list(torch.randint(0, 256, (BATCH, 3, height, width or height), dtype=torch.uint8))


def _metainfo(height: int, width: int | None = None) -> dict[str, Any]:
    shape = (height, width or height)
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


def _fast_detection(size: int, is_list: bool = False) -> dict[str, Any]:
    """Return boxes of all images in one tensor, with the number of the image and the label before them."""
    boxes = [[number, number % 2, 4.0, 4, 30 + number, 40] for number in range(BATCH)]
    samples = {"bboxes_labels": torch.tensor(boxes), "img_metas": [_metainfo(size)] * BATCH}
    images = _images(size)
    return {"inputs": images if is_list else torch.stack(images), "data_samples": samples}


def _pose(height: int, width: int | None = None) -> dict[str, Any]:
    from mmpose.structures import PoseDataSample

    samples = [PoseDataSample(metainfo=_metainfo(height, width)) for _ in range(BATCH)]
    return {"inputs": _images(height, width), "data_samples": samples}


# Frames one by one, and as videos; joints of skeletons, and heatmaps of them; features of videos.
CLIPS = (
    (8, 3, 64, 64), (1, 3, 8, 64, 64), (1, 3, 16, 224, 224), (8, 3, 224, 224), (1, 2, 20, 17, 3), (1, 2, 20, 25, 3),
    (1, 17, 8, 56, 56), (3, 8, 64, 64), (400, 100),
)  # fmt: skip


def _action(shape: tuple[int, ...]) -> dict[str, Any]:
    from mmaction.structures import ActionDataSample

    is_image = 3 in shape[:3] and shape[-1] > 60
    make = partial(torch.randint, 0, 256, dtype=torch.uint8) if is_image else torch.rand
    samples = [ActionDataSample(metainfo=_metainfo(64)).set_gt_label(number) for number in range(BATCH)]
    return {"inputs": [make(shape) for _ in range(BATCH)], "data_samples": samples}


def _text(height: int, width: int | None = None) -> dict[str, Any]:
    """Return words, or where the words of a page are."""
    from mmocr.structures import TextDetDataSample, TextRecogDataSample

    from mmengine.structures import InstanceData, LabelData

    samples = []
    for number in range(BATCH):
        metainfo = {**_metainfo(height, width), "valid_ratio": 1.0}
        if width is None:
            sample = TextDetDataSample(metainfo=metainfo)
            boxes = torch.tensor([[4.0, 4, 60 + number, 40], [20, 60, 100, 90]])
            polygons = [np.array([a, b, c, b, c, d, a, d], np.float32) for a, b, c, d in boxes.tolist()]
            sample.gt_instances = InstanceData(
                bboxes=boxes, polygons=polygons, labels=torch.zeros(2, dtype=torch.long), ignored=torch.zeros(2).bool()
            )
        else:
            sample = TextRecogDataSample(metainfo=metainfo)
            sample.gt_text = LabelData(item="word"[number:])
        samples.append(sample)
    return {"inputs": _images(height, width), "data_samples": samples}
