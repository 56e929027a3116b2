"""Trainings by DeepSpeed that a signal stops."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runner.test_preemption import TRAINING, Job, check_stop_and_resume

STRATEGIES = [
    {"type": "DeepSpeedStrategy", "zero_optimization": {"stage": 2}},
    {"type": "DeepSpeedStrategy", "zero_optimization": {"stage": 3}},
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_signal_to_one_rank_stops_all_after_the_same_iteration(tmp_path, strategy):
    script = TRAINING.replace('strategy=os.environ.get("STRATEGY")', f"strategy={strategy}")
    with Job(tmp_path, 2, script, SLOW="0.05") as job:
        job.until("train", 14)
        os.kill(job.pid(1), signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 2, job, script) in (14, 15)
