"""Structures of data: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.structures import BaseDataElement, InstanceData, LabelData, PixelData

__all__ = ["BaseDataElement", "InstanceData", "LabelData", "PixelData"]
