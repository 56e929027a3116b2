"""Registries, as MMEngine's documentation of them shows: building, building by function, families, scopes, manager."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import mmengine
import mmengine.dataset
import mmengine.hooks
import mmengine.optim
import mmengine.runner  # registers what the documentation builds from
from mmengine import Config
from mmengine.registry import (
    FUNCTIONS,
    HOOKS,
    LOOPS,
    MODELS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    TRANSFORMS,
    DefaultScope,
    Registry,
    build_from_cfg,
    build_model_from_cfg,
    count_registered_modules,
    init_default_scope,
    traverse_registry_tree,
)
from mmengine.utils import ManagerMixin


@pytest.fixture
def activations():
    """A registry of one's own, filled in the three ways that there are."""
    table = Registry("activation", scope="mmengine")

    @table.register_module()
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    @table.register_module(name=["Clip", "Cut"])
    class Limit(nn.Module):
        def __init__(self, low=0.0, high=1.0):
            super().__init__()
            self.low, self.high = low, high

        def forward(self, x):
            return x.clamp(self.low, self.high)

    class Negate(nn.Module):
        def forward(self, x):
            return -x

    table.register_module(module=Negate)
    table.register_module(name="Minus", module=Negate)
    return table


def test_a_class_is_built_from_its_name(activations):
    assert activations.build(dict(type="Double"))(torch.tensor(3.0)) == 6
    assert activations.get("Negate") is activations.get("Minus")


def test_a_class_may_have_several_names(activations):
    assert activations.get("Clip") is activations.get("Cut")
    assert "Limit" not in activations


def test_the_other_keys_of_a_config_are_arguments(activations):
    cfg = dict(type="Clip", high=0.5)
    layer = activations.build(cfg)
    assert (layer.low, layer.high) == (0.0, 0.5)
    assert cfg == dict(type="Clip", high=0.5)


def test_default_args_fill_what_is_missing(activations):
    layer = build_from_cfg(dict(type="Clip", low=-1.0), activations, default_args=dict(low=5.0, high=2.0))
    assert (layer.low, layer.high) == (-1.0, 2.0)


def test_a_registry_says_what_it_holds(activations):
    assert len(activations) == 5
    assert "Double" in activations
    assert sorted(activations.module_dict) == ["Clip", "Cut", "Double", "Minus", "Negate"]
    assert (activations.name, activations.scope) == ("activation", "mmengine")
    assert activations.parent is None
    assert activations.children == {}
    assert "activation" in repr(activations)


def test_an_unknown_name_is_none_from_get_and_a_key_error_from_build(activations):
    assert activations.get("Sigmoid2") is None
    with pytest.raises(KeyError, match="Sigmoid2"):
        activations.build(dict(type="Sigmoid2"))


def test_a_config_without_type_is_a_key_error(activations):
    with pytest.raises(KeyError, match="type"):
        activations.build(dict(high=1.0))


@pytest.mark.parametrize("cfg", ["Double", 3, ["Double"]])
def test_a_config_that_is_no_dict_is_a_type_error(activations, cfg):
    with pytest.raises(TypeError, match="cfg"):
        activations.build(cfg)


def test_a_name_is_registered_once_unless_forced(activations):
    class Double(nn.Module):
        pass

    with pytest.raises(KeyError, match="Double"):
        activations.register_module(module=Double)
    activations.register_module(module=Double, force=True)
    assert activations.get("Double") is Double


def test_only_classes_and_functions_are_registered(activations):
    with pytest.raises(TypeError):
        activations.register_module(module=3)
    with pytest.raises(TypeError):
        activations.register_module(name=7)(nn.ReLU)


def test_an_argument_error_is_raised_where_the_class_is_built(activations):
    with pytest.raises(TypeError):
        activations.build(dict(type="Clip", width=3))


def test_a_function_is_registered_and_called_with_the_arguments():
    functions = Registry("function", scope="mmengine")

    @functions.register_module()
    def area(width, height=2):
        return width * height

    assert functions.build(dict(type="area", width=5)) == 10
    assert functions.get("area") is area


def test_a_type_may_be_the_class_itself():
    layer = MODELS.build(dict(type=nn.Linear, in_features=2, out_features=3))
    assert layer.weight.shape == (3, 2)


def test_a_type_may_be_a_partial_function():
    make = partial(nn.Linear, in_features=2)
    assert MODELS.build(dict(type=make, out_features=4)).weight.shape == (4, 2)


def test_a_registry_builds_by_a_function_of_its_own():
    def build_layer(cfg, registry, scale=1):
        cfg = dict(cfg)
        layer = registry.get(cfg.pop("type"))(**cfg)
        layer.amount *= scale
        layer.built_by = "build_layer"
        return layer

    layers = Registry("layer", build_func=build_layer, scope="mmengine")

    @layers.register_module()
    class Plus(nn.Module):
        def __init__(self, amount):
            super().__init__()
            self.amount = amount

    built = layers.build(dict(type="Plus", amount=4), scale=2)
    assert (built.amount, built.built_by) == (8, "build_layer")
    assert layers.build_func is build_layer


def test_a_list_of_models_becomes_a_sequential():
    cfgs = [dict(type=nn.Linear, in_features=2, out_features=3), dict(type=nn.ReLU)]
    model = build_model_from_cfg(cfgs, MODELS)
    assert isinstance(model, nn.Sequential)
    assert model(torch.ones(1, 2)).shape == (1, 3)
    assert isinstance(MODELS.build(cfgs), nn.Sequential)


# Families: MMEngine's registries are the parents of those of other packages.


@pytest.fixture
def family():
    """As the documentation draws it: one root, two libraries, and a project that builds on one of them."""
    root = Registry("model", scope="root")
    alpha = Registry("model", parent=root, scope="alpha")
    beta = Registry("model", parent=root, scope="beta")

    @root.register_module()
    class Base:
        pass

    @alpha.register_module(name="Head")
    class AlphaHead:
        def __init__(self, inner=None):
            self.inner = None if inner is None else alpha.build(inner)

    @beta.register_module(name="Head")
    class BetaHead:
        pass

    @beta.register_module()
    class Neck:
        pass

    return root, alpha, beta


def test_a_child_finds_its_own_names_first(family):
    _, alpha, beta = family
    assert type(alpha.build(dict(type="Head"))).__name__ == "AlphaHead"
    assert type(beta.build(dict(type="Head"))).__name__ == "BetaHead"


def test_a_child_finds_the_names_of_its_parent(family):
    _, alpha, _ = family
    assert type(alpha.build(dict(type="Base"))).__name__ == "Base"


def test_a_parent_does_not_find_the_names_of_its_children(family):
    root, *_ = family
    assert root.get("Neck") is None


@pytest.mark.parametrize(("name", "found"), [("alpha.Head", "AlphaHead"), ("beta.Head", "BetaHead")])
def test_a_name_may_begin_with_a_scope(family, name, found):
    for registry in family:
        assert type(registry.build(dict(type=name))).__name__ == found


def test_a_root_knows_its_children(family):
    root, alpha, beta = family
    assert root.children == {"alpha": alpha, "beta": beta}
    assert alpha.root is root
    assert alpha.parent is root


def test_two_children_cannot_have_one_scope(family):
    root, *_ = family
    with pytest.raises((AssertionError, KeyError)):
        Registry("model", parent=root, scope="alpha")


def test_split_scope_key():
    assert Registry.split_scope_key("alpha.Head") == ("alpha", "Head")
    assert Registry.split_scope_key("Head") == (None, "Head")


def test_the_key_scope_builds_in_another_registry(family):
    root, alpha, _ = family
    assert type(root.build(dict(type="Head", _scope_="beta"))).__name__ == "BetaHead"
    assert type(alpha.build(dict(type="Head", _scope_="beta"))).__name__ == "BetaHead"


def test_the_default_scope_chooses_the_registry(family):
    root, *_ = family
    with DefaultScope.overwrite_default_scope("beta"):
        assert type(root.build(dict(type="Head"))).__name__ == "BetaHead"
    with DefaultScope.overwrite_default_scope("alpha"):
        assert type(root.build(dict(type="Head"))).__name__ == "AlphaHead"


def test_the_scope_of_a_config_holds_for_what_it_builds_inside(family):
    root, _, beta = family
    seen = []

    @beta.register_module()
    class Outer:
        def __init__(self, part):
            self.part = root.build(part)
            seen.append(DefaultScope.get_current_instance().scope_name)

    outer = root.build(dict(type="Outer", _scope_="beta", part=dict(type="Head")))
    assert type(outer.part).__name__ == "BetaHead"
    assert seen == ["beta"]


def test_switching_scope_and_registry_by_hand(family):
    root, alpha, beta = family
    with root.switch_scope_and_registry("beta") as registry:
        assert registry is beta
    with root.switch_scope_and_registry("alpha") as registry:
        assert registry is alpha
        assert DefaultScope.get_current_instance().scope_name == "alpha"


def test_init_default_scope_sets_it_for_the_program():
    init_default_scope("some_scope")
    assert DefaultScope.get_current_instance().scope_name == "some_scope"
    init_default_scope("another_scope")
    assert DefaultScope.get_current_instance().scope_name == "another_scope"


def test_a_default_scope_has_a_name_and_a_scope():
    scope = DefaultScope.get_instance("documented", scope_name="alpha")
    assert (scope.instance_name, scope.scope_name) == ("documented", "alpha")
    assert DefaultScope.get_instance("documented") is scope


def test_overwriting_the_default_scope_ends_with_the_block():
    DefaultScope.get_instance("outer_scope", scope_name="outer")
    with DefaultScope.overwrite_default_scope("inner"):
        assert DefaultScope.get_current_instance().scope_name == "inner"
    assert DefaultScope.get_current_instance().scope_name == "outer"
    with DefaultScope.overwrite_default_scope(None):
        assert DefaultScope.get_current_instance().scope_name == "outer"


def test_locations_are_imported_when_a_name_is_missing(tmp_path, monkeypatch):
    package = tmp_path / "documented_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "registry.py").write_text(
        "from mmengine.registry import Registry\n"
        "PARTS = Registry('part', scope='documented_parts', locations=['documented_parts.wheels'])\n"
    )
    (package / "wheels.py").write_text(
        "from .registry import PARTS\n@PARTS.register_module()\nclass Wheel:\n    spokes = 12\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from documented_parts.registry import PARTS

    assert PARTS.build(dict(type="Wheel")).spokes == 12


# What MMEngine's own registries hold.


@pytest.mark.parametrize(
    ("registry", "names"),
    [
        (HOOKS, "CheckpointHook DistSamplerSeedHook EMAHook EarlyStoppingHook EmptyCacheHook IterTimerHook LoggerHook"),
        (HOOKS, "ParamSchedulerHook RuntimeInfoHook SyncBuffersHook NaiveVisualizationHook PrepareTTAHook"),
        (LOOPS, "EpochBasedTrainLoop IterBasedTrainLoop ValLoop TestLoop"),
        (OPTIMIZERS, "SGD Adam AdamW RMSprop Adagrad ZeroRedundancyOptimizer"),
        (PARAM_SCHEDULERS, "ConstantLR CosineAnnealingLR ExponentialLR LinearLR MultiStepLR OneCycleLR PolyLR StepLR"),
        (PARAM_SCHEDULERS, "ConstantMomentum LinearMomentum MultiStepMomentum ReduceOnPlateauLR CosineRestartLR"),
        (MODELS, "BaseDataPreprocessor ImgDataPreprocessor StochasticWeightAverage ExponentialMovingAverage"),
        (FUNCTIONS, "pseudo_collate default_collate"),
    ],
)
def test_names_of_the_documentation_are_registered(registry, names):
    missing = [name for name in names.split() if registry.get(name) is None]
    assert missing == []


def test_an_optimizer_of_torch_is_built_by_its_name():
    weight = nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS.build(dict(type="SGD", params=[weight], lr=0.1, momentum=0.9))
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["momentum"] == 0.9


def test_registries_of_a_program_are_counted(tmp_path):
    counted = count_registered_modules(save_path=str(tmp_path), verbose=False)
    assert {"HOOKS", "MODELS", "DATASETS"} <= counted["registries"].keys()
    assert (tmp_path / "modules_statistic_results.json").is_file()
    tree = traverse_registry_tree(TRANSFORMS, verbose=False)
    assert any(row["scope"] == "mmengine" for row in tree)


# The manager: instances found by name.


class Counter(ManagerMixin):
    def __init__(self, name, start=0):
        super().__init__(name)
        self.value = start


@pytest.fixture(autouse=True)
def _forget_instances():
    known = dict(DefaultScope._instance_dict)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(known)
    init_default_scope("mmengine")


def test_an_instance_is_created_once_for_each_name():
    one = Counter.get_instance("one", start=3)
    assert Counter.get_instance("one") is one
    assert (one.value, one.instance_name) == (3, "one")
    assert Counter.check_instance_created("one")
    assert not Counter.check_instance_created("nobody")


def test_the_current_instance_is_the_one_created_last():
    Counter.get_instance("earlier")
    latest = Counter.get_instance("later")
    assert Counter.get_current_instance() is latest


def test_each_class_has_instances_of_its_own():
    class Other(ManagerMixin):
        pass

    assert Other.get_instance("one") is not Counter.get_instance("one")
    with pytest.raises(RuntimeError):
        type("Unused", (ManagerMixin,), {}).get_current_instance()


def test_an_instance_has_a_name_that_is_a_string():
    with pytest.raises(AssertionError):
        Counter.get_instance(3)
    with pytest.raises(AssertionError):
        Counter(name=3)


def test_a_manager_in_a_registry_is_found_by_its_name():
    managers = Registry("manager", scope="mmengine")
    managers.register_module(module=Counter)
    built = managers.build(dict(type="Counter", name="from_config", start=8))
    assert Counter.get_instance("from_config") is built


def test_a_config_builds_like_a_dict(activations):
    cfg = Config(dict(layer=dict(type="Clip", high=3.0)))
    assert activations.build(cfg.layer).high == 3.0
    assert mmengine.ConfigDict(type="Double").type == "Double"
