"""Collectives and a training on a simulated accelerator, whose backend has NCCL's rules: what is right, what is read.

It shows that nothing goes over the CPU that should not, that no call waits for a `Work` that is not there, and how
often the host waits for the device; not that it works on hardware.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.testing import run_ranks

from . import training
from .calls import CALLS
from .conftest import HERE, Start, finish

BESIDE = "cpu:gloo,sim:simccl"
BACKENDS = {"alone": "sim:simccl", "default": BESIDE}


@pytest.fixture(scope="module", params=BACKENDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Start) -> Any:
    """What each rank of a job has found."""
    return request.param, run_job(start, request.param, tmp_path_factory.mktemp("device"))


def run_job(start: Start, how: str, folder: Path) -> list[dict[str, Any]]:
    job = (HERE / "job.py", "--nproc", 2, "--log-dir", folder, "--", how, folder)
    finish(start("-m", "lockstep", "launch", *job))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_right_and_reads_no_more_than_it_must(found: Any, name: str) -> None:
    how, ranks = found
    call = CALLS[name]
    reads = call.beside if how != "alone" and call.beside is not None else call.reads
    assert [rank[name] for rank in ranks] == [list(pair) for pair in zip(reads, call.gives, strict=True)]


@pytest.mark.parametrize(("strategy", "first"), [("ddp", 2), ("fsdp", 4)])  # FSDP also compares units
def test_the_steps_of_a_training_read_nothing_but_the_first_ones(found: Any, strategy: str, first: int) -> None:
    rest = [rank[strategy][-1][first:] for rank in found[1]]
    assert rest == [[0] * (6 - first)] * 2


def test_each_rank_has_its_own_device_and_the_cpu_a_backend(found: Any) -> None:
    assert [rank["device"] for rank in found[1]] == ["sim:0", "sim:1"]
    assert [rank["backends"] for rank in found[1]] == [["simccl", BACKENDS[found[0]]]] * 2


def test_a_backend_that_is_named_has_gloo_beside_it(start: Start, tmp_path: Path) -> None:
    assert [rank["backends"] for rank in run_job(start, "named", tmp_path)] == [["simccl", BESIDE]] * 2


def test_each_rank_may_see_its_own_device_alone(start: Start, tmp_path: Path) -> None:
    assert [rank["device"] for rank in run_job(start, "own", tmp_path)] == ["sim:0", "sim:0"]


def test_a_device_that_two_ranks_see_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"each rank must have a device of its own, but rank [01] of 2 sees one sim:0 alone"
    ):
        run_job(start, "shared", tmp_path)


@pytest.mark.parametrize("strategy", training.STRATEGIES)
def test_a_training_has_the_losses_and_weights_of_the_cpu(found: Any, strategy: str, tmp_path: Path) -> None:
    on_cpu = run_ranks(2, training.losses, tmp_path, strategy)
    for rank, (_, losses, weights, _) in zip(found[1], on_cpu, strict=True):
        device, own_losses, own_weights, _ = rank[strategy]
        assert device == "sim"
        assert own_losses == pytest.approx(losses, abs=1e-6)
        assert own_weights == pytest.approx(weights, abs=1e-6)


def test_an_average_on_the_cpu_waits_for_the_weights(found: Any) -> None:
    assert [rank["averaged"] for rank in found[1]] == [training.averaged("cpu")] * 2


def test_copies_of_a_layer_are_compared_on_the_device(found: Any) -> None:
    assert [rank["trial"] for rank in found[1]] == [[0.0] * 4] * 2
