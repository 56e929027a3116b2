from __future__ import annotations

import sys
import types

import pytest

from lockstep.errors import RegistryError
from lockstep.registry import Library, Registry


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
    models.register_module(Net)
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
    numbers = Registry("number", scope="zoo", libraries=[Library("numbers", base="Number")])
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
