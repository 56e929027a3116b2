"""Who writes what: each part once, planned for all tensors that lie alike, and again only where that has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.scale.checkpoints import measure
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lockstep.checkpoint import Planner, load_state, save_state, saving
from lockstep.checkpoint.layout import Box, Piece, decide, keys_to_send, section_of
from lockstep.checkpoint.manifest import read_manifest
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.testing import ranks


def decided(held: Sequence[Mapping[str, Box]]) -> tuple[Any, list[list[str]]]:
    """Return the tensors, and which of them each rank writes, for ranks that hold such boxes."""
    sections = [
        section_of([Piece(name, box.whole, box.offsets, torch.empty(box.lengths)) for name, box in one.items()], {})
        for one in held
    ]
    digests = [{"model": section.digest} for section in sections]
    asked = keys_to_send(digests)
    rows = [dict.fromkeys(keys, section.rows) for section, keys in zip(sections, asked, strict=True)]
    tensors, written = decide(digests, [{"model": section.boxes} for section in sections], rows)
    bits = [bin(int.from_bytes(one) | 1 << 8 * len(one))[3:] for one in written]
    names = [
        [name for name, bit in zip(one, bit, strict=False) if bit == "1"] for one, bit in zip(held, bits, strict=True)
    ]
    return tensors, names


def rows(whole: int, ranks: int, rank: int) -> Box:
    """Return the rows that a rank has of a tensor, as torch cuts it."""
    length = -(-whole // ranks)
    begin = min(rank * length, whole)
    return Box((whole, 3), (begin, 0), (min(length, whole - begin), 3))


def test_copies_are_shared_out_evenly_and_written_once():
    whole = Box((4, 3), (0, 0), (4, 3))
    tensors, names = decided([{f"w{n}": whole for n in range(12)}] * 4)
    assert [len(one) for one in names] == [3] * 4
    assert Counter(name for one in names for name in one) == Counter(list(tensors))


def test_of_replicas_of_shards_one_writes_a_tensor():
    held = [{f"w{n}": rows(10, 2, rank % 2) for n in range(6)} for rank in range(4)]
    tensors, names = decided(held)
    assert [len(one) for one in names] == [3] * 4
    assert {tuple(tensor.place) for tensor in tensors.values()} == {(0, 1), (2, 3)}


def test_a_rank_without_a_part_has_no_file():
    tensors, names = decided([{"w": rows(3, 4, rank)} for rank in range(4)])
    assert names == [["w"], ["w"], ["w"], []]
    assert (tensors["w"].begins, tensors["w"].place) == ((range(3), range(0, 3, 3)), (0, 1, 2))
    tensors, names = decided([{}, {"w": rows(2, 1, 0)}])
    assert names == [[], ["w"]]
    assert tensors["w"].place == (0,)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_element_of_any_grid_is_in_one_part_and_every_box_meets_its_parts(data: st.DataObject):
    cuts = [sorted({0, *data.draw(st.lists(st.integers(1, 8), max_size=3))}) for _ in range(2)]
    shape = tuple(cut[-1] + data.draw(st.integers(1, 3)) for cut in cuts)
    spans = [list(zip(cut, [*cut[1:], n], strict=True)) for cut, n in zip(cuts, shape, strict=True)]
    boxes = [Box(shape, (a, c), (b - a, d - c)) for a, b in spans[0] for c, d in spans[1]]
    boxes = data.draw(st.permutations(boxes))
    tensors, _ = decided([{"w": box} for box in boxes])
    (tensor,) = tensors.values()
    count = torch.zeros(shape)
    for number in range(len(boxes)):
        offsets, lengths = tensor.box(number)
        assert (offsets, lengths) == boxes[tensor.place[number]][1:]
        count[offsets[0] : offsets[0] + lengths[0], offsets[1] : offsets[1] + lengths[1]] += 1
    assert count.unique().tolist() == [1]
    begin = [data.draw(st.integers(0, n - 1)) for n in shape]
    length = [data.draw(st.integers(1, n - at)) for n, at in zip(shape, begin, strict=True)]
    wanted = {
        number
        for number in range(len(boxes))
        for offsets, lengths in [tensor.box(number)]
        if all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(begin, length, offsets, lengths, strict=True))
    }
    assert list(tensor.parts_within(begin, length)) == sorted(wanted)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([rows(4, 2, 0), rows(5, 2, 1)], r"`w` must have one shape on all ranks, but has \[4, 3\] on rank 0 and \[5, "),
        ([rows(4, 2, 0), rows(4, 4, 1)], r"the parts of `w` .* cover its shape \[4, 3\] once.* of rank 0, 1 do not"),
        ([rows(4, 2, 0)] * 2, r"the parts of `w` .* those of rank 0, 1 do not"),
        ([rows(4, 2, 0), rows(4, 1, 0)], r"the parts of `w` .* do not"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named_with_a_rank(held: Sequence[Box], says: str):
    with pytest.raises(ConfigError, match=says):
        decided([{"w": box} for box in held])


@ranks(3)
def test_a_dtype_of_one_rank_is_named_on_all(tmp_path: Path):
    value = torch.zeros(2, dtype=torch.float64 if get_rank() == 2 else torch.float32)
    says = r"`model.w` must have one dtype on all ranks, but is float32 on rank 0 and float64 on rank 2"
    with pytest.raises(ConfigError, match=says):
        save_state(tmp_path / "state", {"model": {"w": value}}, {})


@ranks(2)
def test_a_plan_holds_until_a_rank_holds_other_things(tmp_path: Path):
    mesh, planner = init_device_mesh("cpu", (2,)), Planner()

    def saved(name: str, value: float, more: Mapping[str, Any]) -> None:
        weight: Tensor = torch.full((4, 2), value)
        placed = {"w": [Shard(0)], "b": [Replicate()]}
        model = {key: distribute_tensor(weight, mesh, placements) for key, placements in placed.items()}
        state = {"model": model, "ranks": {str(get_rank()): {"n": value + get_rank(), **more}}}
        save_state(tmp_path / name, state, {"name": name}, planner=planner)
        whole = {"model": {"w": torch.zeros(4, 2), "b": torch.zeros(4, 2)}, "ranks": {"0": None, "1": None}}
        read = load_state(tmp_path / name, whole)
        assert all(tensor.unique().tolist() == [value] for tensor in read["model"].values())
        assert [read["ranks"][str(rank)]["n"] for rank in range(2)] == [value, value + 1]

    other = {"t": torch.ones(3)} if get_rank() == 1 else {}
    with patch.object(saving, "decide", side_effect=saving.decide) as plans:
        for number, value in enumerate((1.0, 2.0, 3.0)):
            saved(str(number), value, {})
            assert plans.call_count == (1 if get_rank() == 0 else 0)
        saved("other", 4.0, other)
        saved("again", 5.0, other)
        assert plans.call_count == (2 if get_rank() == 0 else 0)
        saved("as before", 6.0, {})
        assert plans.call_count == (3 if get_rank() == 0 else 0)


@ranks(2)
def test_a_planner_of_another_run_on_one_rank_plans_anew(tmp_path: Path):
    planner = Planner()
    save_state(tmp_path / "a", {"w": torch.ones(2)}, {}, planner=planner)
    if get_rank() == 1:
        planner = Planner()
    with patch.object(saving, "decide", side_effect=saving.decide) as plans:
        save_state(tmp_path / "b", {"w": torch.ones(2)}, {}, planner=planner)
    assert plans.call_count == (1 if get_rank() == 0 else 0)
    assert load_state(tmp_path / "b", {"w": torch.zeros(2)})["w"].tolist() == [1, 1]


@ranks(2)
def test_the_manifest_does_not_grow_with_the_parts(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2,))
    model = {f"w{n}": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]) for n in range(50)}
    save_state(tmp_path / "state", {"model": model}, {})
    manifest = read_manifest(tmp_path / "state")
    assert len({id(tensor.place) for tensor in manifest.tensors.values()}) == 1
    assert all(tensor.begins == (range(0, 4, 2), range(0, 2, 2)) for tensor in manifest.tensors.values())


def test_what_travels_and_is_read_does_not_grow_with_ranks_times_tensors():
    few, many = measure(8, 200), measure(64, 200)
    assert many.first_bytes < few.first_bytes + 100
    assert many.again_bytes == few.again_bytes < 300
    assert many.load_files == few.load_files == 1
    per_rank = (many.manifest_bytes - few.manifest_bytes) / (64 - 8)
    assert per_rank < 200  # bytes: its file, and its number in one list
