"""`BaseDataElement`: fields of two kinds."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.tree import tree_items, tree_map
from mmengine.structures import BaseDataElement


class Sample(BaseDataElement):
    """A typed field, in the way of the libraries built upon elements."""

    @property
    def boxes(self) -> BaseDataElement:
        return self._boxes

    @boxes.setter
    def boxes(self, value: BaseDataElement) -> None:
        self.set_field(value, "_boxes", dtype=BaseDataElement)

    @boxes.deleter
    def boxes(self) -> None:
        del self._boxes


def element(**data: Any) -> BaseDataElement:
    return BaseDataElement(metainfo={"size": [4, 6], "path": "a.png"}, **data)


def test_fields_are_attributes_and_keys_in_the_order_of_setting():
    sample = element(z=1, a=2)
    sample.m = None
    sample["b"] = 4
    assert sample.keys() == ["z", "a", "m", "b"]
    assert sample.values() == [1, 2, None, 4]
    assert dict(sample.items()) == {"z": 1, "a": 2, "m": None, "b": 4}
    assert sample.metainfo_keys() == ["size", "path"]
    assert sample.metainfo_values() == [[4, 6], "a.png"]
    assert sample.metainfo == dict(sample.metainfo_items()) == {"size": [4, 6], "path": "a.png"}
    assert sample.all_keys() == ["size", "path", "z", "a", "m", "b"]
    assert dict(zip(sample.all_keys(), sample.all_values(), strict=True)) == dict(sample.all_items())
    assert (sample.z, sample["path"], sample.get("m"), sample.get("none", 7)) == (1, "a.png", None, 7)
    assert "z" in sample
    assert "path" in sample
    assert "none" not in sample


def test_metainfo_is_copied_data_is_not():
    size, data = [1, 2], [3]
    sample = BaseDataElement(metainfo={"size": size}, data=data)
    size.append(9)
    data.append(9)
    assert sample.size == [1, 2]
    assert sample.data is data
    sample.clone().size.append(9)
    sample.to("cpu").size.append(9)
    assert sample.size == [1, 2]


def test_subclasses_may_read_the_names_of_each_kind():
    sample = element(x=1)
    assert (sample._data_fields, sample._metainfo_fields) == ({"x"}, {"size", "path"})
    for name in ("_data_fields", "_metainfo_fields"):
        with pytest.raises(AttributeError):
            setattr(sample, name, set())


def test_a_name_stays_of_its_kind_until_it_is_deleted():
    sample = element(x=1)
    with pytest.raises(
        AttributeError, match=r"`path` must stay a metainfo field of BaseDataElement, but is set as dat"
    ):
        sample.path = "b.png"
    with pytest.raises(AttributeError, match="`x` must stay a data field"):
        sample.set_metainfo({"x": 2})
    assert (sample.path, sample.x) == ("a.png", 1)
    sample.set_metainfo({"path": "b.png"})
    sample.x = 2
    assert (sample.path, sample.x) == ("b.png", 2)
    del sample.path
    del sample["x"]
    sample.path = "data now"
    sample.set_metainfo({"x": 3})
    assert sample.keys() == ["path"]
    assert sample.metainfo_keys() == ["size", "x"]


def test_fields_are_removed():
    sample = element(x=1)
    assert sample.pop("x") == 1
    assert sample.pop("path") == "a.png"
    assert sample.pop("x", None) is None
    with pytest.raises(KeyError, match="has no field 'x'; it has size"):
        sample.pop("x")
    with pytest.raises(AttributeError, match="has no field 'x'"):
        del sample.x
    with pytest.raises(KeyError, match="has no field 'x'"):
        sample["x"]
    with pytest.raises(AttributeError, match="BaseDataElement has no field 'x'; it has none at all"):
        _ = BaseDataElement().x


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda s: s.set_field(1, "x", dtype=str), TypeError, "`x` must be of <class 'str'>, but is 1"),
        (lambda s: s.set_field(1, "x", field_type="dat"), ValueError, "`field_type` must be .* but is 'dat'"),
        (lambda s: s.set_data([1]), TypeError, r"`data` must be a dict of fields by name, but is \[1\]"),
        (lambda s: s.set_metainfo("ab"), TypeError, "`metainfo` must be a dict"),
        (lambda s: s.update({"x": 1}), TypeError, r"must be a BaseDataElement.*set_data\(\)"),
        (lambda s: setattr(s, "keys", 1), AttributeError, "must not be called 'keys'"),
        (lambda s: setattr(s, "_data", {}), AttributeError, "must not be called '_data'"),
        (lambda s: setattr(s, "metainfo", {}), AttributeError, "no setter"),
        (lambda s: s[0], TypeError, "must be named by a str, but is by 0"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, error, says):
    sample = element(y=1)
    with pytest.raises(error, match=says) as caught:
        wrong(sample)
    assert error is AttributeError or isinstance(caught.value, AssertionError)  # as MMEngine raises
    assert sample.to_dict() == element(y=1).to_dict()


def test_new_elements_share_what_is_not_given():
    x = torch.zeros(2)
    sample = element(x=x)
    clone = sample.clone()
    clone.y = 1
    clone.set_metainfo({"path": "b.png"})
    assert clone.x is x
    assert sample.to_dict() == {"size": [4, 6], "path": "a.png", "x": x}
    assert sample.new(y=2).to_dict() == {"size": [4, 6], "path": "a.png", "y": 2}
    assert sample.new(metainfo={"n": 1}).to_dict() == {"n": 1, "x": x}
    assert copy.copy(sample).new().x is x
    deep = copy.deepcopy(sample)
    assert torch.equal(deep.x, x)
    assert deep.x is not x
    sample.update(BaseDataElement(metainfo={"path": "c.png"}, z=3))
    assert (sample.path, sample.z, sample.x is x) == ("c.png", 3, True)


def test_data_is_changed_however_deep_it_lies_and_metainfo_is_not():
    x = torch.ones(2, requires_grad=True)
    sample = BaseDataElement(
        metainfo={"mean": torch.zeros(1)}, x=x * 1, parts=[{"y": x * 2}], inner=BaseDataElement(z=x * 3), name="n"
    )
    doubled = sample.to(torch.float64)
    assert [leaf.dtype for _, leaf in tree_items(doubled) if isinstance(leaf, torch.Tensor)] == [torch.float64] * 3
    assert (doubled.mean.dtype, doubled.name) == (torch.float32, "n")
    assert sample.x.dtype == torch.float32
    detached = sample.detach().cpu()
    assert not any(v.requires_grad for v in (detached.x, detached.parts[0]["y"], detached.inner.z))
    arrays = sample.numpy()
    assert isinstance(arrays.parts[0]["y"], np.ndarray)
    assert isinstance(arrays.inner.z, np.ndarray)
    back = arrays.to_tensor()
    assert back.inner.z.tolist() == [3.0, 3.0]
    assert BaseDataElement(x=torch.ones(1, dtype=torch.bfloat16)).numpy().x.dtype == np.float32
    assert sample.to_dict()["inner"] == {"z": sample.inner.z}


def test_to_reaches_objects_that_know_how_to_move():
    class Boxes:
        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def to(self, dtype: torch.dtype) -> Boxes:
            return Boxes(dtype)

    assert element(boxes=Boxes(torch.float32)).to(torch.float16).boxes.dtype == torch.float16


def test_the_host_waits_for_copies_of_tensors_only_if_told_so(monkeypatch):
    class Masks:
        def to(self, device: str) -> str:
            return f"moved to {device}"

    noted = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: noted.append(kwargs))
    for options in ({}, {"non_blocking": True}):
        assert element(x=torch.ones(1), masks=Masks()).to("meta", **options).masks == "moved to meta"
    assert noted == [{}, {"non_blocking": True}]


def test_tensors_are_pinned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    sample = element(boxes=torch.zeros(1), names=["a"]).pin_memory()
    assert (sample.boxes.tolist(), sample.names) == ([1.0], ["a"])


def test_a_property_gives_a_field_its_type():
    sample = Sample(boxes=BaseDataElement(x=torch.ones(1)))
    with pytest.raises(TypeError, match=r"`_boxes` must be of .*BaseDataElement.*, but is 3"):
        sample.boxes = 3
    assert sample.keys() == ["boxes"]
    assert "boxes" in sample
    assert sample.boxes.x.item() == 1
    assert sample.to(torch.float64).boxes.x.dtype == torch.float64
    assert sample.clone().get("boxes") is sample.boxes
    assert sample.pop("boxes").x.item() == 1
    assert sample.keys() == []
    with pytest.raises(AttributeError, match="has no field"):
        _ = sample.boxes


class Renaming(BaseDataElement):
    """Stores a typed field under another name than that of its property."""

    @property
    def boxes(self) -> torch.Tensor:
        return self._found

    @boxes.setter
    def boxes(self, value: torch.Tensor) -> None:
        self.set_field(value, "_found", dtype=torch.Tensor)

    @boxes.deleter
    def boxes(self) -> None:
        del self._found


def test_a_property_may_store_its_field_under_any_name():
    sample = Renaming(boxes=torch.ones(1))
    for one in (sample, sample.clone(), pickle.loads(pickle.dumps(sample)), tree_map(lambda x: x, sample)):
        assert one.keys() == ["_found", "boxes"]  # as in MMEngine, where their order is any
        assert "boxes" in one
        assert one.get("boxes").item() == 1
    assert sample.new(x=1).keys() == ["x"]
    assert sample.pop("boxes").item() == 1
    assert sample.keys() == []


def test_pickle_keeps_type_kinds_and_order():
    sample = Sample(metainfo={"path": "a"}, b=1, boxes=BaseDataElement(x=2), a=3)
    again = pickle.loads(pickle.dumps(sample))
    assert type(again) is Sample
    assert again.to_dict() == sample.to_dict()
    assert again.all_keys() == ["path", "b", "boxes", "a"]


def test_repr_shows_kinds_and_shapes():
    text = repr(element(x=torch.zeros(2, 3), inner=BaseDataElement(a=np.zeros(2))))
    assert text.splitlines() == [
        "BaseDataElement",
        "  metainfo size: [4, 6]",
        "  metainfo path: 'a.png'",
        "  data x: Tensor(2, 3) float32 cpu",
        "  data inner: BaseDataElement",
        "    data a: ndarray(2,) float64",
    ]
