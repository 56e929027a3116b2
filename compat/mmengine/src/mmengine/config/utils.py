"""The distributions that packages of OpenMMLab are installed from."""

from __future__ import annotations

__all__ = ["MODULE2PACKAGE"]

_ALIKE = (
    "mmcls", "mmdet", "mmdet3d", "mmtrack", "mmpose", "mmedit", "mmocr", "mmgen", "mmfewshot", "mmrazor", "mmflow",
    "mmhuman3d", "mmrotate", "mmselfsup", "mmyolo", "mmpretrain", "mmagic",
)  # fmt: skip

MODULE2PACKAGE = {**{name: name for name in _ALIKE}, "mmseg": "mmsegmentation", "mmaction": "mmaction2"}
"""The name of the distribution of each package that can be imported."""
