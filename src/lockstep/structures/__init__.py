"""Containers for the data of one sample: instances, pixels, labels, and metainfo.

Every class here is a tree (`lockstep.tree.TreeNode`): batches and predictions that hold them are moved between devices,
gathered and collected over ranks like any other nested data.
"""

from __future__ import annotations

from lockstep.structures.element import BaseDataElement
from lockstep.structures.instances import InstanceData
from lockstep.structures.pixels import LabelData, PixelData

__all__ = ["BaseDataElement", "InstanceData", "LabelData", "PixelData"]
