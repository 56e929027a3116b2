"""Registries follow MMEngine's documented rules, and lockstep finds what is registered in them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import lockstep.registry
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope, Registry, build_from_cfg, init_default_scope
from mmengine.utils import ManagerMixin


@pytest.fixture(autouse=True)
def _scopes():
    before = lockstep.registry.default_scope()
    known = dict(DefaultScope._instance_dict)
    DefaultScope._instance_dict.clear()
    lockstep.registry.init_default_scope(None)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(known)
    lockstep.registry.init_default_scope(before)


@pytest.fixture
def family():
    parent = Registry("animal", scope="zoo")
    child = Registry("animal", parent=parent, scope="farm")

    @parent.register_module()
    class Cat:
        def __init__(self, name="Tom", lives=9):
            self.name, self.lives = name, lives

    @child.register_module()
    class Cow:
        pass

    @child.register_module(name="Cat")
    class FarmCat(Cat):
        pass

    return parent, child, Cat, FarmCat


def test_defaults_fill_what_the_config_leaves_out(family):
    parent, _, cat, _ = family
    built = parent.build({"type": "Cat", "name": "Kit"}, default_args={"name": "Tom", "lives": 1})
    assert (built.name, built.lives) == ("Kit", 1)
    assert build_from_cfg({"name": "Kit"}, parent, {"type": cat}).lives == 9


def test_a_child_comes_before_its_parent_and_a_scope_before_both(family):
    parent, child, cat, farm_cat = family
    assert type(child.build({"type": "Cat"})) is farm_cat
    assert type(child.build({"type": "zoo.Cat"})) is cat
    assert type(parent.build({"type": "Cat"})) is cat
    assert type(parent.build({"type": "Cat", "_scope_": "farm"})) is farm_cat
    assert type(parent.build({"type": "farm.Cat"})) is farm_cat
    assert parent.get("Cow") is None


def test_the_default_scope_decides_what_build_finds_and_not_what_get_finds(family):
    parent, _, cat, farm_cat = family
    assert DefaultScope.get_current_instance() is None
    init_default_scope("farm")
    assert DefaultScope.get_current_instance().scope_name == "farm"
    assert type(parent.build({"type": "Cat"})) is farm_cat
    assert parent.get("Cat") is cat
    with parent.switch_scope_and_registry("zoo") as there:
        assert there is parent
        assert type(there.build({"type": "Cat"})) is cat
    assert DefaultScope.get_current_instance().scope_name == "farm"


def test_functions_partials_and_managers_are_built(family):
    parent, *_ = family
    parent.register_module("double", module=partial(pow, exp=2))
    assert parent.build({"type": "double", "base": 3}) == 9

    @parent.register_module()
    def shout(text):
        return text.upper()

    assert parent.build({"type": "shout", "text": "moo"}) == "MOO"

    @parent.register_module()
    class Keeper(ManagerMixin):
        def __init__(self, name):
            super().__init__(name)

    assert parent.build({"type": "Keeper", "name": "a"}) is Keeper.get_instance("a")


def test_build_func_gets_the_config_and_the_registry():
    seen = []
    registry = Registry("thing", build_func=lambda cfg, *args, registry: seen.append((cfg, args, registry)))
    registry.build({"type": "X"}, 7)
    assert seen == [({"type": "X"}, (7,), registry)]
    child = Registry("thing", parent=registry, scope="other")
    child.build(3)
    assert seen[1] == (3, (), child)


def test_a_list_of_modules_is_a_sequential():
    MODELS.register_module("Linear1", force=True, module=torch.nn.Linear)
    built = MODELS.build([{"type": "Linear1", "in_features": 2, "out_features": 3}, {"type": torch.nn.ReLU}])
    assert isinstance(built, torch.nn.Sequential)
    assert len(built) == 2


def test_lockstep_finds_what_is_registered_here_and_the_other_way_round():
    @MODELS.register_module(force=True)
    class ForBoth(torch.nn.Module):
        pass

    assert isinstance(lockstep.registry.MODELS.build({"type": "ForBoth"}), ForBoth)

    @lockstep.registry.MODELS.register_module(force=True)
    class OfLockstep(torch.nn.Module):
        pass

    assert isinstance(MODELS.build({"type": "OfLockstep"}), OfLockstep)


def test_names_that_the_default_scope_lacks_are_mmengines_before_lockstep_s():
    Registry("model", parent=MODELS, scope="toys").register_module("ToyNet", module=torch.nn.ReLU)
    init_default_scope("toys")  # which has no registry of visualizers and samplers
    assert lockstep.registry.VISUALIZERS["Visualizer"].__module__.startswith("mmengine")
    assert lockstep.registry.DATA_SAMPLERS["InfiniteSampler"].__module__.startswith("mmengine")
    with pytest.raises(KeyError, match=r"scope `toys`.*ToyNet"):
        MODELS.build({"type": "ToyNett"})
    with pytest.raises(KeyError, match=r"scope `toys`.*ToyNet"):
        lockstep.registry.MODELS.build({"type": "ToyNett"})


@pytest.mark.parametrize(
    ("cfg", "error"),
    [
        ([], TypeError),
        ({"name": "x"}, KeyError),
        ({"type": "Dog"}, KeyError),
        ({"type": 3}, TypeError),
        ({"type": "Cat", "wings": 2}, TypeError),
    ],
)
def test_wrong_configs_raise_what_mmengine_raises(family, cfg, error):
    with pytest.raises(error):
        family[0].build(cfg)


def test_a_name_is_registered_once_unless_it_is_forced(family):
    parent = family[0]
    with pytest.raises(KeyError):
        parent.register_module("Cat", module=dict)
    parent.register_module("Cat", force=True, module=dict)
    assert parent.get("Cat") is dict


@pytest.mark.parametrize("trusted", [False, True])
def test_a_scope_that_data_name_is_imported_only_if_they_are_trusted(tmp_path, monkeypatch, trusted):
    (tmp_path / "scope_of_data").mkdir()
    (tmp_path / "scope_of_data/__init__.py").touch()
    (tmp_path / "scope_of_data/registry.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "c.yaml").write_text("default_scope: scope_of_data\n")
    scope = Config.fromfile(tmp_path / "c.yaml", trusted=trusted).default_scope
    with nullcontext() if trusted else pytest.raises(KeyError, match="a config file that is not trusted"):
        MODELS._fill(scope)
    assert ("scope_of_data" in sys.modules) == trusted
    sys.modules.pop("scope_of_data", None)
    sys.modules.pop("scope_of_data.registry", None)
