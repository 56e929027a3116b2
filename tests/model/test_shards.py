"""Sharded tensors."""

from __future__ import annotations

import pytest
import torch

from lockstep.model.shards import shard_rows, template_of_rows, words_of
from lockstep.testing import ranks


@ranks(2)
def test_all_tensors_that_are_sharded_by_rows_have_one_mesh() -> None:
    # torch may make a group for each mesh, and none is ever freed.
    assert shard_rows(torch.ones(4)).device_mesh is template_of_rows([6, 2]).device_mesh


STRIDED = {
    "one element": torch.ones(2, 3, dtype=torch.float64)[:1, 1],
    "a column": torch.ones(2, 3, dtype=torch.float64)[:, 1],
    "conjugate": torch.ones(2, 3, dtype=torch.complex64).conj(),
    "scalar": torch.ones((), dtype=torch.complex128),
    "empty": torch.ones(0, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", STRIDED)
def test_words_are_those_of_the_elements_wherever_they_lie(kind: str) -> None:
    tensor = STRIDED[kind]
    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    assert words_of(tensor).dtype is torch.int32
    assert words_of(tensor).tolist() == words_of(plain).tolist()
    assert len(words_of(tensor)) == tensor.nbytes // 4
