"""The default scope, and registries that build in a way of their own."""

from __future__ import annotations

import pytest

from lockstep.errors import RegistryError
from lockstep.registry import RUNNERS, Registry, in_default_scope, init_default_scope


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
