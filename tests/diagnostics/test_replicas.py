"""One flipped bit changes a digest, wherever it is; so do flips that a plain sum would cancel."""

from __future__ import annotations

import pytest
import torch

from lockstep.model.shards import digest_of, words_of

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.complex128, torch.int64, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


def digest(tensor: torch.Tensor) -> int:
    return int(digest_of(words_of(tensor)))


def some(count: int, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (count * size,), dtype=torch.uint8)
    return content.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    tensor = some(5, dtype)
    content = tensor.view(torch.uint8)
    seen = {digest(tensor)}
    bits = 1 if dtype is torch.bool else 8
    for byte in range(len(content)):
        for bit in range(bits):
            content[byte] ^= 1 << bit
            seen.add(digest(tensor))
            content[byte] ^= 1 << bit
    assert len(seen) == 1 + bits * len(content)


@pytest.mark.parametrize("count", [1, 2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16 + 7])
def test_every_place_counts(count):
    tensor = torch.randn(count)
    before, words = digest(tensor), tensor.view(torch.int32)
    for place in {0, count // 2, count - 1, count // 2**16 * 2**16 - 1, min(2**16, count - 1)}:
        for bit in (0, 30):
            words[place] ^= 1 << bit
            assert digest(tensor) != before
            words[place] ^= 1 << bit
    assert digest(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_that_change_together_and_numbers_that_change_places_are_seen(dtype):
    tensor = torch.randn(1000).to(dtype)
    negated, swapped = tensor.clone(), tensor.clone()
    negated[[3, 700]] *= -1
    swapped[[3, 700]] = tensor[[700, 3]]
    assert len({digest(tensor), digest(negated), digest(swapped)}) == 3


def test_only_values_count_and_not_how_they_lie_in_memory():
    image = torch.randn(2, 3, 4, 5)
    assert digest(image) == digest(image.to(memory_format=torch.channels_last)) == digest(image.mT.contiguous().mT)
    assert digest(torch.empty(0, 3)) == 0
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))  # other bits
    assert digest(torch.tensor(float("nan"))) == digest(torch.tensor(float("nan")))
