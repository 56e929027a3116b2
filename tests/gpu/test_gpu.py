"""The same bodies on an accelerator: `make test-gpu`. Everywhere else these tests are deselected, and counted.

What needs two or four devices is skipped where there are fewer, unless they are CUDA's, and NCCL_HOSTID is set: NCCL
then takes ranks that share a GPU.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from lockstep.device import get_device
from lockstep.testing import run_ranks
from lockstep.watch.interrupt import let_graphs_be_captured

from . import bodies, collectives
from .fault_job import FAULTS
from .test_bodies import (
    check_averaged,
    check_case,
    check_checkpoint,
    check_described,
    check_fault,
    check_going_on,
    check_guarded,
    check_mesh,
    check_own_loop,
    check_translated,
    check_utilization,
)

pytestmark = pytest.mark.gpu


def on(*sizes: int) -> list[Any]:
    """Return numbers of ranks, each skipped where they would have no devices."""
    return [pytest.param(size, id=f"ranks-{size}", marks=at_least(size)) for size in sizes]


def at_least(size: int) -> pytest.MarkDecorator:
    found = torch.accelerator.device_count()
    can_share = torch.cuda.is_available() and "NCCL_HOSTID" in os.environ
    return pytest.mark.skipif(
        found < size and not can_share, reason=f"needs {size} devices or NCCL_HOSTID, but torch sees {found}"
    )


@pytest.fixture
def device() -> str:
    return get_device()


@pytest.mark.parametrize("size", on(1, 2, 4))
@pytest.mark.parametrize("name", [*collectives.CASES, *collectives.WAITING])
def test_a_collective_gives_what_it_should_and_does_not_wait(name: str, size: int):
    run_ranks(size, collectives.check, [name])


@pytest.mark.parametrize("size", on(2, 4))
def test_collectives_in_a_group_without_rank_0(size: int):
    run_ranks(size, collectives.check_in_groups)


@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("case", bodies.CASES)
def test_losses_are_those_of_a_plain_loop_on_the_cpu(case: str, size: int, device: str, tmp_path: Path):
    assert check_case(case, size, tmp_path) == device


@pytest.mark.parametrize("case", bodies.SINGLE)
def test_losses_of_one_process_are_those_of_a_plain_loop_on_the_cpu(case: str, device: str, tmp_path: Path):
    assert check_case(case, 1, tmp_path) == device


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=at_least(size), id=f"{case}-ranks-{size}")
        for case, (size, _, _) in bodies.MESHES.items()
    ],
)
def test_on_a_mesh_losses_are_those_of_a_plain_loop_on_the_cpu(case: str, device: str, tmp_path: Path):
    assert check_mesh(case, tmp_path) == device


@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("mode", bodies.TRANSLATED)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchs_own_backend_translates_for_it(strategy: str, mode: str, size: int, device: str, tmp_path: Path):
    assert check_translated(strategy, mode, size, tmp_path) == device


@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("amp", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loop_by_hand(strategy: str, amp: str | None, size: int, tmp_path: Path):
    check_own_loop(strategy, amp, size, tmp_path)


@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize(("strategy", "kept_on"), [("ddp", None), ("ddp", "cpu"), ("fsdp", None)])
def test_an_average_is_that_of_a_plain_loop(strategy: str, kept_on: str | None, size: int, tmp_path: Path):
    check_averaged(strategy, kept_on, size, tmp_path)


@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("amp", [None, "float16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_goes_on_as_if_it_had_not_stopped(
    strategy: str, amp: str | None, async_save: bool, size: int, tmp_path: Path
):
    check_going_on(strategy, amp, async_save, size, tmp_path)


@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("case", bodies.GUARDED)
def test_no_iteration_waits_for_the_device(case: str, size: int, tmp_path: Path):
    check_guarded(case, size, tmp_path)


@pytest.mark.parametrize("size", on(1, 2))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_describes_its_devices_and_their_memory(strategy: str, size: int, device: str, tmp_path: Path):
    found = torch.accelerator.device_count()
    assert check_described(strategy, size, tmp_path) == [f"{device}:{index % found}" for index in range(size)]


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_checkpoint_goes_from_the_cpu_to_the_device_and_back(strategy: str, tmp_path: Path):
    check_checkpoint(strategy, tmp_path)


def test_flops_are_those_counted_on_the_cpu(tmp_path: Path):
    check_utilization(tmp_path)


@pytest.mark.parametrize("size", on(2, 4))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_goes_wrong_is_named_on_all_others(fault: str, size: int, tmp_path: Path):
    check_fault(fault, size, tmp_path)


def test_snapshots_of_memory(device: str, tmp_path: Path):
    if device != "cuda":
        pytest.skip("torch records allocations of CUDA memory alone")
    names, content = run_ranks(1, bodies.snapshots, tmp_path)[0]
    assert names == ["snapshot_rank0_iter2.pickle", "snapshot_rank0_iter3_out_of_memory.pickle"]
    actions = {entry["action"] for trace in content["device_traces"] for entry in trace}
    assert {"alloc", "oom"} <= actions
    assert content["segments"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_thread_may_ask_events_while_a_graph_is_captured():
    data, event, ends, answers = torch.ones(1, device="cuda"), torch.Event("cuda"), Event(), []
    event.record()

    def ask() -> None:
        while not ends.wait(0.001):
            let_graphs_be_captured(0)
            answers.append(event.query())

    (thread := Thread(target=ask)).start()
    try:
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            double = data * 2
            time.sleep(0.2)
    finally:
        ends.set()
        thread.join()
    graph.replay()
    assert double.item() == 2.0
    assert answers[-1]
