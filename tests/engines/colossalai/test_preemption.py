"""Trainings by ColossalAI that a signal stops, and that go on while they are saved."""

from __future__ import annotations

from tests.runner.test_async_save import check_resumes_exactly
from tests.runner.test_preemption import check_a_signal_to_one_rank

from lockstep.testing import ranks

STRATEGY = {"type": "ColossalAIStrategy", "plugin": "lowlevel_zero", "stage": 2}


def test_a_signal_to_one_rank_stops_all_after_the_same_iteration(tmp_path):
    check_a_signal_to_one_rank(tmp_path, STRATEGY)


@ranks(2)
def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    check_resumes_exactly(tmp_path, STRATEGY)
