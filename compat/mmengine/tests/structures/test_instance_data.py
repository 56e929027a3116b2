"""`InstanceData`: one entry per instance in every field."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from mmengine.structures import BaseDataElement, InstanceData


class Boxes:
    """A class of a user's own that can be indexed and joined."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Boxes:
        return Boxes(self.data[index])

    @staticmethod
    def cat(parts: list[Boxes]) -> Boxes:
        return Boxes(torch.cat([part.data for part in parts]))


def numbered(length: int) -> InstanceData:
    """Return instances whose every field says 0, 1, 2, ... in its own type."""
    return InstanceData(
        metainfo={"path": "a.png"},
        tensor=torch.arange(length * 2).reshape(length, 2) // 2,
        array=np.arange(length),
        listed=list(range(length)),
        tupled=tuple(range(length)),
        text="".join(map(chr, range(length))),
        boxes=Boxes(torch.arange(length)),
    )


def numbers(instances: InstanceData) -> list[int]:
    """Return the numbers of the instances, after making sure that all fields agree."""
    picked = instances.listed
    assert type(instances.tupled) is tuple
    assert instances.tensor.shape[1:] == (2,)
    assert instances.tensor[:, 0].tolist() == instances.array.tolist() == list(instances.tupled) == picked
    assert [ord(letter) for letter in instances.text] == instances.boxes.data.tolist() == picked
    assert instances.metainfo == {"path": "a.png"}
    assert len(instances) == len(picked)
    return picked


@pytest.mark.parametrize("seed", range(40))
def test_every_index_picks_as_a_list_would(seed):
    draw = Random(seed)
    length = draw.randint(0, 6)
    reference = list(range(length))
    start, stop = (draw.choice([None, *range(-8, 9)]) for _ in range(2))
    step = draw.choice([None, 1, 2, 3])
    assert numbers(numbered(length)[start:stop:step]) == reference[start:stop:step]
    mask = [draw.random() < 0.5 for _ in range(length)]
    masked = [number for number, kept in zip(reference, mask, strict=True) if kept]
    places = [draw.randrange(-length, length) for _ in range(draw.randint(0, 4))] if length else []
    picked = [reference[place] for place in places]
    for wanted, index in ((masked, mask), (picked, places)):
        dtype = bool if index is mask else np.int64
        assert numbers(numbered(length)[torch.tensor(index, dtype=torch.bool if index is mask else torch.int32)]) == (
            wanted
        )
        assert numbers(numbered(length)[np.array(index, dtype=dtype)]) == wanted
        assert numbers(numbered(length)[index]) == wanted
    for place in places:
        assert numbers(numbered(length)[place]) == numbers(numbered(length)[np.int64(place)]) == [reference[place]]
    assert [numbers(one) for one in numbered(length)] == [[number] for number in reference]


@pytest.mark.parametrize("lengths", [[0], [3], [1, 2], [0, 4, 0], [4, 0, 1]])
def test_joining_gives_all_instances_in_order(lengths):
    joined = InstanceData.cat([numbered(length) for length in lengths])
    assert numbers(joined) == [number for length in lengths for number in range(length)]


@pytest.mark.parametrize(
    ("index", "error", "says"),
    [
        (3, IndexError, "must be from -3 to 2, but is 3"),
        (-4, IndexError, "but is -4"),
        (torch.tensor([True]), IndexError, "must have 3 entries, one for each, but has 1"),
        ([True] * 4, IndexError, "must have 3 entries"),
        (torch.zeros(1, 1, dtype=torch.long), IndexError, r"one dim, but is Tensor\(1, 1\) int64"),
        (torch.tensor(1), IndexError, "one dim"),
        (torch.tensor([1.0]), TypeError, "bools or ints .*float32"),
        (torch.tensor([1], dtype=torch.uint8), TypeError, "bools or ints .*uint8"),
        ([5], IndexError, "out of (bounds|range)"),
        (["a"], TypeError, r"must hold ints or bools, but is \['a'\]"),
        (1.5, TypeError, "but is 1.5 of float"),
        (True, TypeError, "but is True of bool"),
        ("none", KeyError, "has no field 'none'"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index, error, says):
    with pytest.raises(error, match=says):
        numbered(3)[index]


def test_an_object_that_takes_slices_only_is_indexed_too():
    class Chain(Boxes):
        def __getitem__(self, index: Any) -> Chain:
            if not isinstance(index, slice):
                raise TypeError("a chain takes slices")
            return Chain(self.data[index])

    found = InstanceData(chain=Chain(torch.arange(3)))
    assert found[[2, 0]].chain.data.tolist() == [2, 0]
    assert found[torch.tensor([False, True, False])].chain.data.tolist() == [1]


def test_what_is_refused_is_an_assertion_error_too():
    for wrong in (
        lambda: numbered(3)[None],
        lambda: numbered(3)[torch.tensor([True])],
        lambda: InstanceData(a=[1, 2], b=[1]),
        lambda: InstanceData(a=3),
        lambda: InstanceData.cat([]),
        lambda: InstanceData.cat([3]),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_all_fields_have_equal_length():
    instances = InstanceData(a=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="`b` must have 2 entries as the other fields, but has 3"):
        instances.b = [1, 2, 3]
    with pytest.raises(TypeError, match="`b` must have one entry per instance, but is 5"):
        instances.b = 5
    with pytest.raises(TypeError, match=r"which has no length.*set_metainfo"):
        instances.b = torch.tensor(5)
    assert instances.keys() == ["a"]
    instances.a = torch.zeros(4)  # the only field may change them all
    instances.b = "four"
    assert len(instances) == 4
    with pytest.raises(ValueError, match="`a` must have 4 entries"):
        instances.a = torch.zeros(2)
    assert len(InstanceData()) == 0
    assert len(InstanceData()[:3]) == 0


def test_what_does_not_belong_together_is_not_joined():
    with pytest.raises(ValueError, match="at least one"):
        InstanceData.cat([])
    with pytest.raises(TypeError, match=r"`instances_list\[1\]` must be an InstanceData"):
        InstanceData.cat([numbered(1), BaseDataElement()])
    with pytest.raises(ValueError, match=r"`instances_list\[1\]` must have the fields .*'a'\], but has \['b'\]"):
        InstanceData.cat([InstanceData(a=[1]), InstanceData(b=[1])])
    with pytest.raises(TypeError, match=r"`a` must be of one type.*, but is of Tensor, list"):
        InstanceData.cat([InstanceData(a=[1]), InstanceData(a=torch.ones(1))])
    with pytest.raises(TypeError, match="have a method `cat` to be joined, but is of range"):
        InstanceData.cat([InstanceData(a=range(2))] * 2)


def test_a_subclass_stays_itself():
    class Found(InstanceData):
        pass

    assert type(Found(a=[1, 2])[0]) is Found
    assert type(InstanceData.cat([Found(a=[1]), Found(a=[2])])) is Found
