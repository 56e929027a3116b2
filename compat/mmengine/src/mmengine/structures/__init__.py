"""Containers for the data of one sample: instances, pixels, labels, and metainfo."""

from __future__ import annotations

from mmengine.structures.base_data_element import BaseDataElement
from mmengine.structures.instance_data import InstanceData
from mmengine.structures.label_data import LabelData
from mmengine.structures.pixel_data import PixelData

__all__ = ["BaseDataElement", "InstanceData", "LabelData", "PixelData"]
