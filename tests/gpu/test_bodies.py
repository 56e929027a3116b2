"""The bodies of the GPU tests, on the device that there is: on most machines, the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.testing import run_ranks

from . import bodies


@pytest.mark.parametrize("case", bodies.CASES)
def test_losses_are_those_of_a_plain_loop_on_the_cpu(case: str, tmp_path: Path):
    check_case(case, tmp_path)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_checkpoint_goes_from_the_cpu_to_the_device_and_back(strategy: str, tmp_path: Path):
    check_checkpoint(strategy, tmp_path)


def test_flops_are_those_counted_on_the_cpu(tmp_path: Path):
    check_utilization(tmp_path)


def check_utilization(work_dir: Path) -> None:
    """Compare the FLOPs of a run with those counted on the CPU, where attention has other kernels."""
    by_hand = run_ranks(1, bodies.flops_on_cpu)[0]
    flops, record = run_ranks(1, bodies.utilization, work_dir)[0]
    assert flops == pytest.approx(by_hand)
    assert 0 < record["mfu"] < 1


def check_case(case: str, work_dir: Path, **options) -> str:
    """Compare a run with a plain loop, and return on what kind of device it was."""
    losses, norms = run_ranks(1, bodies.train_on_cpu, case)[0]
    kind, own_losses, own_norms = run_ranks(1, bodies.train, case, work_dir, **options)[0]
    tolerance = bodies.CASES[case][1]
    assert own_losses == pytest.approx(losses, rel=0, abs=tolerance)
    assert own_norms == pytest.approx(norms, rel=2 * tolerance)
    return kind


def check_checkpoint(strategy: str, folder: Path) -> None:
    there, back = folder / "there", folder / "back"
    weights, loss = run_ranks(1, bodies.save_from_cpu, there)[0]
    loaded = run_ranks(1, bodies.load, strategy, there)[0]
    saved = run_ranks(1, bodies.save, strategy, back)[0]
    returned = run_ranks(1, bodies.load_to_cpu, back)[0]
    for other_weights, other_loss in (loaded, saved, returned):
        assert other_weights.keys() == weights.keys()
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)
        assert other_loss == pytest.approx(loss, abs=1e-5)
