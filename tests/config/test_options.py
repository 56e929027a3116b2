from __future__ import annotations

import re
from argparse import ArgumentParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Config, DictAction, parse_options
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-3", 1e-3),
        ("-2.5", -2.5),
        ("True", True),
        ("true", True),
        ("false", False),
        ("none", None),
        ("Null", None),
        ("hello", "hello"),
        ("hello world", "hello world"),
        ("", ""),
        ("'1'", "1"),
        ("'a,b'", "a,b"),
        ("a=b", "a=b"),
        ("x,y", ["x", "y"]),
        ("1,2", [1, 2]),
        ("1,", [1]),
        ("[1,2]", [1, 2]),
        ("[a, 1e-3, true]", ["a", 1e-3, True]),
        ("[(a,b),(c,1)]", [("a", "b"), ("c", 1)]),
        ("(1,)", (1,)),
        ("[]", []),
        ("['a,b', \"c]\"]", ["a,b", "c]"]),
        ("{'a': 1}", {"a": 1}),
        ("[1", "[1"),
        ("it's", "it's"),
        ("[it's]", ["it's"]),
        ("(a|b)", ("a|b",)),
        ("(a|b)(c|d)", "(a|b)(c|d)"),
        ("[0-9]+[a-z]", "[0-9]+[a-z]"),
        ('{"k": true, "n": [null, 1.5]}', {"k": True, "n": [None, 1.5]}),
        ('[{"k": null}, {"a": "x\\"y"}]', [{"k": None}, {"a": 'x"y'}]),
        ('[{"k": null}, word]', [{"k": None}, "word"]),
        ("[NaN, null]", ["NaN", None]),
        ("{k: true}", "{k: true}"),
        ("/data/x.y", "/data/x.y"),
        ("__import__('os').getcwd()", "__import__('os').getcwd()"),
    ],
)
def test_how_a_value_reads(text, value):
    got = parse_options([f"key={text}"])["key"]
    assert got == value
    assert type(got) is type(value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values.filter(lambda v: v not in (float("inf"), float("-inf"))))
def test_a_python_literal_reads_as_itself(value):
    text = repr(value)
    if "inf" not in text:
        assert parse_options([f"k={text}"]) == {"k": value}


@given(st.text())
def test_any_text_reads_as_something(text):
    assert set(parse_options([f"k={text}"])) == {"k"}


@pytest.mark.parametrize("option", ["a", "=1", "a.=1", ".a=1", ""])
def test_an_option_needs_a_key_and_a_value(option):
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_options([option])


def test_of_equal_keys_the_last_one_counts_also_over_what_lies_between():
    parser = ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    options = ["a.x=1", "a={'x':5}", "a.x=2"]
    together = ["--cfg-options", *options]
    apart = [word for option in options for word in ("--cfg-options", option)]
    for changes in (parse_options(options), *(parser.parse_args(words).cfg_options for words in (together, apart))):
        cfg = Config({"a": {"x": 0}})
        cfg.merge_from_dict(changes)
        assert cfg.a.x == 2


@pytest.fixture
def cfg():
    return Config({"model": {"width": 1, "stages": [{"depth": 1}, {"depth": 2}]}, "lr": 0.1})


def test_dotted_keys_reach_dicts_and_lists_and_make_what_is_missing(cfg):
    cfg.merge_from_dict(
        {
            "model.width": 2,
            "model.stages.1.depth": 5,
            "model.stages.-2": 7,
            "env.cudnn": {"on": True},
            "model": {"height": 3},
        }
    )
    assert cfg == {
        "model": {"width": 2, "stages": [7, {"depth": 5}], "height": 3},
        "lr": 0.1,
        "env": {"cudnn": {"on": True}},
    }
    assert cfg.env.cudnn.on is True


def test_a_dict_of_numbers_changes_items_of_a_list():
    """As MMEngine's `merge_from_dict` does, at any depth."""
    cfg = Config({"pipeline": [{"type": "Load"}, {"type": "Flip", "p": 0.5}], "model": {"stages": [{"a": 1}, 2]}})
    cfg.merge_from_dict({"pipeline": {"0": {"type": "SelfLoad"}}, "model": {"stages": {"0": {"b": 3}, "1": 4}}})
    assert cfg.pipeline == [{"type": "SelfLoad"}, {"type": "Flip", "p": 0.5}]
    assert cfg.model.stages == [{"a": 1, "b": 3}, 4]
    with pytest.raises(ConfigError, match="must index the list `pipeline` by a number below 2, but has '5'"):
        cfg.merge_from_dict({"pipeline": {"5": {}}})
    cfg.merge_from_dict({"pipeline": {"type": "One"}, "model": {"stages": {"_delete_": True, "0": 1}}})
    assert (cfg.pipeline, cfg.model.stages) == ({"type": "One"}, {"0": 1})


def test_a_dict_is_merged_unless_it_deletes(cfg):
    cfg.merge_from_dict({"model": {"_delete_": True, "x": 1}, "lr": {"value": 1}})
    assert cfg == {"model": {"x": 1}, "lr": {"value": 1}}


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("lr.x", "option `lr.x` leads through `lr`, which is 0.1 and not a dict or list"),
        ("model.stages.2", "must index the list `model.stages` by a number below 2, but has '2'"),
        ("model.stages.first.depth", "by a number below 2, but has 'first'"),
        ("model.stages.0.depth.x", "leads through `model.stages.0.depth`, which is 1"),
        ("text", "`text` cannot be a key"),
    ],
)
def test_keys_that_lead_nowhere_change_nothing(cfg, key, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        cfg.merge_from_dict({"model.width": 5, key: 1})
    assert cfg.model.width == 1
