from __future__ import annotations

import collections
import copy
import enum
import json
import math
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import Config, ConfigDict
from lockstep.errors import ConfigError


@pytest.fixture
def cfg():
    return Config({"model": {"type": "Net"}, "lr": 0.1}, filename="c.py", text="lr = 0.1")


def test_it_is_a_dict_with_a_file(cfg):
    assert isinstance(cfg, dict)
    assert cfg.model.type == "Net"
    assert (cfg.filename, cfg.text) == ("c.py", "lr = 0.1")
    assert Config() == {}
    assert Config().filename is None
    with pytest.raises(TypeError, match="`cfg_dict` must be a dict"):
        Config([1])
    with pytest.raises(AttributeError, match="did you mean `model`"):
        _ = cfg.modle


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda c: c.copy(), lambda c: pickle.loads(pickle.dumps(c))],
    ids=["copy", "deepcopy", "method", "pickle"],
)
def test_copies_keep_the_file(cfg, duplicate):
    other = duplicate(cfg)
    assert other == cfg
    assert type(other) is Config
    assert (other.filename, other.text) == ("c.py", "lr = 0.1")
    other.lr = 7
    assert cfg.lr == 0.1


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text().filter(lambda text: "{{" not in text)  # `{{ name }}` is filled in when a file is read
    | st.binary()
    | st.frozensets(st.integers()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text().filter("_delete_".__ne__) | st.integers(), inner)  # Hypothesis draws names of ours
    ),
    max_leaves=20,
)
keys = st.text(min_size=1).filter(
    lambda key: not (key.startswith("_") or hasattr(Config, key) or key in ("filename", "text", "custom_imports"))
)


@settings(max_examples=40)
@given(st.dictionaries(keys, plain))
def test_the_source_of_a_config_gives_an_equal_config(values):
    cfg = Config(values)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "c.py")
        cfg.dump(path)
        again = Config.fromfile(path)
    assert again == cfg
    assert again.dump() == cfg.dump()


def test_what_is_imported_comes_back_as_itself(tmp_path):
    cfg = Config(
        {
            "type": collections.OrderedDict,
            "function": json.loads,
            "builtin": int,
            "member": enum.FlagBoundary.STRICT,
            "path": pathlib.PurePosixPath("a/b"),
            "special": [math.inf, -math.inf],
            "strings": {"b", "a"},
        }
    )
    cfg.dump(tmp_path / "c.py")
    again = Config.fromfile(tmp_path / "c.py")
    assert again == cfg
    assert again.type is collections.OrderedDict
    assert "set(['a', 'b'])" in cfg.pretty_text


def test_what_has_no_source_is_described_and_said_so(tmp_path):
    def local():
        pass

    cfg = Config({"a": {"f": lambda: 1, "g": [local]}, "b": 1})
    text = cfg.dump(tmp_path / "c.py")
    assert text.endswith(cfg.pretty_text)
    assert cfg.pretty_text.startswith("# without a source form, so described only: a.f, a.g.0\n")
    again = Config.fromfile(tmp_path / "c.py")
    assert again.b == 1
    assert again.a.g[0].startswith("<function test_what_has_no_source")


def test_a_key_does_not_leave_the_comment_that_names_it():
    cfg = Config({"a\nlr = 7\n#": lambda: 1})
    assert cfg.pretty_text.startswith("# without a source form, so described only: a\\nlr = 7\\n#\n")


def test_long_values_break_into_lines_that_fit():
    stages = [{"type": "Stage", "depth": depth, "name": "x" * 20} for depth in range(4)]
    text = Config({"model": {"type": "Net", "stages": stages}, "short": [1, 2]}).pretty_text
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("model = dict(\n    type='Net',\n    stages=[\n        dict(type='Stage'")
    assert text.endswith("],\n)\nshort = [1, 2]\n")


def test_dump_to_yaml_and_json(tmp_path):
    cfg = Config(
        {
            "type": collections.OrderedDict,
            "t": (1, {"x": None}),
            "member": signal.SIGINT,
            "path": pathlib.PurePosixPath("a/b"),
            "é": 0.5,
        }
    )
    assert yaml.safe_load(cfg.dump(tmp_path / "c.yaml")) == {
        "type": "collections.OrderedDict",
        "t": [1, {"x": None}],
        "member": "signal.Signals.SIGINT",
        "path": "a/b",
        "é": 0.5,
    }
    assert Config.fromfile(tmp_path / "c.yaml", trusted=True).t == [1, {"x": None}]
    assert json.loads(cfg.dump(tmp_path / "c.json"))["t"] == [1, {"x": None}]
    assert list(Config.fromfile(tmp_path / "c.json", trusted=True)) == list(cfg)
    with pytest.raises(ConfigError, match=r"must end in \.py"):
        cfg.dump(tmp_path / "c.txt")


def test_a_reserved_key_is_refused():
    with pytest.raises(ConfigError, match="`pretty_text` cannot be a key"):
        Config({"pretty_text": 1})
    assert Config({"a": {"pretty_text": 1}}).a == ConfigDict(pretty_text=1)


def test_importing_configs_does_not_import_torch():
    code = "import sys, lockstep.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_keys_that_are_named_as_python_itself_or_a_module_keep_their_dumped_config_readable(tmp_path):
    """A config in which `dict = dict(...)` came first could not call `dict` below it."""
    odd = Config(
        {
            "dict": {"a": 1},
            "float": math.inf,
            "set": {1, 2},
            "frozenset": frozenset([3]),
            "range": range(4),
            "int": int,
            "globals": {"b": {}},
            "pathlib": pathlib.PurePosixPath("x"),
            "collections": collections.Counter,
            "builtins": {"c": -math.inf},
            "no name": 1,
        }
    )
    odd.dump(tmp_path / "c.py")
    assert Config.fromfile(tmp_path / "c.py") == odd
