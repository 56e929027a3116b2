"""`LabelData`: classes of one sample."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.structures.arrays import describe
from lockstep.structures.element import BaseDataElement


class LabelData(BaseDataElement):
    """Labels of a sample as a whole, in either of two forms: class numbers, or one 0 or 1 per class.

    Example:
        >>> LabelData.label_to_onehot(torch.tensor([2, 0]), num_classes=4)
        tensor([1, 0, 1, 0])
        >>> LabelData.onehot_to_label(torch.tensor([1, 0, 1, 0]))
        tensor([0, 2])
    """

    @staticmethod
    def onehot_to_label(onehot: Tensor) -> Tensor:
        """Return the numbers of the classes that are present, in ascending order.

        Args:
            onehot: 0 or 1 for each class, of any dtype.

        **Shapes**: [classes] -> [present classes].

        Raises:
            ValueError: `onehot` has another shape or other values.
        """
        _require_vector("onehot", onehot)
        if not bool(((onehot == 0) | (onehot == 1)).all()):
            raise ValueError(f"`onehot` must hold only 0 and 1, but holds {sorted(set(onehot.tolist()))}")
        return onehot.nonzero().flatten()

    @staticmethod
    def label_to_onehot(label: Tensor, num_classes: int) -> Tensor:
        """Return 1 for each class in `label` and 0 for the others.

        Args:
            label: numbers of classes.
            num_classes: how many there are.

        **Shapes**: [present classes] -> [num_classes].

        Raises:
            ValueError: a label is not from 0 to `num_classes` - 1.
            TypeError: `label` does not hold ints.
        """
        _require_vector("label", label)
        if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
            raise TypeError(f"`label` must hold ints, but is {describe(label)}")
        if label.numel() and not 0 <= int(label.min()) <= int(label.max()) < num_classes:
            raise ValueError(f"`label` must be from 0 to {num_classes - 1}, but holds {label.tolist()}")
        return label.new_zeros(num_classes).index_fill_(0, label.long(), 1)


def _require_vector(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is {value!r} of {type(value).__name__}")
    if value.dim() != 1:
        raise ValueError(f"`{name}` must have one dim, but is {describe(value)}")
