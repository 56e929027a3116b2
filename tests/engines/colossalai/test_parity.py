"""One loss curve: in one process, and by each of ColossalAI's plugins on two ranks."""

from __future__ import annotations

import pytest

from lockstep.testing import run_ranks

from ...strategy.transformer import STEPS, train_by_hand
from .training import PLUGINS, train


@pytest.mark.parametrize(
    ("kind", "size", "counts"),
    [*((kind, 2, counts) for kind in PLUGINS for counts in (1, 4)), ("zero2", 4, 2)],
)
def test_losses_and_global_gradient_norms_are_those_of_one_process(kind: str, size: int, counts: int):
    losses, norms = run_ranks(1, train_by_hand, counts, True)[0]
    assert len(norms) == STEPS
    assert losses[-1] < losses[0]
    for rank_losses, rank_norms in run_ranks(size, train, kind, counts, True):
        assert rank_losses == pytest.approx(losses, abs=5e-6, rel=0)
        assert rank_norms == pytest.approx(norms, rel=1e-5)
