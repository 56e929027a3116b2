"""Test-only stand-ins for what PyPI has no build of for this torch or numpy; the same in both environments.

* torchvision from PyPI is built for CUDA and cannot load its operators beside a torch for the CPU: its import needs two
  names. Nothing here calls them.
* mmcv-lite has no operators: `mmcv._ext` is a module in which every operator is there, and raises an error if called;
  except those that most detectors need, in plain torch: `nms`, and `roi_align` by the mean.
* The compiled module of xtcocotools (mmpose) is built for numpy 1; that of pycocotools, which it comes from, is not.
* imgaug (mmocr) asks numpy for lists of types that numpy 2 no longer has.
* The wheel of mmaction2 lacks a folder with one model, DRN, which its own code imports.
* MMEngine makes a CUDA device the present one when it joins several ranks: without CUDA, that does nothing here.
* mmocr and mmyolo refuse mmcv 2.1, mmocr also mmdet 3.2 or later, which the other packages are tested with. They run
  with them: when they are imported, the two say that they are older.
"""

import math
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if not torch.cuda.is_available():
    torch.cuda.set_device = lambda device: None


def _operator(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args, **kwargs):
        raise NotImplementedError(f"the operator {name} of mmcv is not built here")

    return call


def _nms(boxes, scores, iou_threshold, offset):
    """Return the indices of the boxes that are kept, the one with the highest score first."""
    left, kept = scores.argsort(descending=True), []
    sizes = (boxes[:, 2:] - boxes[:, :2] + offset).prod(1)
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        corners = torch.cat([boxes[left, :2].maximum(boxes[best, :2]), boxes[left, 2:].minimum(boxes[best, 2:])], 1)
        shared = (corners[:, 2:] - corners[:, :2] + offset).clamp(min=0).prod(1)
        left = left[shared <= iou_threshold * (sizes[left] + sizes[best] - shared)]
    return torch.stack(kept) if kept else left


def _roi_align_forward(
    features, rois, output, argmax_y, argmax_x, *, aligned_height, aligned_width, spatial_scale, sampling_ratio,
    pool_mode, aligned,
):  # fmt: skip
    """Fill `output` with the mean of bilinear samples in each bin of each box."""
    _require_mean(pool_mode)
    bins = aligned_height, aligned_width
    for index, (image, rows, columns) in enumerate(
        _samples(rois, features.shape, bins, spatial_scale, sampling_ratio, aligned)
    ):
        output[index] = rows @ features[image] @ columns.T


def _roi_align_backward(
    gradient, rois, argmax_y, argmax_x, of_features, *, aligned_height, aligned_width, spatial_scale, sampling_ratio,
    pool_mode, aligned,
):  # fmt: skip
    """Add to `of_features` the gradient of the features."""
    _require_mean(pool_mode)
    bins = aligned_height, aligned_width
    for index, (image, rows, columns) in enumerate(
        _samples(rois, of_features.shape, bins, spatial_scale, sampling_ratio, aligned)
    ):
        of_features[image] += rows.T @ gradient[index] @ columns


def _require_mean(pool_mode):
    if pool_mode != 1:
        raise NotImplementedError("roi_align of mmcv by the maximum is not built here")


def _samples(rois, shape, bins, scale, ratio, aligned):
    """Yield of each box its image, and the weights of rows and columns of the features: samples are products."""
    for image, *corners in rois.tolist():
        x, y, right, bottom = (corner * scale - (0.5 if aligned else 0.0) for corner in corners)
        height, width = bottom - y, right - x
        if not aligned:
            height, width = max(height, 1.0), max(width, 1.0)
        yield (
            int(image),
            _bilinear(y, height, bins[0], shape[2], ratio).to(rois),
            _bilinear(x, width, bins[1], shape[3], ratio).to(rois),
        )


def _bilinear(start, size, bins, length, ratio):
    """Return for each bin the weight of each place on one axis."""
    samples = ratio if ratio > 0 else max(math.ceil(size / bins), 0)
    if samples == 0:
        return torch.zeros(bins, length)
    at = start + (torch.arange(bins * samples) + 0.5) * (size / (bins * samples))
    is_inside = ((at >= -1) & (at <= length)).float()
    at = at.clamp(0, length - 1)
    low = at.floor()
    places = torch.stack([low, (low + 1).clamp(max=length - 1)], 1).long()
    weights = torch.stack([1 - (at - low), at - low], 1) * is_inside[:, None]
    return torch.zeros(bins * samples, length).scatter_add_(1, places, weights).view(bins, samples, length).mean(1)


ext = ModuleType("mmcv._ext")
ext.__spec__ = ModuleSpec("mmcv._ext", None)
ext.__getattr__ = _operator
ext.nms = _nms
ext.roi_align_forward, ext.roi_align_backward = _roi_align_forward, _roi_align_backward
sys.modules["mmcv._ext"] = ext


class _LoadsLate(MetaPathFinder):
    """Prepares what a package needs, as soon as it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "xtcocotools":
            import pycocotools._mask

            sys.modules["xtcocotools._mask"] = pycocotools._mask
        elif name == "imgaug" and not hasattr(np, "sctypes"):
            kinds = {"float": "efdg", "int": "bhilq", "uint": "BHILQ"}
            np.sctypes = {kind: [np.dtype(code).type for code in codes] for kind, codes in kinds.items()}
        elif name == "mmaction.models.localizers":
            drn = ModuleType(f"{name}.drn.drn")
            drn.DRN = type("DRN", (), {})
            sys.modules[f"{name}.drn"], sys.modules[drn.__name__] = ModuleType(f"{name}.drn"), drn
        elif name in ("mmocr", "mmyolo"):
            import mmcv
            import mmdet

            mmcv.__version__, mmdet.__version__ = "2.0.1", "3.1.0"


sys.meta_path.insert(0, _LoadsLate())
