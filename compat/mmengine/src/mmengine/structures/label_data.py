"""`LabelData`: the classes of one sample."""

from __future__ import annotations

import torch
from torch import Tensor

from mmengine.structures.base_data_element import BaseDataElement, WrongTypeError, WrongValueError, describe


class LabelData(BaseDataElement):
    """Labels of a whole sample, in one of two forms: class numbers, or a 0 or 1 for each class (one-hot).

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
            WrongValueError: `onehot` is not one-dimensional, or has other values.
            WrongTypeError: `onehot` is not a tensor.
        """
        _require_vector("onehot", onehot)
        if not bool(((onehot == 0) | (onehot == 1)).all()):
            raise WrongValueError(f"`onehot` must hold only 0 and 1, but holds {sorted(set(onehot.tolist()))}")
        return onehot.nonzero().flatten()

    @staticmethod
    def label_to_onehot(label: Tensor, num_classes: int) -> Tensor:
        """Return a tensor with 1 for each class in `label` and 0 for the others.

        Args:
            label: class numbers.
            num_classes: the number of classes.

        **Shapes**: [present classes] -> [num_classes].

        Raises:
            WrongValueError: `label` is not one-dimensional, or a label is not from 0 to `num_classes` - 1.
            WrongTypeError: `label` is not a tensor of ints.
        """
        _require_vector("label", label)
        if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
            raise WrongTypeError(f"`label` must hold ints, but is {describe(label)}")
        if label.numel() and not 0 <= int(label.min()) <= int(label.max()) < num_classes:
            raise WrongValueError(f"`label` must be from 0 to {num_classes - 1}, but holds {label.tolist()}")
        return label.new_zeros(num_classes).index_fill_(0, label.long(), 1)


def _require_vector(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise WrongTypeError(f"`{name}` must be a tensor, but is {value!r} of type {type(value).__name__}")
    if value.dim() != 1:
        raise WrongValueError(f"`{name}` must have one dim, but is {describe(value)}")
