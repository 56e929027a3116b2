from __future__ import annotations

import copy
import pickle
from collections import namedtuple

import pytest

from lockstep.config import ConfigDict
from lockstep.config.dictionary import leaves
from lockstep.errors import ConfigError

Pair = namedtuple("Pair", "left right")


def test_keys_are_attributes_at_every_depth():
    original = {"model": {"stages": [{"depth": 2}], "pair": ({"x": 1}, 2)}, "named": Pair({}, 1)}
    cfg = ConfigDict(original)
    cfg.model.stages[0].depth = 3
    assert cfg["model"]["stages"][0]["depth"] == 3
    assert cfg.model.pair[0].x == 1
    assert isinstance(cfg.named, Pair)
    assert isinstance(cfg.named.left, ConfigDict)
    assert original["model"]["stages"] == [{"depth": 2}]  # the original is left alone


@pytest.mark.parametrize(
    "put",
    [
        lambda cfg, value: cfg.update(a=value),
        lambda cfg, value: cfg.setdefault("a", value),
        lambda cfg, value: cfg.__ior__({"a": value}),
        lambda cfg, value: cfg.__setitem__("a", value),
        lambda cfg, value: setattr(cfg, "a", value),
    ],
)
def test_every_way_in_converts_dicts(put):
    cfg = ConfigDict()
    put(cfg, {"b": 1})
    assert cfg.a.b == 1


def test_or_gives_a_new_dict():
    cfg = ConfigDict(a=1)
    both = cfg | {"b": {"c": 2}}
    assert both.b.c == 2
    assert cfg == {"a": 1}


@pytest.mark.parametrize(
    "change",
    [lambda cfg, new: cfg.update(new), lambda cfg, new: cfg.update(**new), lambda cfg, new: cfg.__ior__(new)],
)
def test_update_merges_dicts_and_keeps_what_they_do_not_name(change):
    cfg = ConfigDict(norm={"mean": 1, "std": {"r": 2, "g": 3}}, size=4)
    norm, std = cfg.norm, cfg.norm.std
    new = {"norm": {"std": {"g": 5}, "bgr": True}, "size": {"width": 6}}
    change(cfg, new)
    assert cfg == {"norm": {"mean": 1, "std": {"r": 2, "g": 5}, "bgr": True}, "size": {"width": 6}}
    assert cfg.norm is norm  # as for what else refers to it
    assert norm.std is std
    assert new == {"norm": {"std": {"g": 5}, "bgr": True}, "size": {"width": 6}}
    change(cfg, {"norm": None})
    assert cfg.norm is None


def test_or_merges_dicts_and_changes_neither():
    left, right = {"norm": {"mean": 1, "std": {"r": 2}}}, {"norm": {"std": {"g": 3}}}
    both = {"norm": {"mean": 1, "std": {"r": 2, "g": 3}}}
    first, second = ConfigDict(left), ConfigDict(right)
    for one in (first | second, first | right, left | second):
        assert one == both
        one.norm.std.r = 7
    assert (first, second) == (left, right)


def test_merge_goes_key_by_key_and_changes_in_place():
    cfg = ConfigDict(model={"type": "Net", "head": {"width": 3}}, lr=1)
    model = cfg.model
    cfg.model.merge({"head": {"bias": False}, "depth": 2})
    assert model == {"type": "Net", "head": {"width": 3, "bias": False}, "depth": 2}
    cfg.model.merge({"_delete_": True, "head": {"type": "Id"}})
    assert cfg.model is model
    assert cfg == {"model": {"head": {"type": "Id"}}, "lr": 1}
    assert cfg.model.head.type == "Id"
    with pytest.raises(ConfigError, match=r"`lr` is a dict, but was 1"):
        cfg.merge({"lr": {"value": 1}})


def test_a_missing_key_suggests_the_nearest():
    cfg = ConfigDict(optimizer=1)
    with pytest.raises(AttributeError, match=r"no key `optimiser`: did you mean `optimizer`\?"):
        _ = cfg.optimiser
    with pytest.raises(KeyError, match="did you mean `optimizer`"):
        cfg["optimiser"]
    with pytest.raises(AttributeError, match=r"no key `zebra`$"):
        del cfg.zebra
    with pytest.raises(
        AttributeError, match=r"no key `pad` \(this is the config of `Tokenizer`, not what is built from"
    ):
        _ = ConfigDict(type="Tokenizer").pad
    assert not hasattr(cfg, "zebra")
    assert cfg.get("zebra", 7) == 7
    del cfg.optimizer
    assert cfg == {}


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, ConfigDict.deepcopy, lambda cfg: pickle.loads(pickle.dumps(cfg))],
    ids=["copy", "method", "pickle"],
)
def test_deep_copies_share_nothing(duplicate):
    cfg = ConfigDict(a={"b": [{"c": 1}]})
    other = duplicate(cfg)
    assert other == cfg
    assert type(other.a.b[0]) is ConfigDict
    other.a.b[0].c = 2
    assert cfg.a.b[0].c == 1


def test_to_dict_is_plain_all_the_way_down():
    plain = ConfigDict(a={"b": [{"c": 1}], "d": ({"e": 2},)}).to_dict()
    assert type(plain) is dict
    assert type(plain["a"]["b"][0]) is dict
    assert plain == {"a": {"b": [{"c": 1}], "d": ({"e": 2},)}}


def test_leaves_are_what_has_no_items():
    found = dict(leaves({"a": {"b": [1, {"c": True}], "empty": {}}, "text": "xy", "none": None}))
    assert found == {"a.b.0": 1, "a.b.1.c": True, "a.empty": {}, "text": "xy", "none": None}
    assert list(leaves(3, "key")) == [("key", 3)]
    assert list(leaves({1: "a", "1": "b", "set": {5}})) == [("1", "a"), ("1", "b"), ("set.0", 5)]


def test_a_copy_shares_dicts_but_no_lists():
    cfg = ConfigDict(model={"width": 1}, depths=[2], heads=[{"bias": True}])
    copied = cfg.copy()
    assert copied.model is cfg.model
    assert copied.heads[0] is cfg.heads[0]
    copied.depths.append(3)
    assert cfg.depths == [2]


def test_a_key_with_two_underscores_is_read_by_index():
    cfg = ConfigDict(__version__=1)
    assert cfg["__version__"] == 1
    with pytest.raises(AttributeError, match="the key `__version__` can only be read by index"):
        _ = cfg.__version__
    with pytest.raises(AttributeError, match="no key `__versoin__`: did you mean `__version__`"):
        _ = cfg.__versoin__
