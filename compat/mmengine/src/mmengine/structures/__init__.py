"""Structures of data: lockstep's, with what subclasses of MMEngine's read."""

from __future__ import annotations

from mmengine.structures.base_data_element import BaseDataElement
from mmengine.structures.instance_data import InstanceData
from mmengine.structures.label_data import LabelData
from mmengine.structures.pixel_data import PixelData

__all__ = ["BaseDataElement", "InstanceData", "LabelData", "PixelData"]
