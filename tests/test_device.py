"""What this process has to compute on. Runs on a machine with an accelerator or without."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
import torch

from lockstep import device
from lockstep.device import get_device, get_max_cuda_memory, memory_stats, peak_memory

ON_CPU = get_device() == "cpu"
MIB = 2**20


def test_the_device_is_one_that_torch_can_use() -> None:
    assert torch.ones(2, device=get_device()).sum().item() == 2


def test_the_device_is_cpu_where_there_is_no_accelerator() -> None:
    assert (not torch.accelerator.is_available()) == ON_CPU


@pytest.mark.parametrize("kind", ["cuda", "npu", "mlu", "mps", "musa"])
def test_what_is_available_is_what_torch_accelerates_with(kind: str) -> None:
    available = getattr(device, f"is_{kind}_available")()
    assert available is (get_device() == kind)


def test_on_the_cpu_memory_is_that_of_the_process_and_the_machine() -> None:
    stats = memory_stats("cpu")
    assert stats.device == "cpu"
    assert stats.total_bytes == pytest.approx(psutil.virtual_memory().total, rel=0.01)
    assert stats.allocated_bytes == pytest.approx(psutil.Process().memory_info().rss, abs=64 * MIB)
    assert stats.allocated_bytes <= stats.peak_bytes <= stats.total_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has another count")
def test_the_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    block = torch.ones(1024 * MIB // 4)
    code = "from lockstep.device import memory_stats, peak_memory; print(memory_stats('cpu').peak_bytes, peak_memory())"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    of_cpu, of_device = started.stdout.split()
    assert int(of_cpu) < block.nbytes
    assert get_device() != "cpu" or int(of_device) < block.nbytes


def test_memory_that_was_let_go_of_stays_in_the_peak() -> None:
    before = memory_stats("cpu")
    block = torch.ones(max(before.peak_bytes - before.allocated_bytes, 0) // 4 + 64 * MIB)
    during = memory_stats("cpu")
    nbytes = block.nbytes
    del block
    after = memory_stats("cpu")
    if get_device() == "cpu":
        assert 0.9 * during.peak_bytes <= (peak_memory() or 0) <= memory_stats("cpu").peak_bytes
    assert during.allocated_bytes - before.allocated_bytes == pytest.approx(nbytes, rel=0.2)
    assert after.allocated_bytes < during.allocated_bytes - nbytes / 2
    assert after.peak_bytes > before.peak_bytes + 128 * MIB


def test_the_stats_are_those_of_the_current_device() -> None:
    stats = memory_stats()
    expected = "cpu" if ON_CPU else f"{get_device()}:{torch.accelerator.current_device_index()}"
    assert stats.device == expected == memory_stats(get_device()).device
    assert 0 <= stats.allocated_bytes <= stats.peak_bytes <= (stats.total_bytes or stats.peak_bytes)


@pytest.mark.parametrize("other", ["meta", torch.device("mps" if get_device() != "mps" else "cuda")])
def test_memory_of_a_device_of_another_type_is_refused(other: str | torch.device) -> None:
    with pytest.raises(ValueError, match=f"`device` must be of type .*cpu, but is '{other}'"):
        memory_stats(other)


def test_figures_that_a_device_does_not_keep_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> int:
        raise RuntimeError("Allocator for device is not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: 7)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lacks)
    device._counts_memory.cache_clear()
    assert memory_stats(0) == device.MemoryStats("xpu:0", 7, 7, None)
    assert peak_memory() == 7
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lacks)  # alone, as a device may have the other
    device._counts_memory.cache_clear()
    assert peak_memory() is None
    assert memory_stats(0).device == "cpu"
    device._counts_memory.cache_clear()


def test_the_peak_of_cuda_memory_is_zero_without_cuda_and_starts_anew_with_each_call() -> None:
    if torch.cuda.is_available():
        get_max_cuda_memory()
        block = torch.ones(MIB, device="cuda")
        assert get_max_cuda_memory() >= 4
        del block
        assert get_max_cuda_memory() >= 4
    assert get_max_cuda_memory() == (torch.cuda.max_memory_allocated() // MIB if torch.cuda.is_available() else 0)
