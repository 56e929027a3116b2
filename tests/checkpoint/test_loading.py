"""Reading a checkpoint under any layout: each rank reads what it holds, and no byte twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lockstep.checkpoint import load_state, loading, save_state, saving
from lockstep.dist import all_gather_object, broadcast_object, get_world_size
from lockstep.testing import ranks, run_ranks

ROWS, COLUMNS = 12, 8


def laid_out(value: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "whole":
        return value.clone()
    placement = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[layout]
    return distribute_tensor(value.clone(), init_device_mesh("cpu", (get_world_size(),)), [placement])


def save(folder: Path, layout: str) -> None:
    value = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    with patch.object(saving, "BLOCK", 64):  # bytes
        save_state(folder, {"model": {"w": laid_out(value, layout), "b": torch.ones(3)}, "note": 1}, {})


def load(folder: Path, layout: str) -> tuple[Counter[Any], torch.Tensor]:
    """Return how often this rank has read each block, and the tensor, whole."""
    read: Counter[Any] = Counter()
    read_block = loading.read_block

    def counted(file: Any, block: Any, into: memoryview) -> None:
        read[block.file, block.start, block.size] += 1
        read_block(file, block, into)

    with patch.object(loading, "read_block", counted):
        state = {"model": {"w": laid_out(torch.zeros(ROWS, COLUMNS), layout), "b": torch.zeros(3)}, "note": None}
        found = load_state(folder, state)["model"]["w"]
    return read, found.full_tensor() if isinstance(found, DTensor) else found


@pytest.mark.parametrize("former", ["whole", "rows", "columns", "replicated"])
@pytest.mark.parametrize("present", ["whole", "rows", "columns", "replicated"])
def test_no_rank_reads_a_block_twice(former: str, present: str, tmp_path: Path):
    run_ranks(2, save, tmp_path / "state", former)
    for size in (1, 2) if present == "whole" else (2,):
        for read, whole in run_ranks(size, load, tmp_path / "state", present):
            assert set(read.values()) == {1}
            assert torch.equal(whole, torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS))


@ranks(2)
def test_a_rank_reads_its_rows_alone(tmp_path: Path):
    folder = broadcast_object(tmp_path) / "state"
    save(folder, "whole")
    read, _ = load(folder, "rows")
    parts = all_gather_object([place for place in read if place[2] == 64])
    assert [len(part) for part in parts] == [ROWS * COLUMNS * 4 // 64 // 2] * 2
    assert not set(parts[0]) & set(parts[1])
