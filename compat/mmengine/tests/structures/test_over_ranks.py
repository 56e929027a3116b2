"""Elements between devices and ranks, as the trees they are."""

from __future__ import annotations

import torch

from lockstep.dist import (
    all_gather_tree,
    all_reduce_tree,
    broadcast_tree,
    cast_data_device,
    collect_results,
    get_data_device,
    get_rank,
)
from lockstep.dist.pickling import dump
from lockstep.groups import resolve
from lockstep.model.preprocessor import move_to_device
from lockstep.testing import ranks
from lockstep.tree import TreeNode, tree_items
from mmengine.structures import BaseDataElement, InstanceData, PixelData

LARGE = 40_000  # floats: more than travels within a pickle


def prediction(number: int) -> BaseDataElement:
    return BaseDataElement(
        metainfo={"number": number},
        found=InstanceData(boxes=torch.full((number + 1, 4), float(number)), names=["cat"] * (number + 1)),
        maps=PixelData(scores=torch.full((1, 2, LARGE // 2), float(number))),
    )


def check(received: BaseDataElement, number: int) -> None:
    assert type(received) is BaseDataElement
    assert type(received.found) is InstanceData
    assert type(received.maps) is PixelData
    assert received.metainfo == {"number": number}
    assert received.found.boxes.tolist() == [[float(number)] * 4] * (number + 1)
    assert received.found.names == ["cat"] * (number + 1)
    assert received.maps.scores.eq(number).all()
    assert received.maps.shape == (2, LARGE // 2)


@ranks(2)
def test_every_rank_gets_every_element():
    mine = prediction(get_rank())
    for number, received in enumerate(all_gather_tree([mine])):
        check(received[0], number)
    check(broadcast_tree(mine, src=1), 1)


@ranks(2)
def test_results_of_an_evaluation_come_in_order():
    collected = collect_results([prediction(2 * place + get_rank()) for place in range(2)], size=3)
    if get_rank() == 0:
        assert len(collected) == 3
        for number, received in enumerate(collected):
            check(received, number)
    else:
        assert collected is None


@ranks(2)
def test_fields_are_reduced():
    mine = BaseDataElement(metainfo={"name": "m"}, hits=torch.tensor([1, 2]), nested=InstanceData(n=torch.ones(2)))
    total = all_reduce_tree(mine)
    assert total.hits.tolist() == [2, 4]
    assert total.nested.n.tolist() == [2.0, 2.0]
    assert total.name == "m"
    assert mine.hits.tolist() == [1, 2]


def test_large_tensors_travel_out_of_band():
    pickled, segment = dump(prediction(1), resolve())
    assert segment.nbytes == 4 * LARGE
    assert pickled.nbytes < 4096


def test_elements_are_moved_like_any_tree():
    sample = prediction(1)
    assert isinstance(sample, TreeNode)
    assert [path for path, _ in tree_items(sample)] == [
        "found.boxes",
        "found.names[0]",
        "found.names[1]",
        "maps.scores",
    ]
    for moved in (cast_data_device(sample, "meta"), move_to_device(sample, torch.device("meta"))):
        assert get_data_device(moved).type == "meta"
        assert type(moved.found) is InstanceData
        assert moved.number == 1
    assert get_data_device(sample).type == "cpu"
