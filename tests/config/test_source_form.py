from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Config, differences


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, [("changed", "a", "1", "1.0")]),
        ({"a": 1}, {"a": True}, [("changed", "a", "1", "True")]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": {"d": 2}}}, [("added", "a.c.d", "", "2")]),
        ({"a": {"b": {}}}, {}, [("removed", "a.b", "dict()", "")]),
        ({"a": [1, {"x": 2}]}, {"a": [1, {"x": 3}, 4]}, [("changed", "a.1.x", "2", "3"), ("added", "a.2", "", "4")]),
        ({"a": [1]}, {"a": (1,)}, [("changed", "a", "[1]", "(1,)")]),
        ({"a": [1]}, {"a": []}, [("changed", "a", "[1]", "[]")]),
        ({"a": {"b": 1}}, {"a": 2}, [("changed", "a", "dict(b=1)", "2")]),
        ({"a": OrderedDict}, {"a": int}, [("changed", "a", "collections.OrderedDict", "int")]),
    ],
)
def test_what_differs(old, new, told):
    found = [(d.kind, d.key, d.old, d.new) for d in differences(Config(old), Config(new))]
    assert found == told


values = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from([0.5, "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
configs = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
OPPOSITE = {"added": "removed", "removed": "added", "changed": "changed"}


@given(configs, configs)
def test_there_and_back_are_mirror_images(old, new):
    there = {(d.kind, d.key, d.old, d.new) for d in differences(old, new)}
    back = {(OPPOSITE[d.kind], d.key, d.new, d.old) for d in differences(new, old)}
    assert there == back
    assert (there == set()) == (old == new)
