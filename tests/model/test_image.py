"""`ImgDataPreprocessor`: images as they are stored, to one normalised batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.model import ImgDataPreprocessor
from lockstep.registry import MODELS

MEAN, STD = [10.0, 20.0, 30.0], [1.0, 2.0, 4.0]


def images(sizes: list[tuple[int, int]], channels: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (channels, *size), dtype=torch.uint8, generator=generator) for size in sizes]


def by_hand(image: Tensor, swap: bool, normalise: bool) -> Tensor:
    image = image[[2, 1, 0]].float() if swap else image.float()
    return (image - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None] if normalise else image


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_images_of_any_size_are_stacked_with_padding_right_and_below(sizes, divisor, swap, normalise):
    options: dict[str, Any] = {"mean": MEAN, "std": STD} if normalise else {}
    preprocessor = ImgDataPreprocessor(pad_size_divisor=divisor, pad_value=-7, bgr_to_rgb=swap, **options)
    stored = images(sizes)
    kept = [image.clone() for image in stored]
    batch = preprocessor({"inputs": stored})["inputs"]
    height, width = (max(size[dim] for size in sizes) for dim in (0, 1))
    assert batch.shape == (len(sizes), 3, -(-height // divisor) * divisor, -(-width // divisor) * divisor)
    assert batch.dtype == torch.float32
    for place, (image, (rows, columns)) in enumerate(zip(stored, sizes, strict=True)):
        assert torch.equal(batch[place, :, :rows, :columns], by_hand(image, swap, normalise))
        assert batch[place, :, rows:].eq(-7).all()
        assert batch[place, :, :, columns:].eq(-7).all()
        assert torch.equal(image, kept[place])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_a_stacked_batch_gives_what_its_images_give(dtype):
    preprocessor = ImgDataPreprocessor(MEAN, STD, pad_size_divisor=4, rgb_to_bgr=True)
    stored = [image.to(dtype) for image in images([(5, 6)] * 3)]
    assert torch.equal(preprocessor(torch.stack(stored)), preprocessor([stored])[0])


def test_one_value_does_for_all_channels():
    (image,) = images([(2, 3)], channels=5)
    batch = ImgDataPreprocessor([2.0], [4.0])(image[None])
    assert torch.equal(batch[0], (image.float() - 2) / 4)


class Pair(NamedTuple):
    images: Any
    labels: Tensor


def test_batches_keep_their_form_and_what_else_is_in_them():
    preprocessor = ImgDataPreprocessor()
    stored, labels = torch.ones(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([1, 2])
    batch = preprocessor({"inputs": stored, "labels": labels, "names": ["a", "b"]}, training=True)
    assert batch["inputs"].dtype == torch.float32
    assert torch.equal(batch["labels"], labels)
    assert batch["names"] == ["a", "b"]
    for kind in (list, tuple):
        batch = preprocessor(kind([stored, labels]))
        assert type(batch) is kind
        assert batch[0].dtype == torch.float32
        assert torch.equal(batch[1], labels)
    pair = preprocessor(Pair(list(stored), labels))
    assert type(pair) is Pair
    assert pair.images.shape == (2, 3, 4, 4)


def test_nothing_of_it_is_learnt_or_sent_and_it_moves_with_the_model():
    preprocessor = ImgDataPreprocessor(MEAN, STD)
    assert not list(preprocessor.parameters())
    assert not list(preprocessor.buffers())
    assert not preprocessor.state_dict()
    assert preprocessor.half().mean.dtype == torch.float32
    preprocessor.to("meta")
    assert (preprocessor.device.type, preprocessor.mean.device.type, preprocessor.std.device.type) == ("meta",) * 3
    assert preprocessor(torch.ones(1, 3, 2, 2)).device.type == "meta"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mean": MEAN}, "`mean` and `std` must be given together"),
        ({"mean": MEAN, "std": [1.0, 0.0, 1.0]}, r"`std` must be above 0, but is \[1.0, 0.0, 1.0\]"),
        ({"mean": [], "std": []}, r"`mean` must be a list with a number for each channel, but is \[\]"),
        ({"bgr_to_rgb": True, "rgb_to_bgr": True}, "must not both be True"),
        ({"pad_size_divisor": 0}, "`pad_size_divisor` must be an int of at least 1, but is 0"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        MODELS.build({"type": "ImgDataPreprocessor", **options})


@pytest.mark.parametrize(
    ("options", "batch", "says"),
    [
        ({}, {"img": torch.ones(1, 3, 2, 2)}, r"in the entry 'inputs', but has only \['img'\]"),
        ({}, [], "images in first place, but is empty"),
        ({}, torch.ones(3, 2, 2), r"but are a tensor \[3, 2, 2\]"),
        ({}, [[torch.ones(2, 2), "a"]], r"but are a list of a tensor \[2, 2\], str"),
        ({}, [["a"]], "but are a list of str"),
        ({}, {"inputs": 3}, "but are int"),
        ({}, [[torch.ones(3, 2, 2), torch.ones(1, 2, 2)]], r"equally many channels, but have \[1, 3\]"),
        ({"bgr_to_rgb": True}, torch.ones(1, 1, 2, 2), "must have 3 channels to turn their order around, but have 1"),
        ({"mean": MEAN, "std": STD}, torch.ones(1, 4, 2, 2), "`mean` must have 1 value or 4, .* but has 3"),
    ],
)
def test_images_that_do_not_fit_are_refused(options, batch, says):
    with pytest.raises(ValueError, match=says):
        ImgDataPreprocessor(**options)(batch)


def test_a_model_on_the_meta_device_has_one_whose_numbers_are_there():
    with torch.device("meta"):
        preprocessor = ImgDataPreprocessor(mean=MEAN, std=STD)
    assert torch.equal(preprocessor(torch.zeros(1, 3, 1, 1)).flatten(), torch.tensor([-10.0, -10.0, -7.5]))


def test_a_batch_without_images_is_one():
    assert ImgDataPreprocessor(MEAN, STD, pad_size_divisor=4)(torch.zeros(0, 3, 5, 4)).shape == (0, 3, 8, 4)


def test_gradients_reach_images_of_several_sizes():
    images = [torch.ones(3, size, 2, requires_grad=True) for size in (2, 3)]
    ImgDataPreprocessor(MEAN, STD)({"inputs": images})["inputs"].sum().backward()
    assert all(image.grad is not None for image in images)
