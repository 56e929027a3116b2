"""Garbage is collected when the hook says so, and the collector is left as it was found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.hooks import GarbageCollectionHook, Hook
from lockstep.testing import ranks

from .runs import make_runner

BRIEF = {"default_hooks": {"checkpoint": None}}


class Circle:
    def __init__(self) -> None:
        self.itself = self


class Litter(Hook):
    """Leaves a circle of objects in the first iteration, and notes until when it is there."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.alive: list[bool] = []
        self.enabled: set[bool] = set()
        self.frozen: set[bool] = set()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 0:
            self.circle = weakref.ref(Circle())
        self.alive.append(self.circle() is not None)
        self.enabled.add(gc.isenabled())
        self.frozen.add(gc.get_freeze_count() > 0)


@contextmanager
def thawed(*, automatic: bool = True) -> Iterator[None]:
    """Begin with the collector on or off and with nothing frozen, and see that it ends so."""
    assert gc.isenabled()
    gc.unfreeze()
    if not automatic:
        gc.disable()
    yield
    assert gc.isenabled() == automatic
    assert gc.get_freeze_count() == 0
    gc.enable()
    gc.freeze()


BOTH = pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])


@pytest.mark.parametrize(("generation", "interval"), [(0, 2), (1, 3), (2, 2)])
@ranks(1)  # whose collector has less to look at than that of a session of tests
def test_garbage_goes_at_the_interval_and_not_before(tmp_path: Path, generation, interval):
    litter = Litter()
    with thawed():
        make_runner(tmp_path, [litter, GarbageCollectionHook(interval, generation)], **BRIEF).train()
    gone_after = litter.alive.index(False) + 1
    assert gone_after == interval
    assert litter.enabled == {False}
    assert litter.frozen == {True}


@BOTH
@ranks(1)
def test_an_epochs_end_collects_everything(tmp_path: Path, automatic):
    litter = Litter()
    with thawed(automatic=automatic):
        make_runner(tmp_path, [litter, {"type": "GarbageCollectionHook", "interval": 1000}], **BRIEF).train()
    assert litter.alive == [True] * 4 + [False] * 4


class Fail(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        raise RuntimeError("no")


@BOTH
@ranks(1)
def test_the_collector_is_as_before_after_a_failure(tmp_path: Path, automatic):
    with thawed(automatic=automatic), pytest.raises(RuntimeError, match="no"):
        make_runner(tmp_path, [GarbageCollectionHook(), Fail()], **BRIEF).train()


@ranks(1)
def test_what_somebody_else_froze_stays_frozen_alone(tmp_path: Path):
    gc.freeze()
    before = gc.get_freeze_count()
    make_runner(tmp_path, [GarbageCollectionHook()], **BRIEF).train()
    assert 0 < gc.get_freeze_count() <= before


@pytest.mark.parametrize("options", [{"interval": 0}, {"generation": 3}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
        GarbageCollectionHook(**options)
