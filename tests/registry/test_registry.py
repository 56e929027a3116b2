from __future__ import annotations

import re
import subprocess
import sys
import types
from importlib import import_module

import pytest

import lockstep.registry
from lockstep.errors import ConfigError, RegistryError
from lockstep.registry import (
    DATA_SAMPLERS,
    OPTIMIZERS,
    RUNNERS,
    BuildError,
    Registry,
    in_default_scope,
    init_default_scope,
)


class Net:
    pass


class OtherNet:
    pass


def make_net():
    return Net()


@pytest.fixture
def models():
    return Registry("model", scope="zoo")


@pytest.mark.parametrize("entry", [Net, make_net])
def test_a_class_or_function_registers_under_its_own_name(models, entry):
    assert models.register_module()(entry) is entry
    assert models.get(entry.__name__) is entry
    assert models.module_dict == {entry.__name__: entry}
    assert entry.__name__ in models
    assert list(models) == [entry.__name__]
    assert len(models) == 1


def test_every_way_of_registering(models):
    models.register_module()(Net)
    models.register_module("A")(Net)
    models.register_module(["B", "C"])(Net)
    models.register_module(name="D")(Net)
    models.register_module(module=Net, name="E")
    assert models.module_dict == dict.fromkeys(["Net", "A", "B", "C", "D", "E"], Net)


def test_module_dict_cannot_be_changed_from_outside(models):
    with pytest.raises(TypeError):
        models.module_dict["Net"] = Net


def test_a_taken_name_is_refused_unless_forced(models):
    models.register_module("Net")(Net)
    models.register_module("Net")(Net)  # the same object again says nothing new
    with pytest.raises(RegistryError, match=r"model `Net` is registered in `zoo` already.*force"):
        models.register_module("Net")(OtherNet)
    assert models["Net"] is Net
    models.register_module("Net", force=True)(OtherNet)
    assert models["Net"] is OtherNet


def test_a_refused_list_of_names_registers_none_of_them(models):
    models.register_module("Taken")(Net)
    with pytest.raises(RegistryError):
        models.register_module(["Free", "Taken"])(OtherNet)
    assert list(models) == ["Taken"]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"module": Net()}, TypeError, "`module` must be a class or a function"),
        ({"name": 3}, TypeError, "`name` must be a str"),
        ({"name": "a.b", "module": Net}, ValueError, "no dot"),
    ],
)
def test_what_cannot_be_registered(models, arguments, error, says):
    with pytest.raises(error, match=says):
        models.register_module(**arguments)
    assert len(models) == 0


def test_an_unknown_name_is_none_by_get_and_an_error_by_index(models):
    models.register_module("ResNet")(Net)
    assert models.get("Resnet") is None
    assert "Resnet" not in models
    with pytest.raises(RegistryError, match=r"no model `Resnet`.*did you mean `ResNet`\?"):
        models["Resnet"]
    with pytest.raises(KeyError, match="Known: `ResNet`"):
        models["Transformer"]
    with pytest.raises(TypeError, match="`key` must be a str"):
        models.get(Net)


def test_a_child_looks_in_itself_then_in_its_parent(models):
    child = Registry("model", scope="aviary", parent=models)
    models.register_module("Shared")(Net)
    models.register_module("Own")(Net)
    child.register_module("Own")(OtherNet)
    assert child["Own"] is OtherNet
    assert child["Shared"] is Net
    assert models["Own"] is Net
    assert child.parent is models
    assert child.root is models
    assert models.children == {"aviary": child}


def test_a_scope_addresses_any_registry_of_the_family(models):
    left = Registry("model", scope="left", parent=models)
    right = Registry("model", scope="right", parent=models)
    grandchild = Registry("model", scope="deep", parent=right)
    grandchild.register_module("Net")(Net)
    models.register_module("Net")(OtherNet)
    for registry in (models, left, right, grandchild):
        assert registry["deep.Net"] is Net
        assert registry["zoo.Net"] is OtherNet
        assert registry["left.Net"] is OtherNet  # by way of its parent
    with pytest.raises(RegistryError, match=r"`deap\.Net`.*did you mean `deep\.Net`"):
        models["deap.Net"]


def test_a_scope_is_taken_once_among_siblings(models):
    Registry("model", scope="aviary", parent=models)
    with pytest.raises(RegistryError, match="`aviary` already"):
        Registry("model", scope="aviary", parent=models)
    with pytest.raises(ValueError, match="without dots"):
        Registry("model", scope="a.b", parent=models)


def test_the_scope_defaults_to_the_package_of_the_caller():
    assert Registry("model").scope == __name__.partition(".")[0]


def test_an_import_path_is_a_name(models):
    assert models["collections.OrderedDict"].__name__ == "OrderedDict"
    assert models["os.path.join"] is __import__("os").path.join
    for nothing in ("no_such_package.Net", "collections.NoSuchClass", "math.pi", ".x", "a..b"):
        assert models.get(nothing) is None


def test_a_broken_module_is_not_taken_for_an_unknown_name(models, tmp_path, monkeypatch):
    (tmp_path / "broken_zoo.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        models.get("broken_zoo.Net")


def test_importing_the_package_of_a_scope_makes_the_scope(models, tmp_path, monkeypatch):
    (tmp_path / "late_zoo.py").write_text(
        "import sys\n"
        "from lockstep.registry import Registry\n"
        "MODELS = Registry('model', parent=sys.modules['family'].MODELS)\n"
        "MODELS.register_module('Bird')(dict)\n"
    )
    family = types.ModuleType("family")
    family.MODELS = models
    monkeypatch.setitem(sys.modules, "family", family)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert models["late_zoo.Bird"] is dict
    finally:
        sys.modules.pop("late_zoo", None)


def test_locations_are_imported_at_the_first_miss(tmp_path, monkeypatch):
    (tmp_path / "far_zoo.py").write_text(
        "import sys\n"
        "registry = sys.modules['family'].MODELS\n"
        "registry.get('Bird')  # a location that looks itself up must not recurse\n"
        "registry.register_module('Bird')(dict)\n"
    )
    family = types.ModuleType("family")
    family.MODELS = Registry("model", scope="zoo", locations=["far_zoo"])
    monkeypatch.setitem(sys.modules, "family", family)
    monkeypatch.syspath_prepend(tmp_path)
    family.MODELS.register_module("Fish")(list)
    assert family.MODELS["Fish"] is list
    assert "far_zoo" not in sys.modules
    try:
        assert family.MODELS["Bird"] is dict
    finally:
        sys.modules.pop("far_zoo", None)


def test_a_library_lends_its_subclasses_after_what_is_registered():
    numbers = Registry("number", scope="zoo", libraries={"numbers": "Number"})
    assert numbers["Real"].__module__ == "numbers"
    assert numbers.get("Number") is None  # the base itself is no entry
    assert numbers.get("abstractmethod") is None
    numbers.register_module("Real")(float)
    assert numbers["Real"] is float
    with pytest.raises(RegistryError, match="did you mean `Rational`"):
        numbers["Rationel"]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("Nett", r"there is no model `Nett` in the registry of scope `zoo`: did you mean `Net`\?$"),
        ("collections.OrderdDict", r"in the module `collections`: did you mean `OrderedDict`\?$"),
        ("nowhere.at.Net", r"in the registry of scope `zoo`, nor is there a module `nowhere\.at`$"),
        ("zoo.Nett", r"in the registry of scope `zoo`: did you mean `Net`\?$"),
    ],
)
def test_what_is_not_there_is_told_with_where_it_was_looked_for(key, says):
    registry = Registry("model", scope="zoo")
    registry.register_module("Net", module=dict)
    with pytest.raises(RegistryError, match=says):
        registry[key]


def test_a_scope_that_is_also_an_imported_package_is_the_scope():
    with pytest.raises(RegistryError, match=r"`lockstep\.AdamWW` in the registry of scope `lockstep`.* `AdamW`\?$"):
        OPTIMIZERS["lockstep.AdamWW"]


# The default scope, and registries that build in a way of their own.


@pytest.fixture
def family() -> tuple[Registry, Registry]:
    base = Registry("model", scope="base")
    zoo = Registry("model", scope="zoo", parent=base)
    base.register_module("Net", module=list)
    base.register_module("Other", module=set)
    zoo.register_module("Net", module=dict)
    return base, zoo


def test_names_are_looked_for_in_the_default_scope_first(family: tuple[Registry, Registry]):
    base, zoo = family
    assert base["Net"] is list
    with in_default_scope("zoo"):
        assert base["Net"] is dict
        assert base["Other"] is set
        assert base["base.Net"] is list
        assert Registry("hook", scope="alone").get("Net") is None
        with in_default_scope(None):  # as it was
            assert base["Net"] is dict
    assert base["Net"] is list
    assert zoo["Net"] is dict
    with pytest.raises(RegistryError), in_default_scope("zoo"):
        raise RegistryError("away")
    assert base["Net"] is list


def test_a_config_names_the_scope_in_which_it_is_built(family: tuple[Registry, Registry]):
    base, zoo = family

    @zoo.register_module()
    class Shelf:
        def __init__(self, part: dict[str, str]) -> None:
            self.part = base.build(part)

    assert base.build({"type": "Net", "_scope_": "zoo"}) == {}
    assert base.build({"type": "Shelf", "_scope_": "zoo", "part": {"type": "Net"}}).part == {}
    assert base.build({"type": "Net"}) == []


def test_the_default_scope_can_be_set_for_good(family: tuple[Registry, Registry]):
    init_default_scope("zoo")
    try:
        assert family[0]["Net"] is dict
    finally:
        init_default_scope(None)


def test_a_registry_may_build_in_its_own_way_and_so_do_its_children():
    def build(cfg, registry, **defaults):
        return registry.scope, cfg, defaults

    parent = Registry("thing", scope="base", build_func=build)
    child = Registry("thing", scope="zoo", parent=parent)
    assert parent.build({"a": 1}, b=2) == ("base", {"a": 1}, {"b": 2})
    assert child.build({}) == ("zoo", {}, {})


def test_a_runner_is_built_from_a_whole_config():
    from torch import nn

    from lockstep.runner import Runner

    @RUNNERS.register_module()
    class OwnRunner(Runner):
        pass

    cfg = {"model": nn.Linear(1, 1), "work_dir": "nowhere"}
    assert type(RUNNERS.build(cfg)) is Runner
    assert type(RUNNERS.build({**cfg, "runner_type": "OwnRunner"})) is OwnRunner


STANDARD = {name: value for name, value in vars(lockstep.registry).items() if isinstance(value, Registry)}


def test_the_standard_registries_are_there():
    assert set(STANDARD) == {
        *("MODELS", "MODEL_WRAPPERS", "OPTIMIZERS", "OPTIM_WRAPPERS", "OPTIM_WRAPPER_CONSTRUCTORS", "PARAM_SCHEDULERS"),
        *("CONVERTERS", "DATASETS", "DATA_SAMPLERS", "METRICS", "EVALUATOR", "HOOKS", "LOOPS", "STRATEGIES"),
        *("VISUALIZERS", "RUNNERS", "FUNCTIONS", "TRANSFORMS"),
    }
    assert set(STANDARD) <= set(lockstep.registry.__all__)


@pytest.mark.parametrize("name", sorted(STANDARD))
def test_their_locations_exist(name):
    assert STANDARD[name]._locations
    for location in STANDARD[name]._locations:
        import_module(location)


def test_names_of_torch_resolve_without_being_registered():
    import torch

    assert OPTIMIZERS["SGD"] is torch.optim.SGD
    assert OPTIMIZERS["lockstep.AdamW"] is torch.optim.AdamW
    assert DATA_SAMPLERS["RandomSampler"] is torch.utils.data.RandomSampler
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert OPTIMIZERS.build({"type": "SGD", "lr": 0.1}, params=[parameter]).defaults["lr"] == 0.1


def test_importing_the_registries_imports_neither_torch_nor_the_rooms_above():
    code = (
        "import sys, lockstep.registry\n"
        "loaded = [m for m in sys.modules if m == 'torch' or m.startswith('lockstep.')]\n"
        "print(sorted({m.split('.')[1] if '.' in m else m for m in loaded}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['errors', 'registry', 'version']"


@pytest.mark.parametrize("name", STANDARD.keys())
def test_locations_register_the_names_that_stand_beside_them(name):
    registry = STANDARD[name]
    for location, names in registry._locations.items():
        import_module(location)
        assert set(names) <= registry.module_dict.keys()
        assert all(registry.module_dict[key].__module__.startswith(location) for key in names)


def test_a_strategy_is_imported_when_it_is_asked_for():
    code = (
        "import sys\n"
        "from lockstep import Runner\n"
        "from lockstep.registry import STRATEGIES\n"
        "STRATEGIES.get('ddp'), STRATEGIES.get('sdp')\n"
        "heavy = ('torch.distributed.tensor', 'torch.distributed.fsdp', 'torch.distributed.checkpoint')\n"
        "print([m for m in heavy if m in sys.modules], STRATEGIES.suggest('fspd'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] in the registry of scope `lockstep`: did you mean `fsdp`?\n"


class Optimizer:
    def __init__(self, params, lr, momentum=0.0, *, nesterov=False):
        if lr < 0:
            raise ValueError("lr must not be negative")
        self.got = (params, lr, momentum, nesterov)


class Wrapper(Optimizer):
    def __init__(self, scale=1, **kwargs):
        super().__init__(**kwargs)


class Faulty:
    def __init__(self, size):
        raise TypeError("something of its own")


class Outer:
    def __init__(self, size):
        self.inner = Optimizer(size=size)


@pytest.fixture
def optimizers():
    registry = Registry("optimizer", scope="zoo")
    for entry in (Optimizer, Wrapper, Faulty, Outer):
        registry.register_module()(entry)
    return registry


@pytest.mark.parametrize("kind", ["Optimizer", "zoo.Optimizer", Optimizer])
def test_build_by_name_scope_or_class_leaves_the_config_alone(optimizers, kind):
    cfg = {"type": kind, "lr": 0.1}
    built = optimizers.build(cfg, params=[1], lr=0.5, momentum=0.9)
    assert built.got == ([1], 0.1, 0.9, False)
    assert cfg == {"type": kind, "lr": 0.1}


def test_build_calls_functions_and_a_default_type_counts(optimizers):
    assert optimizers.build({"type": lambda a, b: a + b, "a": 1}, b=2) == 3
    assert optimizers.build({"lr": 0.1, "params": []}, type="Optimizer").got[1] == 0.1


@pytest.mark.parametrize("built", [Optimizer([], 0.1), "Optimizer", None, [{"type": "Optimizer"}]])
def test_what_is_no_dict_is_refused(optimizers, built):
    with pytest.raises(TypeError, match=r"`cfg` must be a dict.*an object that exists"):
        optimizers.build(built)


def test_a_missing_misspelt_or_senseless_type(optimizers):
    with pytest.raises(RegistryError, match=r"must have the key `type`.*\['lr'\]"):
        optimizers.build({"lr": 0.1})
    with pytest.raises(RegistryError, match="did you mean `Optimizer`"):
        optimizers.build({"type": "Optimiser", "lr": 0.1})
    with pytest.raises(TypeError, match="a name, a class or a function, but is 3"):
        optimizers.build({"type": 3})


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        (
            {"type": "Optimizer", "params": [], "lerning_rate": 0.1},
            "optimizer `Optimizer`: unknown argument `lerning_rate`: did you mean `lr`?; missing argument `lr`",
        ),
        (
            {"type": "Optimizer", "params": [], "lr": 0.1, "momentun": 0.9},
            "unknown argument `momentun`: did you mean `momentum`?",
        ),
        (
            {"type": "Optimizer", "params": [], "lr": 0.1, "zebra": 1},
            "unknown argument `zebra`. Known: `lr`, `momentum`, `nesterov`, `params`.",
        ),
        ({"type": "Optimizer"}, "missing arguments `params`, `lr`"),
        (
            {"type": "Wrapper", "params": [], "lr": 0.1, "momentun": 0.9},
            "optimizer `Wrapper`: unknown argument `momentun`: did you mean `momentum`?",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(optimizers, cfg, says):
    with pytest.raises(BuildError, match=re.escape(says)) as caught:
        optimizers.build(cfg)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("cfg", "error", "says"),
    [
        ({"type": "Optimizer", "params": [], "lr": -1}, ValueError, "lr must not be negative"),
        ({"type": "Faulty", "size": 1}, TypeError, "something of its own"),
        ({"type": "Outer", "size": 1}, TypeError, r"Optimizer.__init__\(\) got an unexpected keyword argument 'size'"),
    ],
)
def test_an_error_of_the_constructor_passes_with_a_note(optimizers, cfg, error, says):
    with pytest.raises(error, match=says) as caught:
        optimizers.build(cfg)
    assert type(caught.value) is error
    assert caught.value.__notes__ == [f"while building the optimizer `{cfg['type']}` with {', '.join(list(cfg)[1:])}"]
