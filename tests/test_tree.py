"""Walking nested data without losing a type, a key or an order."""

from __future__ import annotations

import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tree import TreeNode, tree_items, tree_leaves, tree_map

Renamed = namedtuple("Renamed", ["ok", "class"], rename=True)


REFUSED = -1


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclass
class Sample:
    image: Any
    label: Any = 0
    seen: int = field(default=7, init=False)

    def __post_init__(self) -> None:
        if self.label == REFUSED:
            raise AssertionError("the constructor must not run again")


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    derived: Any = field(init=False, default=None)


class Box:
    """A node by the two methods, with something else in it."""

    def __init__(self, content: Any, mark: str) -> None:
        self.content, self.mark = content, mark

    def tree_children(self) -> dict[str, Any]:
        return {"content": self.content}

    def tree_rebuild(self, children: dict[str, Any]) -> Self:
        return type(self)(children["content"], self.mark)


class Row(list):
    pass


class Pair(tuple):
    __slots__ = ()


class Immutable(Mapping):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def plus_one(x: Any) -> Any:
    return x + 1


def test_a_dict_keeps_its_order() -> None:
    assert list(tree_map(plus_one, {"b": 1, "a": 2}).items()) == [("b", 2), ("a", 3)]


@pytest.mark.parametrize(
    ("tree", "mapped"),
    [
        (1, 2),
        ([1, (2, [3])], [2, (3, [4])]),
        ([], []),
        ((), ()),
        ({}, {}),
        (Point(1, 2), Point(2, 3)),
        (Renamed(1, 2), Renamed(2, 3)),
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=3)),
        (UserDict(a=1), UserDict(a=2)),
        (Row([1, 2]), Row([2, 3])),
        (Pair([1, 2]), Pair([2, 3])),
        (torch.Size([1, 2]), torch.Size([2, 3])),
        (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_containers_keep_their_type(tree: Any, mapped: Any) -> None:
    result = tree_map(plus_one, tree)
    assert type(result) is type(tree)
    assert result == mapped


def test_an_immutable_mapping_is_made_anew() -> None:
    result = tree_map(plus_one, Immutable({"a": [1]}))
    assert type(result) is Immutable
    assert dict(result) == {"a": [2]}


class Inner(MutableMapping[str, Any]):
    """Keeps its items in a dict of its own, which a shallow copy shares."""

    def __init__(self, items: Any = ()) -> None:
        self.items_of = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


def test_a_mapping_whose_copies_share_its_items_is_not_changed() -> None:
    given = Inner({"a": 1, "b": [2]})
    result = tree_map(plus_one, given)
    assert type(result) is Inner
    assert dict(result) == {"a": 2, "b": [3]}
    assert dict(given) == {"a": 1, "b": [2]}


def test_a_defaultdict_keeps_its_factory() -> None:
    result = tree_map(plus_one, defaultdict(list, {"a": 1}))
    assert result == {"a": 2}
    assert result["missing"] == []


def test_what_torch_and_the_system_return_as_tuples_with_names_keeps_its_type() -> None:
    largest = torch.max(torch.tensor([[1, 3], [4, 2]]), 1)
    mapped = tree_map(lambda x: x * 2, largest)
    assert type(mapped) is type(largest)
    assert mapped.values.tolist() == [6, 8]
    moment = time.gmtime(0)
    assert tree_map(lambda x: x, moment) == moment


def test_a_dataclass_keeps_what_its_constructor_does_not_take_and_does_not_run_it() -> None:
    sample = Sample([1, 2], 3)
    sample.seen = 4
    result = tree_map(lambda x: REFUSED if x == 3 else x + 1, sample)
    assert (type(result), result.image, result.label, result.seen) == (Sample, [2, 3], REFUSED, 5)
    assert (sample.image, sample.label, sample.seen) == ([1, 2], 3, 4)


def test_a_frozen_dataclass_with_slots_is_copied() -> None:
    tree = Frozen({"a": 1})
    object.__setattr__(tree, "derived", 2)
    result = tree_map(plus_one, tree)
    assert type(result) is Frozen
    assert (result.value, result.derived) == ({"a": 2}, 3)
    assert (tree.value, tree.derived) == ({"a": 1}, 2)


def test_a_class_of_ones_own_is_a_node_by_two_methods() -> None:
    assert isinstance(Box(1, "m"), TreeNode)
    result = tree_map(plus_one, [Box({"a": 1}, "m")])[0]
    assert (type(result), result.content, result.mark) == (Box, {"a": 2}, "m")


@pytest.mark.parametrize("leaf", [None, "text", b"bytes", {1, 2}, range(3), 1.5, torch.ones(2), Sample, Box], ids=repr)
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    (found,) = tree_leaves([leaf])
    assert found is leaf
    assert tree_map(type, (leaf,)) == (type(leaf),)


def test_paths_say_how_to_reach_a_leaf() -> None:
    tree = {"losses": [Sample(1, Point(2, 3))], 5: (4,), "box": Box(6, "")}
    assert list(tree_items(tree)) == [
        ("losses[0].image", 1),
        ("losses[0].label.x", 2),
        ("losses[0].label.y", 3),
        ("losses[0].seen", 7),
        ("[5][0]", 4),
        ("box.content", 6),
    ]
    assert list(tree_items(1)) == [("", 1)]
    assert list(tree_items({"a": 1}, "data")) == [("data.a", 1)]


trees = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(lambda x: (x,), inner)
        | st.builds(Frozen, inner)
    ),
    max_leaves=12,
)


@given(trees)
def test_mapping_with_the_identity_gives_an_equal_tree(tree: Any) -> None:
    assert tree_map(lambda x: x, tree) == tree


@given(trees)
def test_leaves_paths_and_map_share_one_order(tree: Any) -> None:
    seen: list[Any] = []
    tree_map(seen.append, tree)
    assert tree_leaves(tree) == seen == [leaf for _, leaf in tree_items(tree)]
