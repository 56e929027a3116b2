"""Test-only stand-ins for compiled operators that PyPI has no build of for this torch; the same in both environments.

* torchvision from PyPI is built for CUDA and cannot load its operators beside a torch for the CPU: its import needs two
  names. Nothing here calls them.
* mmcv-lite has no operators: `mmcv._ext` is a module in which every operator is there, and raises an error if called;
  except `nms`, which the validation of detectors needs, in plain torch.
"""

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


ext = ModuleType("mmcv._ext")
ext.__spec__ = ModuleSpec("mmcv._ext", None)
ext.__getattr__ = _operator
ext.nms = _nms
sys.modules["mmcv._ext"] = ext
