"""A YAML or JSON config is data: nothing that it says is imported or run unless its reader trusts it."""

from __future__ import annotations

import os
import re
import sys

import pytest

from lockstep.config import Config
from lockstep.errors import ConfigError
from lockstep.registry import FUNCTIONS, MODELS, Registry

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


def test_trust_lets_data_do_what_a_program_can(write, evil):
    cfg = Config.fromfile(write("c.yaml", "custom_imports: evil\nmodel: {type: evil.run}\n"), trusted=True)
    assert cfg.model.type == "evil.run"
    assert evil()


def test_text_is_read_by_the_same_rules(evil):
    with pytest.raises(ConfigError, match="is an import path"):
        Config.fromstring("model: {type: evil.run}", ".yaml")
    assert not evil()
    assert Config.fromstring("model: {type: evil.run}", ".yaml", trusted=True).model.type == "evil.run"
