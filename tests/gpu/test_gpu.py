"""The same bodies on an accelerator: `make test-gpu`. Everywhere else these tests are deselected, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.device import get_device
from lockstep.testing import run_ranks

from . import bodies
from .test_bodies import check_case, check_checkpoint, check_utilization

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device() -> str:
    assert get_device() != "cpu", "tests marked `gpu` must run where torch finds an accelerator, but finds none here"
    return get_device()


@pytest.mark.parametrize("case", bodies.CASES)
def test_losses_are_those_of_a_plain_loop_on_the_cpu(case: str, device: str, tmp_path: Path):
    assert check_case(case, tmp_path) == device


@pytest.mark.parametrize("case", ["compiled", "fsdp-compiled"])
def test_torchs_own_backend_translates_for_it(case: str, device: str, tmp_path: Path):
    assert check_case(case, tmp_path, compile_=True) == device


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_checkpoint_goes_from_the_cpu_to_the_device_and_back(strategy: str, tmp_path: Path):
    check_checkpoint(strategy, tmp_path)


def test_flops_are_those_counted_on_the_cpu(tmp_path: Path):
    check_utilization(tmp_path)


def test_snapshots_of_memory(device: str, tmp_path: Path):
    if device != "cuda":
        pytest.skip("torch records allocations of CUDA memory alone")
    names, content = run_ranks(1, bodies.snapshots, tmp_path)[0]
    assert names == ["snapshot_rank0_iter2.pickle", "snapshot_rank0_iter3_out_of_memory.pickle"]
    actions = {entry["action"] for trace in content["device_traces"] for entry in trace}
    assert {"alloc", "oom"} <= actions
    assert content["segments"]
