from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lockstep.dist import get_rank
from lockstep.hooks.exchange import ExchangeTimer
from lockstep.model import MMDistributedDataParallel
from lockstep.testing import ranks

DELAY_SECONDS = 0.05


def step(model: nn.Module, *, slow: bool = False) -> None:
    loss = model(torch.ones(2, 4)).sum()
    if slow:
        time.sleep(DELAY_SECONDS)
    loss.backward()


@ranks(2)
def test_ranks_wait_for_the_slowest():
    model = MMDistributedDataParallel(nn.Linear(4, 4))
    timer = ExchangeTimer(model, interval=2)
    for _ in range(5):
        step(model, slow=get_rank() == 1)
    waited = timer.mean_seconds(5)
    # The other rank began to wait when this one fell asleep; a busy machine only makes that longer.
    assert waited is not None
    assert waited > 0.5 * DELAY_SECONDS if get_rank() == 0 else waited >= 0


@ranks(2)
def test_iterations_without_an_exchange_count():
    model = MMDistributedDataParallel(nn.Linear(4, 4))
    every, one_in_four = ExchangeTimer(model, interval=4), ExchangeTimer(model, interval=4)
    for index in range(16):
        if index % 4 == 3:
            step(model, slow=get_rank() == 1)
        else:
            with model.no_sync():
                step(model)
    # The same three exchanges (the last is measured when the next begins), spread over 3 and over 12 iterations.
    assert one_in_four.mean_seconds(12) == pytest.approx(every.mean_seconds(3) / 4)


@ranks(2)
def test_means_are_those_since_the_last_call():
    model = MMDistributedDataParallel(nn.Linear(4, 4))
    timer = ExchangeTimer(model, interval=2)
    for _ in range(6):
        step(model, slow=get_rank() == 1)
    slow = timer.mean_seconds(6)
    assert timer.mean_seconds(0) == slow  # nothing new
    for _ in range(12):
        step(model)
    fast = timer.mean_seconds(12)
    if get_rank() == 0:
        assert fast < slow


def test_a_model_on_one_rank_exchanges_nothing():
    assert ExchangeTimer(nn.Linear(4, 4), interval=2).mean_seconds(2) is None


@ranks(2)
def test_before_the_first_exchange_there_is_nothing():
    assert ExchangeTimer(MMDistributedDataParallel(nn.Linear(4, 4)), interval=2).mean_seconds(1) is None
