"""A config as Python source gives an equal config when it is read again."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Config
from lockstep.config.dictionary import ConfigDict
from lockstep.config.python_file import PythonFile
from lockstep.config.source_form import plain_data, python_source


class Folder(PurePosixPath):
    """A path of another class than pathlib's."""


values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "class", "two words"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), values, max_size=3))
def test_source_gives_the_values_back(config):
    again = Config(PythonFile(Path("c.py"), python_source(Config(config))).values(ConfigDict()))
    assert again == Config(config)
    assert repr(again.to_dict()) == repr(Config(config).to_dict())  # with the types, as of 1 and True


@pytest.mark.parametrize(
    ("value", "source", "plain"),
    [
        (OrderedDict, "import collections\n\na = collections.OrderedDict\n", "collections.OrderedDict"),
        (float("-inf"), "a = float('-inf')\n", float("-inf")),
        (range(2, 5), "a = range(2, 5)\n", "range(2, 5)"),
        ({3, 1}, "a = set([1, 3])\n", [1, 3]),
        ((1,), "a = (1,)\n", [1]),
        (re.I, "import re\n\na = re.RegexFlag.IGNORECASE\n", "re.RegexFlag.IGNORECASE"),
        (re.I | re.M, "import re\n\na = re.RegexFlag(10)\n", "re.IGNORECASE|re.MULTILINE"),
        (dict.fromkeys, "a = dict.fromkeys\n", "builtins.dict.fromkeys"),
        (
            torch.nn.Embedding.from_pretrained,
            "import torch.nn.modules.sparse\n\na = torch.nn.modules.sparse.Embedding.from_pretrained\n",
            "torch.nn.modules.sparse.Embedding.from_pretrained",
        ),
        (complex("inf"), "a = complex('(inf+0j)')\n", "(inf+0j)"),
        (np.int64(4), "a = 4\n", 4),
        (np.float32(0.5), "a = 0.5\n", 0.5),
        (np.True_, "a = True\n", True),
        (
            {np.int64(4): 1, (float("inf"), dict): 2},
            "a = {4: 1, (float('inf'), dict): 2}\n",
            {"4": 1, "(inf, <class 'dict'>)": 2},
        ),
        ({1: 2, "1": 3, None: 4}, "a = {1: 2, '1': 3, None: 4}\n", {"1 (int)": 2, "1": 3, "None": 4}),
        (torch.device("cuda", 1), "import torch\n\na = torch.device('cuda:1')\n", "device(type='cuda', index=1)"),
        (torch.bfloat16, "import torch\n\na = torch.bfloat16\n", "torch.bfloat16"),
        (torch.channels_last, "import torch\n\na = torch.channels_last\n", "torch.channels_last"),
        (torch.relu, "import torch\n\na = torch.relu\n", "torch.relu"),
        (Path("a"), f"import pathlib\n\na = pathlib.{type(Path()).__name__}('a')\n", "a"),
        (
            Folder("b"),
            "import tests.config.test_source_form\n\na = tests.config.test_source_form.Folder('b')\n",
            "b",
        ),
    ],
)
def test_source_and_data_of_other_values(value, source, plain):
    assert python_source({"a": value}) == source
    assert PythonFile(Path("c.py"), source).values(ConfigDict()) == {"a": value}
    assert plain_data({"a": value}) == {"a": plain}


def test_a_path_that_is_no_text_is_the_same_again_from_json(tmp_path):
    config = Config({"data_root": os.fsdecode(b"data/\xff")})
    config.dump(tmp_path / "c.json")
    assert Config.fromfile(tmp_path / "c.json").to_dict() == config.to_dict()


def test_sets_have_one_order_in_every_process():
    letters = [*"abcdefgh"]
    assert plain_data(set(letters)) == letters
    assert plain_data([{frozenset(letters), frozenset("i")}]) == [[letters, ["i"]]]
    assert python_source({"a": {frozenset(letters)}}) == f"a = set([frozenset({letters})])\n"
