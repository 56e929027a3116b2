"""Test-only stand-ins for compiled operators that PyPI has no build of for this torch; the same in both environments.

* torchvision from PyPI is built for CUDA and cannot load its operators beside a torch for the CPU: its import needs two
  names. Nothing here calls them.
* mmcv-lite has no operators: `mmcv._ext` is a module in which every operator is there, and raises an error if called.
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


ext = ModuleType("mmcv._ext")
ext.__spec__ = ModuleSpec("mmcv._ext", None)
ext.__getattr__ = _operator
sys.modules["mmcv._ext"] = ext
