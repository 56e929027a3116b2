from __future__ import annotations

import copy
import os
import pickle
import re
import sys

import pytest

from lockstep.config import Config
from lockstep.errors import ConfigError, RegistryError
from lockstep.registry import FUNCTIONS, METRICS, MODELS, Registry

MODEL = "model = dict(type='Net', head=dict(type='Linear', width=3), stages=[1, 2])\nlr = 0.1\n"


def test_dicts_are_merged_and_all_else_replaced(write):
    write("base/model.py", MODEL)
    cfg = Config.fromfile(
        write(
            "child.py",
            "_base_ = 'base/model.py'\nmodel = dict(head=dict(width=5, bias=False), stages=[9])\nepochs = 3\n",
        )
    )
    assert cfg == {
        "model": {
            "type": "Net",
            "head": {"type": "Linear", "width": 5, "bias": False},
            "stages": [9],
        },
        "lr": 0.1,
        "epochs": 3,
    }


def test_delete_replaces_a_dict_and_is_no_key_of_the_result(write):
    write("base.py", MODEL)
    cfg = Config.fromfile(write("child.py", "_base_ = './base.py'\nmodel = dict(head=dict(_delete_=True, type='Id'))"))
    assert cfg.model.head == {"type": "Id"}
    assert cfg.model.stages == [1, 2]
    cfg = Config.fromfile(write("all.py", "_base_ = 'base.py'\n_delete_ = True\nx = dict(y=1)"))
    assert cfg == {"x": {"y": 1}}


def test_delete_without_a_base_does_nothing(write):
    assert Config.fromfile(write("c.py", "a = dict(_delete_=True, b=1)")) == {"a": {"b": 1}}


def test_several_bases_in_several_formats_and_generations(write):
    write("grand.yaml", "lr: 0.1\nmodel: {type: Net}\n")
    write("one.json", '{"_base_": "grand.yaml", "lr": 0.2}')
    write("sub/two.yaml", "_base_: two_base.py\nepochs: 3\n")
    write("sub/two_base.py", "epochs = 1\nseed = 0\n")
    cfg = Config.fromfile(write("child.py", "_base_ = ['one.json', 'sub/two.yaml']\nlr = 0.3\n"), trusted=True)
    assert cfg == {"lr": 0.3, "model": {"type": "Net"}, "epochs": 3, "seed": 0}
    order = [cfg.text.index(name) for name in ("grand.yaml\n", "one.json\n", "two_base.py\n")]
    assert order == sorted(order)


def test_a_python_config_can_use_what_its_base_says(write):
    write("base.py", MODEL)
    cfg = Config.fromfile(
        write(
            "child.py",
            "_base_ = 'base.py'\nlr = _base_.lr * 2\nstages = _base_.model.stages + [3]\n",
        )
    )
    assert cfg.lr == 0.2
    assert cfg.stages == [1, 2, 3]
    assert cfg.model.stages == [1, 2]


def test_a_base_may_be_named_in_several_strings(write):
    write("long_name.py", "lr = 1\n")
    assert Config.fromfile(write("child.py", "_base_ = ['long_' 'na'\n 'me.py']\n")).lr == 1
    with pytest.raises(ConfigError, match=r"must be a plain string or list of strings.* without a plus sign"):
        Config.fromfile(write("child.py", "_base_ = 'long_' + 'name.py'\n"))


def test_a_python_config_can_change_what_its_base_says(write):
    write("base.py", MODEL)
    write("middle.py", "_base_ = 'base.py'\n_base_.model.head.width = 5\n_base_['lr'] *= 3\n")
    cfg = Config.fromfile(
        file := write(
            "child.py",
            "_base_ = 'middle.py'\n"
            "_base_.update(epochs=3)\n"
            "{{_base_.model.head}}.bias = False\n"
            "model = dict(type='Own')\n"  # the file's own keys are merged into the changed ones
            "head = _base_.model.head\n"
            "head.type = 'Conv'\n"
            "_base_.model.stages.append(3)\n"
            "del _base_.lr\n"
            "said = '{{_base_.model.head.type}}'\n",
        )
    )
    head = {"type": "Conv", "width": 5, "bias": False}
    assert cfg == {
        "model": {"type": "Own", "head": head, "stages": [1, 2, 3]},
        "epochs": 3,
        "head": head,
        "said": "Conv",
    }
    assert cfg.where("epochs") == f"{file}:2"
    assert cfg.where("model.head.bias") == f"{file}:3"
    assert cfg.where("model.head.width") == f"{file.with_name('middle.py')}:2"
    assert cfg.where("model.head") == f"{file.with_name('base.py')}:1"
    assert "epochs" not in cfg.intermediate_keys  # set, not read
    cfg.head.type = "Linear"
    assert cfg.model.head.type == "Conv"  # no part of the result is shared


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("_base_ = 'base.py'\n\nlr = dict(x=1)", "child.py:3: `lr` is a dict, but was 0.1"),
        (
            "_base_ = 'base.py'\nmodel = dict(\n  type=dict(x=1))",
            "child.py:3: `model.type` is a dict, but was 'Net' in the base; add _delete_=True",
        ),
        ("_base_ = 'base.py'\nmodel = dict(_delete_=1)", "`model._delete_` must be True or False"),
        ("_base_ = ['base.py', 'copy.py']", "child.py:1: `_base_` gives `model` twice"),
        ("_base_ = 'bose.py'", "child.py:1: `_base_` names a file that is missing"),
        ("_base_ = 'child.py'", "child.py:1: `_base_` leads in a circle"),
        ("_base_ = 'a\\0.py'", "child.py:1: `_base_` names no file: "),
        (f"_base_ = '{'a' * 300}.py'", "a.py: cannot be read: File name too long"),
        (f"_base_ = 'json::{'a' * 300}.py'", "a.py: cannot be read: File name too long"),
        ("_base_ = '~no-such-user/a.py'", "child.py:1: `_base_` names a file that is missing"),
        (
            "_base_ = '__main__::a.py'",
            "child.py:1: `_base_` names `__main__::a.py`, but there is no package `__main__`",
        ),
        ("_base_ = 'base.py'\n{{_base_.lr}} = 1", "child.py:2: cannot assign to set display"),
        (
            "from lockstep.config import read_base\nwith read_base():\n    from .base import *\n_base_.lr = 1",
            "child.py:4: `_base_` must not be in a file with read_base(), whose bases' keys are variables: write `lr`",
        ),
    ],
)
def test_contradictions_are_named_with_file_line_and_key(write, text, says):
    write("base.py", MODEL)
    write("copy.py", MODEL)
    with pytest.raises(ConfigError, match=re.escape(says)):
        Config.fromfile(write("child.py", text))


def test_a_circle_of_two_names_both(write):
    write("a.py", "_base_ = 'b.py'")
    with pytest.raises(ConfigError, match=r"circle: .*a\.py -> .*b\.py -> .*a\.py"):
        Config.fromfile(write("b.py", "_base_ = 'a.py'").with_name("a.py"))


def test_a_base_may_lie_in_an_installed_package(write, tmp_path, monkeypatch):
    write("shelf/__init__.py", "")
    write("shelf/nets/model.py", MODEL)
    write("shelf/.mim/configs/_base_/data.py", "batch = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    child = write("configs/child.py", "_base_ = ['shelf::nets/model.py', 'shelf::_base_/data.py']\nlr = 0.2\n")
    cfg = Config.fromfile(child)
    assert (cfg.lr, cfg.batch, cfg.model.type) == (0.2, 8, "Net")
    assert cfg.model._scope_ == "shelf"  # there its names have their meaning
    with pytest.raises(ConfigError, match=r"wrong\.py:1: `_base_` .* no package `nowhere`"):
        Config.fromfile(write("wrong.py", "_base_ = 'nowhere::a.py'\n"))


BASE = """\
width = 3
head = dict(width=width)
model = dict(
    type="Net",
    head=head,
    stages=[
        dict(depth=1),
        dict({"depth": 2}),
    ],
)
lr = 0.1
"""
CHILD = """\
_base_ = "base.py"
rate = _base_.lr * 2
model = dict(
    head=dict(
        bias=False))
hooks = {"a": 1,
         "b": dict(c=1)}
hooks["b"]["c"] = 2
extra: float = 1.0
unused = 5
"""


@pytest.fixture
def cfg(write):
    write("base.py", BASE)
    return Config.fromfile(write("child.py", CHILD))


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("model.head.bias", "child.py:5"),
        ("model.head.width", "base.py:2"),
        ("model.type", "base.py:4"),
        ("model.stages.0.depth", "base.py:7"),
        ("model.stages.1.depth", "base.py:8"),
        ("model.stages.7.depth", "base.py:6"),
        ("model.head.unknown", "child.py:4"),
        ("lr", "base.py:11"),
        ("hooks.a", "child.py:6"),
        ("hooks.b.c", "child.py:8"),
        ("extra", "child.py:9"),
        ("nowhere", ""),
    ],
)
def test_a_key_is_found_where_it_was_written_last(cfg, tmp_path, key, place):
    assert cfg.where(key) == (place and f"{tmp_path}/{place}")


def test_what_an_option_has_set_says_so(cfg, tmp_path):
    cfg.merge_from_dict({"model.head.bias": True, "new": {"x": 1}})
    assert cfg.where("model.head.bias") == "an option"
    assert cfg.where("new.x") == "an option"
    assert cfg.where("model.head") == f"{tmp_path}/child.py:4"
    assert copy.deepcopy(cfg).where("new.x") == "an option"


def test_of_two_bases_that_are_imported_whole_the_last_one_has_set_a_key(write, tmp_path):
    for name in "ab":
        write(f"{name}.py", f"lr = {name!r}\n")
    cfg = Config.fromfile(write("c.py", "with read_base():\n    from .a import *\n    from .b import *\n"))
    assert (cfg.lr, cfg.where("lr")) == ("b", f"{tmp_path}/b.py:1")


def test_a_base_that_cannot_be_read_is_told_with_who_names_it(write, tmp_path):
    (tmp_path / "base").write_text("lr = 1\n")
    child = write("child.py", "_base_ = 'base'\n")
    with pytest.raises(ConfigError) as raised:
        Config.fromfile(child)
    assert raised.value.__notes__ == [f"read as a base of {child}"]


def test_keys_that_come_by_import_are_found_in_their_file(write, tmp_path):
    write("base.py", BASE)
    cfg = Config.fromfile(
        write(
            "child.py",
            "with read_base():\n    from .base import model as net, lr\nnet.head.width = 7\n"
            "net.update(depth=2)\nnet.stages[0].depth = 5\n",
        )
    )
    assert cfg.where("net.head.width") == f"{tmp_path}/child.py:3"
    assert cfg.where("net.depth") == f"{tmp_path}/child.py:4"
    assert cfg.where("net.stages.0.depth") == f"{tmp_path}/child.py:5"
    assert cfg.where("net.stages.1.depth") == f"{tmp_path}/base.py:8"
    assert cfg.where("lr") == f"{tmp_path}/base.py:11"
    assert cfg.where("model") == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "lr: 1\nmodel:\n  head: {width: 3,\n    bias: 1}\n  stages:\n  - depth: 1\n"),
        ("c.json", '{"lr": 1,\n"model": {\n"head": {"width": 3,\n "bias": 1}, "stages":\n[{"depth": 1}]}}'),
    ],
)
def test_yaml_and_json_are_searched_by_their_own_structure(write, name, text):
    path = write(name, text)
    cfg = Config.fromfile(path)
    lines = {key: cfg.where(key).removeprefix(f"{path}:") for key in ("model.head.bias", "model.stages.0.depth", "lr")}
    assert lines == {"model.head.bias": "4", "model.stages.0.depth": "6" if name == "c.yaml" else "5", "lr": "1"}
    assert cfg.where("x") == ""


def test_json_that_yaml_cannot_read_has_no_lines(write):
    path = write("c.json", '{\n\t"a": 1}')
    assert Config.fromfile(path) == {"a": 1}
    assert Config.fromfile(path).where("a") in ("", f"{path}:2")


def test_helpers_are_what_the_code_of_any_of_the_files_reads(cfg):
    assert {"width", "head", "lr"} <= cfg.intermediate_keys
    assert not {"unused", "rate", "model", "extra"} & cfg.intermediate_keys


@pytest.mark.parametrize("name", ["dumped.py", "dumped.yaml"])
def test_a_dumped_config_has_nothing_but_helpers_as_its_code_is_gone(cfg, tmp_path, name):
    cfg.dump(tmp_path / name)
    dumped = Config.fromfile(tmp_path / name)
    assert dumped == cfg
    assert dumped.intermediate_keys >= dumped.keys()


def test_without_a_file_nothing_is_known_and_files_are_read_once(cfg, tmp_path):
    assert (Config({"a": 1}).where("a"), Config({"a": 1}).intermediate_keys) == ("", set())
    before = cfg.where("lr"), cfg.intermediate_keys
    (tmp_path / "child.py").write_text("import os\n\n\nlr = 5\n")
    (tmp_path / "base.py").unlink()
    for same in (cfg, copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert (same.where("lr"), same.intermediate_keys) == before


@pytest.mark.parametrize("key", ["filename", "text", "dump", "where", "masked", "intermediate_keys", "merge_from_dict"])
def test_a_name_of_the_config_itself_is_no_key(key, write):
    with pytest.raises(ConfigError, match=f"`{key}` cannot be a key"):
        Config.fromfile(write("c.py", f"{key} = 1\n"))
    assert Config({"model": {key: 1}}).model[key] == 1


@pytest.mark.parametrize("suffix", ["py", "yaml", "json"])
def test_a_file_that_is_not_utf_8_is_named(tmp_path, suffix):
    path = tmp_path / f"c.{suffix}"
    path.write_bytes(b"a = '\xe9'")
    with pytest.raises(ConfigError, match=f"^{path}: must be text in UTF-8, but is not at byte 5$"):
        Config.fromfile(path)


@pytest.mark.parametrize(("suffix", "text"), [("py", "a = 1"), ("yaml", "a: 1"), ("json", '{"a": 1}')])
def test_a_byte_order_mark_is_passed_over(tmp_path, suffix, text):
    path = tmp_path / f"c.{suffix}"
    path.write_text(text, encoding="utf-8-sig")
    assert Config.fromfile(path) == {"a": 1}


# A YAML or JSON config is data: nothing that it says is imported or run unless its reader trusts it.


# A module beside the config that leaves a trace when it is imported or run.
EVIL = "import pathlib\npathlib.Path(__file__).with_name('trace').touch()\ndef run(**kwargs): ...\n"


@pytest.fixture
def evil(write, tmp_path, monkeypatch):
    """Write `evil.py`, which could be imported, and return a function that says whether it was."""
    write("evil.py", EVIL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: (tmp_path / "trace").exists() or "evil" in sys.modules
    sys.modules.pop("evil", None)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("c.yaml", "model: {type: evil.run}\n", "c.yaml:1: `model.type` = 'evil.run' is an import path"),
        ("c.yml", "model:\n  type: evil.run\n", "c.yml:2: `model.type` = 'evil.run' is an import path"),
        ("c.json", '{"a": 1,\n"model": {"type": "evil.run"}}', "c.json:2: `model.type` = 'evil.run' is an import"),
        ("c.json", '{"model": {"type": "\\u0065vil.run"}}', "`model.type` = 'evil.run'"),
        ("c.yaml", 'model: {"ty\\x70e": "evil\\x2Erun"}\n', "`model.type` = 'evil.run'"),
        ("c.yaml", "a:\n- 1\n- b: [{c: {type: evil.run}}]\n", "c.yaml:3: `a.1.b.0.c.type` = 'evil.run'"),
        ("c.yaml", "model: {_delete_: true, type: evil.run}\n", "`model.type` = 'evil.run'"),
        ("c.yaml", "model: {head: {_delete_: true, type: evil.run}}\n", "`model.head.type` = 'evil.run'"),
        ("c.yaml", "a: &a {type: evil.run}\nmodel: {<<: *a, width: 3}\n", "`model.type` = 'evil.run'"),
        ("c.yaml", "model: {type: !!str evil.run}\n", "`model.type` = 'evil.run'"),
        ("c.yaml", "model: {type: torch.optim.SGD}\n", "`model.type` = 'torch.optim.SGD' is an import path"),
        ("c.yaml", "model: {type: lockstep.launch.launch}\n", "is an import path"),
        ("c.yaml", "model: {type: lockstep.launch}\n", "is an import path"),
        ("c.yaml", "model: {type: lockstep.model.OutsideLoss}\n", "is an import path"),
        ("c.yaml", "model: {type: .evil.run}\n", "`model.type` = '.evil.run'"),
        ("c.yaml", "model: {type: evil.}\n", "`model.type` = 'evil.'"),
        ("c.yaml", "strategy: evil.run\n", "`strategy` = 'evil.run'"),
        ("c.yaml", "optim_wrapper: {constructor: evil.run}\n", "`optim_wrapper.constructor` = 'evil.run'"),
        ("c.yaml", "train_dataloader: {collate_fn: evil.run}\n", "`train_dataloader.collate_fn` = 'evil.run'"),
        ("c.yaml", "strategy: {model_wrapper: {comm_hook: evil.run}}\n", "`strategy.model_wrapper.comm_hook`"),
        ("c.yaml", "custom_hooks: [{type: EMAHook, ema_type: evil.run}]\n", "`custom_hooks.0.ema_type`"),
        ("c.yaml", "runner_type: evil.run\n", "`runner_type` = 'evil.run'"),
        ("c.yaml", "strategy: {type: single, converters: [evil.run]}\n", "`strategy.converters.0` = 'evil.run'"),
        ("c.yaml", "strategy: {type: fsdp, auto_wrap_policy: evil.run}\n", "`strategy.auto_wrap_policy` = 'evil.run'"),
        ("c.yaml", "val_evaluator: [Accuracy, evil.run]\n", "`val_evaluator.1` = 'evil.run'"),
        ("c.yaml", "metrics: !!set {evil.run}\n", "`metrics.0` = 'evil.run'"),
        ("c.yaml", "model: {true: {type: evil.run}, 'True': 1}\n", "`model.True.type` = 'evil.run'"),
        ("c.yaml", "custom_imports: evil\n", "c.yaml:1: `custom_imports` imports modules"),
        ("c.yaml", "a: 1\ncustom_imports: {imports: [evil]}\n", "c.yaml:2: `custom_imports` imports modules"),
        ("c.yaml", "_base_: evil.py\n", "c.yaml:1: `_base_` leads to a program"),
        ("c.yaml", "_base_: ['{{ fileDirname }}/evil.py']\n", "c.yaml:1: `_base_` leads to a program"),
        ("c.yaml", "_base_: '{{ fileBasenameNoExtension }}/../evil.py'\n", "`_base_` leads to a program"),
        ("c.json", '{"_base_": "evil.py"}', "`_base_` leads to a program"),
        ("evil.run.yaml", "model: {type: '{{ fileBasenameNoExtension }}'}\n", "`model.type` = 'evil.run'"),
        ("run.yaml", "model: {type: 'evil.{{ fileBasenameNoExtension }}'}\n", "`model.type` = 'evil.run'"),
    ],
)
def test_what_leads_to_code_is_refused_by_its_key_and_place(write, tmp_path, evil, name, text, says):
    write("c/x", "")
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        Config.fromfile(write(name, text))
    assert str(tmp_path / name) in str(caught.value)
    assert "--trust-config" in str(caught.value)
    assert not evil()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: !!python/object/apply:evil.run []\n", "c.yaml:1: could not determine a constructor for the tag"),
        ("model: !!python/name:evil.run\n", "could not determine a constructor"),
        ("model: !!python/module:evil\n", "could not determine a constructor"),
        ("model: !!python/object/new:evil.run {}\n", "could not determine a constructor"),
        ("--- {a: 1}\n--- {b: 2}\n", "but found another document"),
        ("a: &a [*a]\n", "contains itself"),
        ("a: " + "[" * 2000, "nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, "100 levels"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
            "more than 1,000,000 values",
        ),
        ("a: \x00\n", "special characters are not allowed"),
    ],
)
@pytest.mark.parametrize("trusted", [False, True])
def test_yaml_builds_no_objects_and_does_not_explode(write, evil, text, says, trusted):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Config.fromfile(write("c.yaml", text), trusted=trusted)
    assert not evil()


def test_json_that_is_nested_deeply_is_refused(write):
    with pytest.raises(ConfigError, match=r"nested too deeply|100 levels"):
        Config.fromfile(write("c.json", '{"a":' * 100_000))


def test_a_chain_of_bases_is_refused_by_the_file_that_is_to_blame(write, tmp_path, evil):
    write("one.yaml", "a: 1\nmodel:\n  type: evil.run\n")
    write("two.json", '{"_base_": "one.yaml"}')
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/one.yaml:3: `model.type` = 'evil.run'")):
        Config.fromfile(write("three.yaml", "_base_: two.json\nmodel: {width: 3}\n"))
    write("four.yaml", "a: 1\n_base_: evil.py\n")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/four.yaml:2: `_base_` leads to a program")):
        Config.fromfile(write("five.yaml", "_base_: four.yaml\n"))
    assert not evil()


def test_what_a_child_replaces_does_no_harm(write, evil):
    write("one.yaml", "model: {type: evil.run, width: 3}\n")
    cfg = Config.fromfile(write("two.yaml", "_base_: one.yaml\nmodel: {_delete_: true, type: Net}\n"))
    assert cfg == {"model": {"type": "Net"}}
    assert not evil()


def test_the_value_of_a_base_is_no_way_around(write, evil):
    write("one.yaml", "names: {run: evil.run, half: evil}\n")
    for path in ("{{ _base_.names.run }}", "{{ _base_.names.half }}.run"):
        with pytest.raises(ConfigError, match=re.escape("`model.type` = 'evil.run' is an import path")):
            Config.fromfile(write("two.yaml", f"_base_: one.yaml\nmodel: {{type: '{path}'}}\n"))
    assert not evil()


def test_data_below_a_python_config_are_data_still(write, tmp_path, evil):
    write("model.yaml", "model: {type: evil.run}\n")
    child = write("child.py", "_base_ = 'model.yaml'\n")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/model.yaml:1: `model.type`")):
        Config.fromfile(child)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/model.yaml:1: `model.type`")):
        Config.fromfile(write("import.py", "with read_base():\n    from .child import model\n"))
    assert not evil()
    assert Config.fromfile(child, trusted=True).model.type == "evil.run"


def test_a_python_config_is_a_program_and_needs_no_trust(write, evil):
    cfg = Config.fromfile(write("c.py", "import evil\nmodel = dict(type='evil.run')\n"))
    assert cfg.model.type == "evil.run"
    assert evil()


def test_a_link_with_the_name_of_data_runs_no_program(write, tmp_path, evil):
    (tmp_path / "c.yaml").symlink_to(tmp_path / "evil.py")
    with pytest.raises(ConfigError, match="leads to a Python file"):
        Config.fromfile(tmp_path / "c.yaml")
    (tmp_path / "base.yaml").symlink_to(tmp_path / "evil.py")
    with pytest.raises(ConfigError, match="leads to a program"):
        Config.fromfile(write("d.yaml", "_base_: base.yaml\n"))
    assert not evil()


def test_every_place_is_told_at_once(write, tmp_path, evil):
    write("base.json", '{"model": {"type": "evil.run"}}')
    with pytest.raises(ConfigError) as caught:
        Config.fromfile(write("c.yaml", "_base_: base.json\ncustom_imports: evil\nhooks: [{type: os.system}]\n"))
    first, *places, remedy = str(caught.value).splitlines()
    assert first == f"{tmp_path}/c.yaml leads to code in 3 places:"
    assert places == [
        f"  {tmp_path}/c.yaml:2: `custom_imports` imports modules",
        f"  {tmp_path}/base.json:1: `model.type` = 'evil.run' is an import path",
        f"  {tmp_path}/c.yaml:3: `hooks.0.type` = 'os.system' is an import path",
    ]
    assert "If you trust these files" in remedy


def test_registered_names_are_fine_with_and_without_their_scope(write):
    zoo = Registry("model", scope="toyzoo", parent=MODELS)
    zoo.register_module(module=os.path.join, name="Join")
    text = "model: {type: toyzoo.Join, loss: {type: lockstep.AdamW}}\nload_from: model.pth\nnote: os.system\n"
    assert Config.fromfile(write("c.yaml", text)).model.type == "toyzoo.Join"
    with pytest.raises(ConfigError, match=r"`model\.type` = 'toyzoo\.Joyn' is an import path"):
        Config.fromfile(write("d.yaml", "model: {type: toyzoo.Joyn}\n"))
    with pytest.raises(ConfigError, match="is an import path"):
        Config.fromfile(write("e.yaml", "model: {type: toyzoo.Join.x}\n"))


def test_a_scope_that_is_also_a_module_gives_no_way_into_it(write, evil):
    registry = Registry("function", scope="evil", parent=FUNCTIONS)
    registry.register_module(module=os.path.join, name="join")
    try:
        with pytest.raises(ConfigError, match=re.escape("`model.type` = 'evil.run' is an import path")):
            Config.fromfile(write("c.yaml", "model: {type: evil.run}\n"))
        assert not evil()
    finally:
        del FUNCTIONS._children["evil"]


@pytest.mark.parametrize("unseen", ["evil.run", "!!set {evil.run}", "{evil.run: 1}", "{true: evil.run, 'True': x}"])
def test_what_data_name_under_any_key_is_not_imported_until_they_are_trusted(write, evil, unseen):
    """Here two loaders give the keys their names."""
    path = write("c.yaml", f"val_evaluator: {{seen: Accuracy, unseen: {unseen}}}\n")
    assert "evil.run" in repr(Config.fromfile(path).val_evaluator.unseen)
    named = "evil.run"
    for look_up in (METRICS.get, METRICS.__getitem__, lambda name: METRICS.build({"type": name})):
        with pytest.raises(RegistryError, match=r"`evil\.run` would be imported, but is named by .*--trust-config"):
            look_up(named)
    assert not evil()
    Config.fromfile(path, trusted=True)
    assert METRICS.get(named).__name__ == "run"


def test_trust_lets_data_do_what_a_program_can(write, evil):
    cfg = Config.fromfile(write("c.yaml", "custom_imports: evil\nmodel: {type: evil.run}\n"), trusted=True)
    assert cfg.model.type == "evil.run"
    assert evil()


def test_links_in_a_circle_are_told(tmp_path):
    (tmp_path / "a.py").symlink_to(tmp_path / "b.py")
    (tmp_path / "b.py").symlink_to(tmp_path / "a.py")
    with pytest.raises(ConfigError, match=r"a\.py: cannot be read: Too many levels of symbolic links"):
        Config.fromfile(tmp_path / "a.py")
    (tmp_path / "child.py").write_text("_base_ = 'a.py'")
    with pytest.raises(ConfigError, match=r"a\.py: cannot be read: Too many levels"):
        Config.fromfile(tmp_path / "child.py")
