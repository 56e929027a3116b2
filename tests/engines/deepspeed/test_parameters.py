"""Parameters of special kinds, unused ones, and such as are frozen, unfrozen or reached on some ranks only."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.dist import get_rank
from lockstep.errors import ConfigError, PeerError
from lockstep.testing import ranks, run_ranks

from ..own_steps import SGD, X, Y
from ..parameters import ADAMW, Base, Branches, Complex, Double, FrozenKinds, Half, Orders, Sparse, Unused, train_base
from .training import STAGES, strategy_of


def losses_of(kind: type[Base], how: Any, optim: Any = SGD) -> list[float]:
    return train_base(kind, strategy_of(how), optim)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_may_be_of_any_dtype_and_in_the_optimizer(stage: int):
    expected = run_ranks(1, losses_of, FrozenKinds, "single")[0]
    assert run_ranks(2, losses_of_object, stage)[0] == pytest.approx(expected, abs=1e-5)


def losses_of_object(stage: int) -> list[float]:
    """Train with an optimizer that has the frozen parameters, too, and a group of nothing else."""
    return train_base(FrozenKinds, strategy_of(f"zero{stage}"), sgd_over_all)[0]


def sgd_over_all(model: FrozenKinds) -> torch.optim.Optimizer:
    rough = {id(parameter) for parameter in model.rough.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in rough]
    return torch.optim.SGD([{"params": list(model.rough.parameters())}, {"params": others}], lr=0.2, momentum=0.9)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_what_would_be_trained_in_another_precision_or_can_not_be_sent_is_refused(stage: int):
    for kind, name in ((Double, "fine.weight"), (Complex, "phases")):
        with pytest.raises(ConfigError, match=f"`{name}` must be float32 under DeepSpeed.*strategy 'ddp'"):
            train_base(kind, strategy_of(f"zero{stage}"))
    with pytest.raises(ConfigError, match=r"`rough.weight` must be float32 under DeepSpeed.*float32 with bf16=True"):
        train_base(Half, strategy_of(f"zero{stage}"))
    with pytest.raises(ConfigError, match=r"`words\.sparse` must be False under DeepSpeed"):
        train_base(Sparse, strategy_of(f"zero{stage}"))
    with pytest.raises(ConfigError, match=r"must update each number by itself.* is LBFGS"):
        train_base(Base, strategy_of(f"zero{stage}"), {"optimizer": {"type": "LBFGS"}})


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_are_frozen_or_unfrozen_during_training_are_refused(stage: int):
    model = Unused()
    model.extra.requires_grad_(False)
    wrapped, optim_wrapper = strategy_of(f"zero{stage}").prepare(model, SGD)
    wrapped.train_step((X[:2], Y[:2]), optim_wrapper)
    model.extra.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"under DeepSpeed.* has changed: extra.weight, extra.bias"):
        wrapped.train_step((X[:2], Y[:2]), optim_wrapper)
    model.extra.requires_grad_(False)
    model.down.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"has changed: down.weight, down.bias .*strategy 'fsdp'"):
        wrapped.train_step((X[:2], Y[:2]), optim_wrapper)


@pytest.mark.parametrize("stage", STAGES)
def test_who_gets_no_gradient_is_named_once(stage: int):
    first, second = run_ranks(2, warnings_of, stage)
    assert second == []
    assert len(first) == 1
    assert "none of these 2 parameters in the first update: extra.weight, extra.bias" in first[0]
    assert "AdamW moves them by its weight decay and momentum" in first[0]


@ranks(1)
def test_decay_is_spoken_of_only_where_there_is_some():
    no_decay = {**ADAMW, "optimizer": {**ADAMW["optimizer"], "weight_decay": 0.0}}
    of_others = {**ADAMW, "paramwise_cfg": {"custom_keys": {"extra": {"decay_mult": 0.0}}}}
    for optim in (no_decay, of_others):
        (said,) = warnings_of(1, optim)
        assert "AdamW moves them by its momentum" in said
        assert "decay" not in said
    assert warnings_of(1, {"optimizer": {"type": "SGD", "lr": 0.1}}) == []


def warnings_of(stage: int, optim: Any = ADAMW) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    try:
        train_base(Unused, strategy_of(f"zero{stage}"), optim)
    finally:
        logger.removeHandler(handler)
    return [text for text in said if "reaches none" in text]


@pytest.mark.parametrize("kind", [Branches, Orders])
def test_ranks_may_go_different_ways_at_stage_1(kind: type[Base]):
    expected = run_ranks(2, by_ddp, kind)[0]
    assert run_ranks(2, losses_of, kind, "zero1")[0] == pytest.approx(expected, abs=1e-6)


def by_ddp(kind: type[Base]) -> list[float]:
    from lockstep.strategy import DDPStrategy

    return train_base(kind, DDPStrategy(find_unused_parameters=True))[0]


@ranks(2)
@pytest.mark.parametrize("kind", [Branches, Orders])
def test_at_stage_2_they_are_told_to_go_the_same_way(kind: type[Base]):
    with pytest.raises(ConfigError, match=r"must reach the same parameters on every rank, in the same order.*stage=1"):
        train_base(kind, strategy_of("zero2"))


@ranks(2)
@pytest.mark.parametrize("kind", [Branches, Orders])
def test_at_stage_3_they_meet_before_they_gather_other_parameters(kind: type[Base]):
    with pytest.raises(ConfigError, match=r"same layers in the same order at ZeRO stage 3.*on rank 0 and .*stage=1"):
        train_base(kind, strategy_of("zero3"))


class FailsOnOne(Base):
    def changed(self, x: Tensor) -> Tensor:
        if get_rank() == 1:
            raise KeyError("its own")
        return x


@ranks(2)
def test_at_stage_3_nobody_waits_for_a_rank_that_fails():
    with pytest.raises(KeyError if get_rank() == 1 else PeerError, match="its own" if get_rank() == 1 else "rank 1"):
        train_base(FailsOnOne, strategy_of("zero3"))
