"""mmengine.structures: elements, instances, pixels, labels."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import lockstep.structures
from mmengine.structures import BaseDataElement, InstanceData, LabelData, PixelData


@pytest.fixture
def element() -> BaseDataElement:
    return BaseDataElement(metainfo={"size": (4, 6), "tags": [1]}, image=torch.zeros(2), score=np.ones(2))


class TestBaseDataElement:
    def test_names_of_both_kinds(self, element: BaseDataElement) -> None:
        assert (element.keys(), element.metainfo_keys()) == (["image", "score"], ["size", "tags"])
        assert element.all_keys() == ["size", "tags", "image", "score"]
        assert element._data_fields == {"image", "score"}
        assert element._metainfo_fields == {"size", "tags"}
        assert "image" in element
        assert "size" in element
        assert "other" not in element

    def test_metainfo_is_copied(self) -> None:
        metainfo = {"tags": [1]}
        element = BaseDataElement(metainfo=metainfo)
        metainfo["tags"].append(2)
        assert element.tags == [1]
        element.clone().tags.append(3)
        element.to("cpu").tags.append(4)
        assert element.tags == [1]

    def test_a_name_keeps_its_kind(self, element: BaseDataElement) -> None:
        with pytest.raises(AttributeError, match="image"):
            element.set_metainfo({"image": 1})
        with pytest.raises(AttributeError, match="size"):
            element.set_data({"size": 1})
        with pytest.raises(AttributeError, match="size"):
            element.size = (1, 1)
        element.set_metainfo({"size": (1, 1)})
        assert element.size == (1, 1)
        del element.size
        element.size = 3
        assert element.keys()[-1] == "size"

    def test_the_stores_are_not_to_be_set(self, element: BaseDataElement) -> None:
        for name in ("_data_fields", "_metainfo_fields"):
            with pytest.raises(AttributeError):
                setattr(element, name, set())

    def test_get_pop_and_delete(self, element: BaseDataElement) -> None:
        assert element.get("size") == (4, 6)
        assert element.get("other") is None
        assert element.get("other", 3) == 3
        assert element.pop("size") == (4, 6)
        assert element.pop("size", 5) == 5
        with pytest.raises(KeyError, match="size"):
            element.pop("size")
        del element.image
        assert "image" not in element
        with pytest.raises(AttributeError, match="image"):
            del element.image
        with pytest.raises(AttributeError, match="other"):
            _ = element.other

    def test_set_field(self, element: BaseDataElement) -> None:
        element.set_field(3, "number", dtype=int)
        element.set_field(4, "kind", field_type="metainfo")
        assert element.metainfo["kind"] == 4
        for wrong in ({"dtype": str}, {"field_type": "other"}):
            with pytest.raises(AssertionError):
                element.set_field(3, "n", **wrong)

    def test_new_shares_what_is_not_given(self, element: BaseDataElement) -> None:
        assert element.new().image is element.image
        assert element.new(metainfo={"z": 1}).all_keys() == ["z", "image", "score"]
        assert element.new(q=1).all_keys() == ["size", "tags", "q"]

    def test_update(self, element: BaseDataElement) -> None:
        element.update(BaseDataElement(metainfo={"size": 0}, image=5, more=6))
        assert (element.size, element.image, element.more) == (0, 5, 6)

    def test_conversions_reach_inner_elements(self) -> None:
        sample = BaseDataElement(x=torch.ones(1, requires_grad=True), inner=BaseDataElement(y=torch.zeros(1)), s="a")
        assert sample.to(torch.float64).inner.y.dtype == torch.float64
        assert isinstance(sample.detach().numpy().inner.y, np.ndarray)
        assert isinstance(sample.detach().numpy().to_tensor().x, torch.Tensor)
        assert not sample.detach().x.requires_grad
        assert sample.cpu().s == "a"
        assert sample.inner.y.dtype == torch.float32

    def test_to_dict_and_items(self) -> None:
        sample = BaseDataElement(metainfo={"m": 1}, inner=BaseDataElement(z=2))
        assert sample.to_dict() == {"m": 1, "inner": {"z": 2}}
        assert dict(sample.metainfo_items()) == {"m": 1}
        assert [name for name, _ in sample.all_items()] == ["m", "inner"]
        assert sample.values() == [sample.inner]
        assert sample.all_values() == [1, sample.inner]

    def test_copies(self, element: BaseDataElement) -> None:
        twin = copy.deepcopy(element)
        twin.image += 1
        assert element.image.sum() == 0
        assert pickle.loads(pickle.dumps(element)).size == (4, 6)

    def test_its_text_shows_shapes(self, element: BaseDataElement) -> None:
        assert "size: (4, 6)" in repr(element)
        assert "image" in repr(element)

    def test_wrong_types_are_assertion_errors_too(self, element: BaseDataElement) -> None:
        for call in (element.set_metainfo, element.set_data, element.update):
            with pytest.raises(AssertionError):
                call(3)
            with pytest.raises(TypeError):
                call(3)

    def test_a_property_with_a_type(self) -> None:
        class Sample(BaseDataElement):
            @property
            def boxes(self) -> InstanceData:
                return self._boxes

            @boxes.setter
            def boxes(self, value: InstanceData) -> None:
                self.set_field(value, "_boxes", dtype=InstanceData)

            @boxes.deleter
            def boxes(self) -> None:
                del self._boxes

        sample = Sample(boxes=InstanceData(a=[1, 2]))
        assert sample.keys() == ["boxes"]
        assert "boxes" in sample
        assert len(sample.to("cpu").boxes) == len(sample.clone().boxes) == 2
        with pytest.raises(AssertionError):
            sample.boxes = 3
        del sample.boxes
        assert "boxes" not in sample


class Chain:
    """A user's own sequence, which takes slices only."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Chain:
        if not isinstance(index, slice):
            raise TypeError("a chain takes slices")
        return Chain(self.items[index])

    @staticmethod
    def cat(chains: list[Chain]) -> Chain:
        return Chain([item for chain in chains for item in chain.items])


@pytest.fixture
def found() -> InstanceData:
    return InstanceData(
        metainfo={"shape": (8, 8)},
        boxes=torch.arange(12.0).view(3, 4),
        labels=torch.tensor([1, 2, 3]),
        names=["a", "b", "c"],
        array=np.arange(3),
        pair=(1, 2, 3),
        text="xyz",
        chain=Chain([1, 2, 3]),
    )


class TestInstanceData:
    @pytest.mark.parametrize(
        ("index", "expected"),
        [
            (1, [2]),
            (-1, [3]),
            (slice(1, 3), [2, 3]),
            (slice(None, None, 2), [1, 3]),
            ([2, 0], [3, 1]),
            ([True, False, True], [1, 3]),
            ([], []),
            (torch.tensor([True, False, True]), [1, 3]),
            (torch.tensor([2, 2]), [3, 3]),
            (torch.tensor([-1]), [3]),
            (np.array([0, 2]), [1, 3]),
            (np.array([False, True, True]), [2, 3]),
        ],
    )
    def test_one_index_for_all_fields(self, found: InstanceData, index: Any, expected: list[int]) -> None:
        chosen = found[index]
        assert type(chosen) is InstanceData
        assert len(chosen) == len(expected)
        assert chosen.labels.tolist() == expected
        assert chosen.names == ["abc"[label - 1] for label in expected]
        assert chosen.array.tolist() == [label - 1 for label in expected]
        assert chosen.pair == tuple(expected)
        assert chosen.text == "".join("xyz"[label - 1] for label in expected)
        assert chosen.chain.items == expected
        assert chosen.boxes.shape == (len(expected), 4)
        assert chosen.shape == (8, 8)

    @pytest.mark.parametrize(
        ("index", "error"),
        [
            (3, IndexError),
            (-4, IndexError),
            (torch.tensor([True]), AssertionError),
            (torch.ones(2), AssertionError),
            (torch.zeros(2, 2, dtype=torch.int64), AssertionError),
            (None, AssertionError),
            (["a"], TypeError),
            ([5], IndexError),
        ],
    )
    def test_wrong_indices(self, found: InstanceData, index: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            found[index]

    def test_a_field_by_its_name(self, found: InstanceData) -> None:
        assert found["labels"].tolist() == [1, 2, 3]

    def test_all_fields_are_equally_long(self) -> None:
        with pytest.raises(AssertionError, match="2 entries"):
            InstanceData(a=[1, 2], b=[1])
        for wrong in (3, None):
            with pytest.raises(AssertionError, match="one entry per instance"):
                InstanceData(a=wrong)
        assert (len(InstanceData()), len(InstanceData(metainfo={"a": 1}))) == (0, 0)

    def test_cat(self, found: InstanceData) -> None:
        joined = InstanceData.cat([found, found[:1]])
        assert len(joined) == 4
        assert joined.labels.tolist() == [1, 2, 3, 1]
        assert (joined.names, joined.text, joined.pair) == (["a", "b", "c", "a"], "xyzx", (1, 2, 3, 1))
        assert joined.chain.items == [1, 2, 3, 1]
        assert joined.shape == (8, 8)
        assert len(InstanceData.cat([found])) == 3
        assert len(InstanceData.cat([InstanceData(), InstanceData()])) == 0

    @pytest.mark.parametrize("wrong", [[], [3], [InstanceData(a=[1]), InstanceData(b=[1])]])
    def test_what_cannot_be_joined(self, wrong: list[Any]) -> None:
        with pytest.raises(AssertionError, match="instances_list"):
            InstanceData.cat(wrong)

    def test_a_loop_sees_each_instance(self, found: InstanceData) -> None:
        assert [one.labels.item() for one in found] == [1, 2, 3]


class TestPixelData:
    def test_crops(self) -> None:
        maps = PixelData(metainfo={"q": 1}, seg=torch.arange(24).view(1, 4, 6), scores=np.zeros((3, 4, 6)))
        assert maps.shape == (4, 6)
        assert maps[1:3, :2].seg.shape == (1, 2, 2)
        assert maps[1, 2].seg.tolist() == [[[8]]]
        assert maps[-1, -1].scores.shape == (3, 1, 1)
        assert maps[:2, 0].q == 1
        assert PixelData().shape is None

    def test_two_dims_become_three(self) -> None:
        assert PixelData(seg=torch.zeros(4, 6)).seg.shape == (1, 4, 6)

    @pytest.mark.parametrize(
        "fields",
        [
            {"a": torch.zeros(3)},
            {"a": [1]},
            {"a": torch.zeros(4, 6), "b": torch.zeros(4, 5)},
        ],
    )
    def test_wrong_fields(self, fields: dict[str, Any]) -> None:
        with pytest.raises(AssertionError):
            PixelData(**fields)

    @pytest.mark.parametrize("index", [(1.0, 1), ([1, 2], 0)])
    def test_wrong_indices(self, index: Any) -> None:
        with pytest.raises(TypeError):
            PixelData(a=torch.zeros(4, 6))[index]
        with pytest.raises(AssertionError):
            PixelData(a=torch.zeros(4, 6))[1, 1, 1]


class TestLabelData:
    def test_both_forms(self) -> None:
        assert LabelData.label_to_onehot(torch.tensor([2, 0]), 4).tolist() == [1, 0, 1, 0]
        assert LabelData.onehot_to_label(torch.tensor([1, 0, 1])).tolist() == [0, 2]
        assert LabelData(label=torch.tensor([1])).label.tolist() == [1]

    def test_what_is_neither(self) -> None:
        with pytest.raises(ValueError, match="0 and 1"):
            LabelData.onehot_to_label(torch.tensor([1, 0, 2]))
        for label in (torch.tensor([1, 5]), [1]):
            with pytest.raises(AssertionError):
                LabelData.label_to_onehot(label, 3)


def test_they_are_locksteps() -> None:
    for kind in (BaseDataElement, InstanceData, PixelData, LabelData):
        assert issubclass(kind, getattr(lockstep.structures, kind.__name__))
        assert issubclass(kind, BaseDataElement)
