from __future__ import annotations

import re

import pytest

from lockstep.errors import ConfigError, RegistryError
from lockstep.registry import BuildError, Registry


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


@pytest.fixture
def optimizers():
    registry = Registry("optimizer", scope="zoo")
    for entry in (Optimizer, Wrapper, Faulty):
        registry.register_module(entry)
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
    ],
)
def test_an_error_of_the_constructor_passes_with_a_note(optimizers, cfg, error, says):
    with pytest.raises(error, match=says) as caught:
        optimizers.build(cfg)
    assert type(caught.value) is error
    assert caught.value.__notes__ == [f"while building the optimizer `{cfg['type']}` with {', '.join(list(cfg)[1:])}"]
