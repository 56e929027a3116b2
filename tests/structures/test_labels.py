"""`LabelData`: class numbers, and one 0 or 1 per class."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.structures import LabelData


@given(st.lists(st.integers(0, 9), max_size=6), st.sampled_from([torch.int64, torch.int32, torch.uint8]))
def test_there_and_back_gives_each_class_once(classes, dtype):
    onehot = LabelData.label_to_onehot(torch.tensor(classes, dtype=dtype), num_classes=10)
    assert onehot.tolist() == [int(number in classes) for number in range(10)]
    assert onehot.dtype == dtype
    assert LabelData.onehot_to_label(onehot).tolist() == sorted(set(classes))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: LabelData.label_to_onehot(torch.tensor([3]), 3), ValueError, r"from 0 to 2, but holds \[3\]"),
        (lambda: LabelData.label_to_onehot(torch.tensor([-1]), 3), ValueError, r"from 0 to 2, but holds \[-1\]"),
        (lambda: LabelData.label_to_onehot(torch.tensor([1.0]), 3), TypeError, "must hold ints, but is .*float32"),
        (lambda: LabelData.label_to_onehot([1], 3), TypeError, "`label` must be a tensor"),
        (lambda: LabelData.onehot_to_label(torch.tensor([0, 2])), ValueError, r"only 0 and 1, but holds \[0, 2\]"),
        (lambda: LabelData.onehot_to_label(torch.zeros(2, 2)), ValueError, r"`onehot` must have one dim.*\(2, 2\)"),
    ],
)
def test_what_is_no_label_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
