"""The bodies of the GPU tests, on the device that there is: on most machines, the CPU.

So their lines run, and give the right values, before the day on which there is a GPU. Of what `test_gpu.py` combines,
this tries each part once.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lockstep.device import get_device
from lockstep.testing import run_ranks
from lockstep.testing.pool import free_port, run_body

from . import bodies, collectives
from .conftest import NO_DEVICE

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.layouts


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [*collectives.CASES, *collectives.WAITING])
def test_a_collective_gives_what_it_should(name: str, size: int):
    run_ranks(size, collectives.check, [name])


def test_collectives_in_a_group_without_rank_0():
    run_ranks(3, collectives.check_in_groups)


@pytest.mark.parametrize(("case", "size"), [*((x, 2) for x in bodies.CASES), *((x, 1) for x in bodies.SINGLE)])
def test_losses_are_those_of_a_plain_loop_on_the_cpu(case: str, size: int, tmp_path: Path):
    check_case(case, size, tmp_path)


@pytest.mark.parametrize("case", bodies.MESHES)
def test_on_a_mesh_losses_are_those_of_a_plain_loop_on_the_cpu(case: str, tmp_path: Path):
    check_mesh(case, tmp_path)


@pytest.mark.jobs  # where nothing is cached, a compiler of C++ runs for a minute or two
def test_torchs_own_backend_translates_for_it(tmp_path: Path):
    check_translated("ddp", "reduce-overhead", 2, tmp_path)


@pytest.mark.parametrize(("strategy", "amp"), [("ddp", "float16"), ("fsdp", "bfloat16"), ("fsdp", None)])
def test_a_loop_by_hand(strategy: str, amp: str | None, tmp_path: Path):
    check_own_loop(strategy, amp, 2, tmp_path)


@pytest.mark.parametrize(("strategy", "kept_on"), [("ddp", "cpu"), ("fsdp", None)])
def test_an_average_is_that_of_a_plain_loop(strategy: str, kept_on: str | None, tmp_path: Path):
    check_averaged(strategy, kept_on, 2, tmp_path)


@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize(("strategy", "amp"), [("ddp", "float16"), ("fsdp", None)])
def test_a_run_goes_on_as_if_it_had_not_stopped(strategy: str, amp: str | None, async_save: bool, tmp_path: Path):
    check_going_on(strategy, amp, async_save, 2, tmp_path)


@pytest.mark.parametrize("case", bodies.GUARDED)
def test_no_iteration_waits_for_the_device(case: str, tmp_path: Path):
    check_guarded(case, 2, tmp_path)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_describes_its_devices_and_their_memory(strategy: str, tmp_path: Path):
    check_described(strategy, 2, tmp_path)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_checkpoint_goes_from_the_cpu_to_the_device_and_back(strategy: str, tmp_path: Path):
    check_checkpoint(strategy, tmp_path)


def test_flops_are_those_counted_on_the_cpu(tmp_path: Path):
    check_utilization(tmp_path)


@pytest.mark.parametrize("fault", ["another op", "a call left out", "is killed"])
def test_a_rank_that_goes_wrong_is_named_on_all_others(fault: str, tmp_path: Path):
    check_fault(fault, 2, tmp_path)


@pytest.mark.skipif(get_device() != "cpu", reason="this machine has an accelerator")
def test_without_a_gpu_the_word_says_so_in_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert NO_DEVICE in done.stdout
    assert "FAILED" not in done.stdout


def check_case(case: str, size: int, work_dir: Path) -> str:
    """Compare a run with a plain loop, and return on what kind of device it was."""
    wanted = run_ranks(1, bodies.train_on_cpu, case)[0]
    kind, *found = run_ranks(size, bodies.train, case, work_dir)[0]
    _compare(found, wanted, bodies.ALL[case][1])
    return kind


def check_mesh(case: str, work_dir: Path) -> str:
    wanted = run_ranks(1, bodies.train_on_cpu, "fsdp")[0]
    kind, *found = run_ranks(bodies.MESHES[case][0], bodies.train_on_mesh, case, work_dir)[0]
    _compare(found, wanted, bodies.EXACT)
    return kind


def check_translated(strategy: str, mode: str, size: int, work_dir: Path) -> str:
    wanted = run_ranks(1, bodies.train_on_cpu, strategy)[0]
    kind, *found = run_body(
        bodies.train_translated, (strategy, mode, work_dir), {}, size=size, timeout=300, fresh=True, warnings="default"
    )[0]
    _compare(found, wanted, bodies.EXACT)
    return kind


def _compare(found: list[list[float]], wanted: tuple[list[float], list[float]], tolerance: float) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=0, abs=tolerance)
    assert found[1] == pytest.approx(wanted[1], rel=2 * tolerance)


def check_own_loop(strategy: str, amp: str | None, size: int, work_dir: Path) -> None:
    wanted, _ = run_ranks(1, bodies.train_on_cpu, strategy)[0]
    found = run_ranks(size, bodies.train_in_own_loop, strategy, amp, work_dir)[0]
    assert found == pytest.approx(wanted, rel=0, abs=bodies.EXACT if amp is None else bodies.HALF)


def check_averaged(strategy: str, device: str | None, size: int, work_dir: Path) -> None:
    wanted = run_ranks(1, bodies.averaged_by_hand)[0]
    for found in run_ranks(size, bodies.averaged, strategy, device, work_dir):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=bodies.EXACT)


def check_going_on(strategy: str, amp: str | None, async_save: bool, size: int, work_dir: Path) -> None:
    wanted, _ = run_ranks(1, bodies.train_on_cpu, strategy)[0]
    found = run_ranks(size, bodies.go_on, (strategy, strategy), amp, work_dir, async_save)[0]
    assert found == pytest.approx(wanted, rel=0, abs=bodies.EXACT if amp is None else bodies.HALF)


def check_moved(before: str, after: str, size: int, work_dir: Path) -> None:
    """One strategy of `bodies.STRATEGIES` goes on from what another one saved."""
    wanted, _ = run_ranks(1, bodies.train_on_cpu, "fsdp")[0]
    strategies = (bodies.STRATEGIES[before], bodies.STRATEGIES[after])
    found = run_ranks(size, bodies.go_on, strategies, None, work_dir, False)[0]
    assert found == pytest.approx(wanted, rel=0, abs=bodies.EXACT)


def check_guarded(case: str, size: int, work_dir: Path) -> None:
    changes = bodies.GUARDED[case]
    counts = changes.get("optim_wrapper", {}).get("accumulative_counts", 1)
    losses, _ = run_ranks(1, bodies.train_by_hand, counts, True, bodies.Heads)[0]
    wanted = [math.fsum(losses[start : start + 10]) / 10 for start in range(0, len(losses), 10)]
    found = run_ranks(size, bodies.train_without_syncs, case, work_dir)[0][: len(wanted)]
    assert found == pytest.approx(wanted, rel=0, abs=bodies.HALF)


def check_described(strategy: str, size: int, work_dir: Path) -> list[str]:
    """Compare the memory in the records with what the weights need, and return the ranks' devices."""
    devices = []
    for described, record, weights in run_ranks(size, bodies.described, strategy, work_dir):
        devices.append(described["device"])
        assert described["device_name"]
        # Weights, gradients and two moments, in shards under FSDP.
        assert record["memory_mib"] * 2**20 >= 4 * weights / (size if strategy == "fsdp" else 1)
        assert record["samples_per_second"] > 0
    return devices


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


def check_utilization(work_dir: Path) -> None:
    """Compare the FLOPs of a run with those counted on the CPU, where attention has other kernels."""
    by_hand = run_ranks(1, bodies.flops_on_cpu)[0]
    flops, record = run_ranks(1, bodies.utilization, work_dir)[0]
    assert flops == pytest.approx(by_hand)
    assert 0 < record["mfu"] < 1


def own_host(rank: int, size: int) -> dict[str, str]:
    """Return what lets NCCL take this rank, if it has to share a GPU."""
    shares = "NCCL_HOSTID" in os.environ and torch.accelerator.device_count() < size
    return {"NCCL_HOSTID": f"rank-{rank}"} if shares else {}


def check_fault(fault: str, size: int, folder: Path) -> None:
    """Each rank that did nothing wrong raises an error that names the one that did, and fails."""
    port = free_port()
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    shared = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
    }  # fmt: skip
    with ExitStack() as ended:
        ranks = []
        for rank in range(size):
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.gpu.fault_job", fault],
                    cwd=folder, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **own_host(rank, size)},
                    stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            ended.callback(ranks[-1].communicate)
            ended.callback(ranks[-1].kill)
        said = [rank.communicate(timeout=120)[1] for rank in ranks[:-1]]
    kinds = {"another op": "CollectiveMismatchError", "is late": "CollectiveTimeoutError"}
    for rank, text in zip(ranks, said, strict=False):
        assert rank.returncode == 1, text  # a watchdog of torch's that ends it does so by SIGABRT
        assert re.search(rf"errors\.{kinds.get(fault, '')}[A-Za-z]*: (.|\n)*rank {size - 1}", text), text
