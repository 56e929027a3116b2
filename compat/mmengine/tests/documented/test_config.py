"""Configs, as MMEngine's documentation shows them: files, inheritance, options, placeholders, lazy configs, dumps."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from environments import LOCKSTEP
from torch import nn

from mmengine.config import Config, ConfigDict, DictAction, read_base
from mmengine.registry import MODELS, OPTIMIZERS

LEARN = """
test_int = 1
test_list = [1, 2, 3]
test_dict = dict(key1='value1', key2=0.1)
"""
OPTIMIZER = "optimizer = dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=0.0001)\n"


@pytest.fixture
def write(tmp_path):
    """Write config files, and return the path of the last one."""

    def write_files(**files: str) -> Path:
        path = tmp_path
        for name, text in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_text(text)
        return path

    return write_files


def read(path, **kwargs):
    return Config.fromfile(str(path), **kwargs)


def test_variables_of_a_file_are_keys(write):
    cfg = read(write(learn__py=LEARN))
    assert cfg.test_int == 1
    assert cfg.test_list == [1, 2, 3]
    assert cfg.test_dict.key2 == 0.1
    assert cfg["test_dict"]["key1"] == "value1"


def test_values_are_set_as_attributes_and_as_items(write):
    cfg = read(write(learn__py=LEARN))
    cfg.test_int = 5
    cfg["test_list"] = [4]
    cfg.test_dict.new = dict(inner=2)
    assert (cfg.test_int, cfg.test_list, cfg.test_dict.new.inner) == (5, [4], 2)


@pytest.mark.parametrize("suffix", ["py", "json", "yaml", "yml"])
def test_a_config_is_python_json_or_yaml(write, suffix):
    values = dict(a=1, b=dict(c=[1, 2], d="text"))
    text = "a = 1\nb = dict(c=[1, 2], d='text')" if suffix == "py" else json.dumps(values)
    assert read(write(**{f"same__{suffix}": text})).to_dict() == values


def test_a_config_is_made_of_a_dict():
    cfg = Config(dict(a=1, b=dict(b1=[0, 1])))
    assert cfg.b.b1 == [0, 1]
    assert len(cfg) == 2
    assert list(cfg) == ["a", "b"]
    assert dict(cfg.items()) == dict(a=1, b=dict(b1=[0, 1]))
    assert cfg.get("nothing", 7) == 7
    assert "a" in cfg
    assert cfg.pop("a") == 1
    assert "a" not in cfg


def test_a_config_knows_its_file(write):
    path = write(learn__py=LEARN)
    cfg = read(path)
    assert cfg.filename == str(path)
    assert "test_list = [1, 2, 3]" in cfg.text
    assert "learn.py" in repr(cfg)


def test_a_missing_key_is_an_error(write):
    cfg = read(write(learn__py=LEARN))
    with pytest.raises(AttributeError):
        cfg.no_such_key  # noqa: B018 - the access raises
    with pytest.raises(AttributeError):
        cfg.test_dict.no_such_key  # noqa: B018
    with pytest.raises(KeyError):
        cfg["no_such_key"]


def test_what_is_no_dict_is_a_type_error():
    with pytest.raises(TypeError):
        Config([1, 2])


@pytest.mark.parametrize("key", ["filename", "text", "pretty_text"])
def test_reserved_keys_are_refused(key):
    with pytest.raises(KeyError):
        Config({key: 1})


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing.py")


def test_another_kind_of_file_is_an_error(write):
    with pytest.raises(OSError, match="py"):
        read(write(other__txt="a = 1"))


def test_a_part_of_a_config_builds_an_optimizer(write):
    cfg = read(write(optimizer__py=OPTIMIZER))
    cfg.optimizer.params = [nn.Parameter(torch.ones(1))]
    optimizer = OPTIMIZERS.build(cfg.optimizer)
    assert optimizer.defaults["weight_decay"] == 0.0001


# Inheritance.


def test_a_file_has_all_keys_of_its_base(write):
    write(optimizer__py=OPTIMIZER)
    cfg = read(write(resnet__py="_base_ = ['optimizer.py']\nmodel = dict(type='ResNet', depth=50)\n"))
    assert cfg.optimizer.lr == 0.02
    assert cfg.model.depth == 50


def test_a_base_may_be_one_path(write):
    write(optimizer__py=OPTIMIZER)
    assert read(write(resnet__py="_base_ = './optimizer.py'\n")).optimizer.type == "SGD"


def test_several_bases_are_put_together(write):
    write(optimizer__py=OPTIMIZER, runtime__py="gpu_ids = [0, 1]\n")
    cfg = read(write(resnet__py="_base_ = ['optimizer.py', 'runtime.py']\n"))
    assert (cfg.gpu_ids, cfg.optimizer.momentum) == ([0, 1], 0.9)


def test_two_bases_with_one_key_are_an_error(write):
    write(one__py="a = 1\n", two__py="a = 2\n")
    with pytest.raises(KeyError, match="a"):
        read(write(both__py="_base_ = ['one.py', 'two.py']\n"))


def test_dicts_are_merged_into_those_of_the_base(write):
    write(optimizer__py=OPTIMIZER)
    cfg = read(write(child__py="_base_ = 'optimizer.py'\noptimizer = dict(lr=0.01)\n"))
    assert cfg.optimizer == dict(type="SGD", lr=0.01, momentum=0.9, weight_decay=0.0001)


def test_other_values_replace_those_of_the_base(write):
    write(runtime__py="gpu_ids = [0, 1]\nlevel = 1\n")
    cfg = read(write(child__py="_base_ = 'runtime.py'\ngpu_ids = [0]\nlevel = 'low'\n"))
    assert (cfg.gpu_ids, cfg.level) == ([0], "low")


def test_delete_replaces_a_dict(write):
    write(optimizer__py=OPTIMIZER)
    cfg = read(write(child__py="_base_ = 'optimizer.py'\noptimizer = dict(_delete_=True, type='SGD', lr=0.01)\n"))
    assert cfg.optimizer == dict(type="SGD", lr=0.01)


def test_a_file_reads_values_of_its_base(write):
    write(optimizer__py=OPTIMIZER)
    cfg = read(write(child__py="_base_ = 'optimizer.py'\na = _base_.optimizer.lr * 10\nb = _base_.optimizer\n"))
    assert cfg.a == 0.2
    assert cfg.b == cfg.optimizer


def test_a_file_changes_a_value_of_its_base(write):
    write(optimizer__py=OPTIMIZER)
    text = "_base_ = 'optimizer.py'\nopt = _base_.optimizer\nopt.update(dict(lr=0.3))\noptimizer = opt\n"
    assert read(write(child__py=text)).optimizer.lr == 0.3


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine puts the quotes twice")
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_placeholders_stand_for_values_of_the_base(write, suffix):
    write(optimizer__json='{"optimizer": {"type": "SGD", "lr": 0.02}}')
    values = dict(_base_="optimizer.json", lr="{{_base_.optimizer.lr}}", copy=dict(of="{{_base_.optimizer}}"))
    text = json.dumps(values) if suffix == "json" else yaml.safe_dump(values)
    cfg = read(write(**{f"child__{suffix}": text}))
    assert cfg.lr == 0.02
    assert cfg["copy"]["of"].type == "SGD"


def test_placeholders_stand_for_the_file(write, tmp_path):
    text = "\n".join(
        f"{key} = '{{{{ {key} }}}}'" for key in ("fileDirname", "fileBasename", "fileBasenameNoExtname", "fileExtname")
    )
    cfg = read(write(place__py=text + "\nwork_dir = './work_dir/{{ fileBasenameNoExtension }}'\n"))
    assert cfg.work_dir == "./work_dir/place"
    assert (cfg.fileBasename, cfg.fileExtname) == ("place.py", ".py")
    assert Path(cfg.fileDirname) == tmp_path


def test_placeholders_stand_for_the_environment(write, monkeypatch):
    monkeypatch.setenv("DOCUMENTED_DATASET", "coco")
    monkeypatch.setenv("DOCUMENTED_NUMBER", "7")
    text = (
        "root = 'data/{{$DOCUMENTED_DATASET:}}'\nother = '{{ $DOCUMENTED_NONE:voc }}'\n"
        "number = {{'$DOCUMENTED_NUMBER:'}}\n"
    )
    cfg = read(write(place__py=text))
    assert (cfg.root, cfg.other, cfg.number) == ("data/coco", "voc", 7)


def test_a_placeholder_without_variable_or_default_is_an_error(write):
    with pytest.raises(KeyError, match="DOCUMENTED_MISSING"):
        read(write(place__py="root = '{{$DOCUMENTED_MISSING:}}'\n"))


# Bases in other packages.


@pytest.mark.parametrize("own", ["model = dict(backbone=dict(base_channels=32))", ""])
def test_a_base_may_lie_in_another_package(write, own):
    cfg = read(write(child__py=f"_base_ = 'mmpretrain::_base_/models/resnet18.py'\n{own}\n"))
    assert cfg.model.backbone.depth == 18
    assert cfg.model.backbone.get("base_channels", 64) == (32 if own else 64)


def test_dicts_of_such_a_base_are_built_in_its_scope(write):
    text = (
        "_base_ = 'mmpretrain::_base_/models/resnet18.py'\n"
        "own = dict(type='Mine')\nmodel = dict(neck=dict(type='Own'))\n"
    )
    cfg = read(write(child__py=text))
    assert cfg.model._scope_ == "mmpretrain"
    assert "_scope_" not in cfg.model.backbone
    assert cfg.model.neck == dict(type="Own")
    assert "_scope_" not in cfg.own


# Functions and classes in configs.


def test_a_file_may_import_and_name_classes(write):
    text = "from torch.nn import Linear\nimport torch\nlayer = dict(type=Linear, in_features=2, out_features=3)\n"
    cfg = read(write(lazy__py=text))
    assert MODELS.build(cfg.layer).weight.shape == (3, 2)
    assert "torch" not in cfg.to_dict()


def test_custom_imports_are_imported(write, tmp_path, monkeypatch):
    (tmp_path / "documented_custom.py").write_text(
        "from mmengine.registry import MODELS\n"
        "@MODELS.register_module(force=True)\nclass FromCustomImports:\n    n = 4\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "custom_imports = dict(imports=['documented_custom'], allow_failed_imports=False)\n"
    read(write(custom__py=text))
    assert MODELS.build(dict(type="FromCustomImports")).n == 4


def test_a_custom_import_that_fails_is_an_error_unless_allowed(write):
    text = "custom_imports = dict(imports=['documented_nothing'], allow_failed_imports=%s)\n"
    with pytest.raises(ImportError):
        read(write(custom__py=text % False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MMEngine warns, lockstep logs
        assert read(write(custom2__py=text % True)).custom_imports.allow_failed_imports


def test_read_base_imports_from_a_base(write):
    write(lazy_base__py="from torch.optim import SGD\noptimizer = dict(type=SGD, lr=0.1)\nepochs = 3\n")
    text = (
        "from mmengine.config import read_base\n\nwith read_base():\n    from .lazy_base import *\n\n"
        "optimizer.update(lr=0.2)\nepochs = epochs + 1\n"
    )
    cfg = read(write(lazy_child__py=text))
    assert cfg.optimizer.type is torch.optim.SGD or str(cfg.optimizer.type).endswith("SGD")
    assert (cfg.optimizer.lr, cfg.epochs) == (0.2, 4)


def test_read_base_imports_single_names(write):
    write(lazy_base__py="a = dict(x=1)\nb = 2\n")
    text = (
        "from mmengine.config import read_base\nwith read_base():\n    from .lazy_base import a\na.merge(dict(y=5))\n"
    )
    cfg = read(write(lazy_child__py=text))
    assert cfg.a == dict(x=1, y=5)
    assert "b" not in cfg


def test_read_base_does_nothing_outside_of_configs():
    with read_base():
        pass


def test_a_lazy_config_is_dumped_and_read_again(write, tmp_path):
    text = "from torch.nn import Linear\nlayer = dict(type=Linear, in_features=2, out_features=3)\n"
    cfg = read(write(lazy__py=text))
    cfg.dump(str(tmp_path / "again.py"))
    again = read(tmp_path / "again.py")
    assert MODELS.build(again.layer).weight.shape == (3, 2)


# Options.


def test_options_change_nested_values(write):
    cfg = read(write(learn__py=LEARN + "pipeline = [dict(type='Load'), dict(type='Flip', prob=0.5)]\n"))
    cfg.merge_from_dict({"test_dict.key2": 5, "pipeline.1.prob": 0.1, "new.inner.value": [1]})
    assert cfg.test_dict == dict(key1="value1", key2=5)
    assert cfg.pipeline[1] == dict(type="Flip", prob=0.1)
    assert cfg.new.inner.value == [1]


def test_an_option_for_a_list_beyond_its_end_is_a_key_error():
    cfg = Config(dict(pipeline=[dict(type="Load")]))
    with pytest.raises(KeyError):
        cfg.merge_from_dict({"pipeline.3": dict(type="Flip")})


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("a=1", 1),
        ("a=0.5", 0.5),
        ("a=True", True),
        ("a=None", None),
        ("a=text", "text"),
        ("a=1,2,3", [1, 2, 3]),
        ("a=[1,2,3]", [1, 2, 3]),
        ("a=(1,2)", (1, 2)),
        ("a=[(a,b),(c,d)]", [("a", "b"), ("c", "d")]),
        ("a='quoted'", "quoted"),
        ("a.b.c=2", {"a.b.c": 2}),
    ],
)
def test_options_of_the_command_line(given, value):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    options = parser.parse_args(["--cfg-options", given]).cfg_options
    assert options == (value if isinstance(value, dict) else {"a": value})


def test_several_options_at_once(write):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    args = parser.parse_args(["--cfg-options", "test_dict.key1=changed", "test_int=3", 'test_list="[(4,5),6]"'])
    cfg = read(write(learn__py=LEARN))
    cfg.merge_from_dict(args.cfg_options)
    assert (cfg.test_dict.key1, cfg.test_int, cfg.test_list) == ("changed", 3, [(4, 5), 6])


# Dumps and comparisons.


@pytest.mark.parametrize("suffix", ["py", "json", "yaml"])
def test_a_config_is_dumped_and_read_again(write, tmp_path, suffix):
    cfg = read(write(learn__py=LEARN))
    cfg.dump(str(tmp_path / f"again.{suffix}"))
    assert read(tmp_path / f"again.{suffix}").to_dict() == cfg.to_dict()


def test_a_dump_without_a_file_is_text(write):
    cfg = read(write(learn__py=LEARN))
    assert "test_list" in cfg.dump()
    assert cfg.dump() == cfg.pretty_text
    assert "test_dict = dict(key1='value1', key2=0.1)" in cfg.pretty_text


def test_a_config_is_read_from_a_string(tmp_path):
    assert Config.fromstring("a = dict(b=3)", ".py").a.b == 3
    assert Config.fromstring('{"a": 1}', ".json").a == 1
    with pytest.raises((OSError, ValueError)):
        Config.fromstring("a = 1", ".xml")


def test_two_configs_are_compared(write):
    one, two = write(one__py=LEARN), write(two__py=LEARN.replace("test_int = 1", "test_int = 2"))
    difference = Config.diff(str(one), str(two))
    assert "-test_int = 1" in difference
    assert "+test_int = 2" in difference


def test_a_copy_of_a_config_is_independent(write):
    import copy
    import pickle

    cfg = read(write(learn__py=LEARN))
    for twin in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        twin.test_dict.key1 = "other"
        assert cfg.test_dict.key1 == "value1"
        assert twin.filename == cfg.filename
        assert isinstance(twin.test_dict, ConfigDict)
    shallow = copy.copy(cfg)
    shallow.test_int = 9
    assert cfg.test_int == 1


def test_a_config_dict_is_a_dict():
    node = ConfigDict(a=1, b=dict(c=2))
    assert isinstance(node, dict)
    assert isinstance(node.b, ConfigDict)
    assert node == dict(a=1, b=dict(c=2))
    assert {**node} == dict(a=1, b=dict(c=2))
    node.setdefault("d", dict(e=3))
    assert node.d.e == 3
    node.b = dict(f=4)
    assert "c" not in node.b
    del node["a"]
    assert not hasattr(node, "a")
    assert type(node.to_dict()["b"]) is dict
    node.merge(dict(b=dict(g=5)))
    assert node.b == dict(f=4, g=5)


def test_a_deprecated_file_warns_of_itself(write):
    with pytest.warns(DeprecationWarning, match="new.py"):
        read(write(old__py="_deprecation_ = dict(expected='new.py', reference='a page')\na = 1\n"))


def test_auto_argparser_has_an_option_for_each_key(write, monkeypatch):
    path = write(learn__py="epochs = 3\nnested = dict(rate=0.1)\n")
    monkeypatch.setattr("sys.argv", ["train.py", str(path)])
    parser, cfg = Config.auto_argparser("words")
    args = parser.parse_args([str(path), "--epochs", "7", "--nested.rate", "0.5"])
    assert (args.epochs, getattr(args, "nested.rate")) == (7, 0.5)
    assert cfg.epochs == 3
