"""Test-only stand-ins for compiled operators that PyPI has no build of for this torch; the same in both environments.

* torchvision from PyPI is built for CUDA and cannot load its operators beside a torch for the CPU: its import needs two
  names. Nothing here calls them.
* mmcv-lite has no operators: `mmcv._ext` is a module in which every operator is there, and raises an error if called;
  except those that most detectors need, in plain torch: `nms`, and `roi_align` by the mean.
"""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


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
