"""Maps over pixels, and the classes of a sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmengine.structures import LabelData, PixelData


def test_all_maps_are_cropped_together():
    grid = torch.arange(24.0).reshape(4, 6)
    maps = PixelData(metainfo={"path": "a"}, flat=grid, array=grid.numpy()[None], deep=grid.expand(2, 3, 4, 6))
    assert maps.shape == (4, 6)
    assert maps.flat.shape == (1, 4, 6)
    for index, size in (
        ((slice(1, 3), slice(None)), (2, 6)),
        ((0, slice(2, 5)), (1, 3)),
        ((-1, np.int64(5)), (1, 1)),
        ((slice(None, None, 2), slice(9, 10)), (2, 0)),
    ):
        crop = maps[index]
        wanted = grid[tuple(part if isinstance(part, slice) else [int(part)] for part in index)].reshape(size)
        assert type(crop) is PixelData
        assert crop.shape == size
        assert torch.equal(crop.flat[0], wanted)
        assert np.array_equal(crop.array[0], wanted.numpy())
        assert torch.equal(crop.deep, wanted.expand(2, 3, *size))
        assert crop.path == "a"
    assert maps["flat"] is maps.flat


def test_a_map_over_other_pixels_is_refused():
    maps = PixelData(a=torch.zeros(1, 4, 6))
    for value, error, says in (
        (torch.zeros(4, 5), ValueError, r"must end in the height and width \(4, 6\) .* but is Tensor\(4, 5\)"),
        (torch.zeros(6), ValueError, r"\[..., height, width\], but is Tensor\(6,\)"),
        ([[0]], TypeError, "must be a tensor or an array, but is"),
    ):
        with pytest.raises(error, match=says):
            maps.b = value
    maps.a = torch.zeros(2, 2)  # the only map may change the size
    assert maps.shape == (2, 2)
    assert PixelData().shape is None


@pytest.mark.parametrize(
    ("index", "error", "says"),
    [
        (1, IndexError, "one of rows and one of columns, but is 1"),
        ((1, 2, 3), IndexError, "one of rows and one of columns"),
        ((4, 0), IndexError, "4 pixels must be from -4 to 3, but is 4"),
        ((0, -7), IndexError, "6 pixels must be from -6 to 5, but is -7"),
        ((0, [1]), TypeError, r"must be an int or a slice, but is \[1\]"),
        ((True, 0), TypeError, "must be an int or a slice, but is True"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index, error, says):
    with pytest.raises(error, match=says):
        PixelData(a=torch.zeros(4, 6))[index]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("classes", [[], [3], [9, 0], [4, 4, 1], [0, 1, 2, 9, 5, 5]])
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
    with pytest.raises(error, match=says) as caught:
        call()
    assert isinstance(caught.value, AssertionError)
