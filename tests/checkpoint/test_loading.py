"""Reading a checkpoint under any layout: each rank reads what it holds, all what is whole, and no byte twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lockstep.checkpoint import load_state, loading, save_state, saving, together
from lockstep.dist import all_gather_object, broadcast_object, get_rank, get_world_size
from lockstep.errors import ConfigError
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
        read[str(file.name), block.start, block.size] += 1
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
        found = run_ranks(size, load, tmp_path / "state", present)
        together = sum((read for read, _ in found), Counter[Any]())
        for read, whole in found:
            assert set((together if present == "whole" else read).values()) == {1}
            assert torch.equal(whole, torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS))


@ranks(2)
def test_a_rank_reads_its_rows_alone(tmp_path: Path):
    folder = broadcast_object(tmp_path) / "state"
    save(folder, "whole")
    read, _ = load(folder, "rows")
    parts = all_gather_object([place for place in read if place[2] == 64])
    assert [len(part) for part in parts] == [ROWS * COLUMNS * 4 // 64 // 2] * 2
    assert not set(parts[0]) & set(parts[1])


def read_by_all(folder: Path, number: int) -> tuple[Counter[str], Counter[int], dict[str, Any]]:
    """Return the bytes that this rank has read, by file; those that each rank has sent; and what this one has then."""
    read, sent = Counter[str](), Counter[int]()
    read_block, broadcast = loading.read_block, together.broadcast

    def reading(file: Any, block: Any, into: memoryview) -> None:
        read[str(file.name)] += len(into)
        read_block(file, block, into)

    def sending(data: torch.Tensor, src: int) -> None:
        sent[src] += len(data)
        assert len(data) <= 128
        broadcast(data, src)

    state = {
        "model": {
            "w": torch.zeros(number, 8),
            "last": torch.zeros(number, 8).T,  # in another order
            "half": torch.zeros(number, dtype=torch.float16),  # of another dtype
            "none": torch.zeros(0, 3),
            "scale": torch.zeros(()),
        },
        "optimizer": None,
    }
    with (
        patch.object(loading, "read_block", reading),
        patch.object(together, "broadcast", sending),
        patch.object(loading, "_BUCKET", 128),
    ):
        return read, sent, load_state(folder, state)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_read_what_all_of_them_need_once_together(size: int, tmp_path: Path):
    number = 50
    model = {
        "w": torch.randn(number, 8),
        "last": torch.randn(8, number),
        "half": torch.arange(float(number)),
        "none": torch.zeros(0, 3),
        "scale": torch.tensor(7.0),
    }
    optimizer = {"state": {"w": {"step": torch.tensor(3.0), "m": torch.randn(number, 8)}}, "param_groups": []}
    with patch.object(saving, "BLOCK", 64):  # bytes
        save_state(tmp_path / "state", {"model": model, "optimizer": optimizer}, {})
    whole = sum(one.nbytes for one in [*model.values(), *optimizer["state"]["w"].values()])
    found = run_ranks(size, read_by_all, tmp_path / "state", number)
    assert sum(sum(read.values()) for read, _, _ in found) == whole
    assert max(sum(read.values()) for read, _, _ in found) <= whole / size + 128
    for _, sent, state in found:
        assert sent.total() == whole
        assert all(torch.equal(state["model"][name], one.to(state["model"][name].dtype)) for name, one in model.items())
        for name, one in optimizer["state"]["w"].items():
            assert torch.equal(state["optimizer"]["state"]["w"][name], one)


@ranks(3)
@pytest.mark.parametrize("reader", [0, 2])
def test_an_error_of_the_rank_that_reads_is_raised_on_all(reader: int, tmp_path: Path):
    folder = broadcast_object(tmp_path) / "state"
    state = {"model": {"w": torch.ones(4000)}}
    with patch.object(saving, "BLOCK", 64):
        save_state(folder, state, {})

    def failing(file: Any, block: Any, into: memoryview) -> None:
        raise OSError(5, "the disk is gone", str(file.name))

    with (
        patch.object(loading, "_BUCKET", 1024),
        patch.object(loading, "read_block", failing if get_rank() == reader else loading.read_block),
        pytest.raises(OSError, match=f"rank {reader}: the disk is gone"),
    ):
        load_state(folder, state)
    assert all_gather_object(get_rank()) == [0, 1, 2]  # nobody is left behind


def test_an_empty_dict_that_a_checkpoint_lacks_is_named(tmp_path: Path):
    save_state(tmp_path / "state", {"model": {"w": torch.ones(2)}}, {})
    wanted = {"model": {"w": torch.zeros(2), "layer._extra_state": {}}}
    with pytest.raises(ConfigError, match=r"does not fit: there is no `model\.layer\._extra_state` in it\. Resume"):
        load_state(tmp_path / "state", wanted)


@ranks(1, 2)
def test_what_is_under_keys_that_are_not_strings_is_filled_in_place(tmp_path: Path):
    folder = Path(broadcast_object(str(tmp_path / "state")))
    rank = get_rank()
    save_state(
        folder, {"model": {}, "mine": {0: torch.ones(2), (1, "a"): [torch.ones(1)], rank: torch.ones(2), "n": 3}}, {}
    )
    target = torch.zeros(2)
    found = load_state(folder, {"model": {}, "mine": {rank: target, (1, "a"): [torch.zeros(1)], "n": None}})["mine"]
    assert found[rank] is target
    assert (target.tolist(), found[1, "a"][0].item(), found["n"]) == ([1, 1], 1, 3)
    with pytest.raises(ConfigError, match=r"there is no `mine\.7` in it"):
        load_state(folder, {"model": {}, "mine": {7: torch.zeros(1)}})
