"""Sharded tensors."""

from __future__ import annotations

import torch

from lockstep.model.shards import shard_rows, template_of_rows
from lockstep.testing import ranks


@ranks(2)
def test_all_tensors_that_are_sharded_by_rows_have_one_mesh() -> None:
    # torch may make a group for each mesh, and none is ever freed.
    assert shard_rows(torch.ones(4)).device_mesh is template_of_rows([6, 2]).device_mesh
