"""`LabelData`: the classes of one sample."""

from __future__ import annotations

from torch import Tensor

import lockstep.structures
from mmengine.structures.base_data_element import BaseDataElement, also_assertion


class LabelData(lockstep.structures.LabelData, BaseDataElement):
    """Labels of a whole sample; see `lockstep.structures.LabelData`."""

    @staticmethod
    @also_assertion
    def onehot_to_label(onehot: Tensor) -> Tensor:
        """Return the numbers of the classes that are present, in ascending order."""
        return lockstep.structures.LabelData.onehot_to_label(onehot)

    @staticmethod
    @also_assertion
    def label_to_onehot(label: Tensor, num_classes: int) -> Tensor:
        """Return a tensor with 1 for each class in `label` and 0 for the others."""
        return lockstep.structures.LabelData.label_to_onehot(label, num_classes)
