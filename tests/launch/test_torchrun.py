"""Under torchrun, as anybody starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import LOOPBACK, PYTHON, TRAIN_DIGITS, TWO_STEPS, check_digits, check_training, run, run_at_once

pytestmark = pytest.mark.launchers

TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_two_jobs_at_once_train_apart_and_their_ranks_listen_on_loopback_alone() -> None:
    jobs = run_at_once((*TORCHRUN, TWO_STEPS), (*TORCHRUN, TWO_STEPS))
    for ended in jobs:
        check_training(ended, "pytorch", [(0, 2, 0), (1, 2, 0)])
        assert [report["listening"] for report in ended.ranks] == [[LOOPBACK], [LOOPBACK]]


def test_lockstep_train_joins_the_ranks_it_finds(tmp_path: Path) -> None:
    ended = run([*TORCHRUN, "--no-python", *TRAIN_DIGITS, "--work-dir", str(tmp_path)])
    check_digits(ended, tmp_path)
    assert "joining the ranks found (pytorch): 2" in ended.err


def test_a_contradiction_ends_every_rank_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from lockstep.dist import init_dist\ninit_dist('slurm')")
    ended = run([*TORCHRUN, str(script)], env={"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    assert ended.code == 1
    # Both ranks raise; torchrun ends the one that is later, which may not have said it yet.
    of_rank_0 = "WORLD_SIZE must be 1 for launcher 'slurm', as SLURM_NTASKS says, but is 2"
    of_rank_1 = "RANK must be 0 for launcher 'slurm', as SLURM_PROCID says, but is 1"
    assert of_rank_0 in ended.err or of_rank_1 in ended.err


def test_ranks_set_by_hand_that_contradict_each_other_are_refused() -> None:
    ended = run([PYTHON, TWO_STEPS], env={"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"})
    assert ended.code == 1
    assert "TopologyError: RANK must be below WORLD_SIZE, 2, but is 2 (rank 2 of 2)" in ended.err
