"""The beginning and the end of the default group, and what becomes of it when a rank is missing or dies."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import FileStore, HashStore

from lockstep.dist import (
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    destroy_dist,
    get_backend,
    get_default_group,
    get_dist_info,
    get_local_size,
    get_rank,
    get_world_size,
    infer_launcher,
    init_dist,
    is_distributed,
)
from lockstep.dist.world import _refuse_shared, _tell_device
from lockstep.errors import CollectiveTimeoutError, DistError, PeerError, TopologyError
from lockstep.testing import RankFailure, ranks, run_ranks
from lockstep.testing.pool import free_port

from .reference import assert_group_works

UNAVAILABLE = [x for x in ("nccl", "ucc", "xccl") if not getattr(torch_dist, f"is_{x}_available")()]


@ranks(1, fresh=True)
def test_none_makes_a_group_of_one() -> None:
    init_dist("none")
    assert is_distributed()
    assert get_dist_info() == (0, 1)
    assert (get_backend(), get_local_size()) == (torch_dist.get_backend(), 1)
    assert_group_works()


@ranks(2, fresh=True)
def test_a_second_start_is_refused_and_harms_nothing() -> None:
    init_dist("pytorch")
    group = get_default_group()
    with pytest.raises(DistError, match=r"`init_dist` must be called once, .* Call destroy_dist\(\) first"):
        init_dist("pytorch")
    assert get_default_group() is group
    assert_group_works()


@pytest.mark.parametrize("late", [0, 1])
@ranks(2, fresh=True)
def test_a_group_may_end_and_another_begin_though_one_rank_is_late(late: int) -> None:
    before = dict(os.environ)
    for _ in range(3):
        init_dist("pytorch", timeout=20)
        assert_group_works()
        if get_rank() == late:
            time.sleep(0.1)
        destroy_dist()
        assert dict(os.environ) == before
        assert not is_distributed()
        assert get_dist_info() == (0, 1)
        assert_group_works()  # alone, now


@ranks(2, fresh=True)
def test_a_group_may_begin_where_torch_itself_has_ended_one() -> None:
    before = dict(os.environ)
    init_dist("pytorch")
    barrier()
    torch_dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) - 1)
    init_dist("pytorch")
    assert_group_works()
    destroy_dist()
    del os.environ["MASTER_PORT"], before["MASTER_PORT"]
    assert dict(os.environ) == before


@pytest.fixture
def free_ports() -> list[int]:
    return [free_port(), free_port()]


@ranks(3, fresh=True)
def test_processes_meet_that_have_joined_differently_many_groups_before(free_ports: list[int]) -> None:
    """As those of a pool in which one has been replaced."""
    own = int(os.environ["RANK"])
    for port, members in zip(free_ports, ([0, 1], [1, 2]), strict=True):
        if own in members:
            place = str(members.index(own))
            numbers = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            with patch.dict(os.environ, numbers, MASTER_PORT=str(port)):
                init_dist("pytorch", timeout=20)
                assert_group_works()
                destroy_dist()


@ranks(1, fresh=True)
def test_a_limit_of_open_files_that_macos_does_not_tell_is_left_as_it_is() -> None:
    above = ValueError("current limit exceeds maximum limit")
    with (
        patch("resource.getrlimit", return_value=(256, resource.RLIM_INFINITY)),
        patch("resource.setrlimit", side_effect=above) as setting,
    ):
        init_dist("none")
    assert setting.called
    assert_group_works()


@ranks(1, fresh=True)
def test_an_interface_that_the_user_chose_is_kept() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    init_dist("none")
    destroy_dist()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@ranks(2, fresh=True)
def test_all_listen_on_loopback_alone() -> None:
    init_dist("pytorch")
    assert_group_works()
    addresses = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
    barrier()


@ranks(2, fresh=True)
def test_ranks_may_meet_at_a_store_of_the_callers(tmp_path: Path) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    store = FileStore(str(tmp_path / "store"), 2)
    for _ in range(2):
        init_dist("pytorch", store=store)
        assert_group_works()
        destroy_dist()


def refuse(error: Any, message: str, *args: Any, **options: Any) -> None:
    before = dict(os.environ)
    with pytest.raises(error, match=message):
        init_dist(*args, **options)
    assert not is_distributed()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("launcher", "options", "message"),
    [
        ("pytroch", {}, "`launcher` must be one of .*, but is 'pytroch': did you mean `pytorch`"),
        ("none", {"backend": "glo"}, "`backend` must name backends of torch.distributed .*, but is 'glo'"),
        ("none", {"backend": "cpu:gloo,cuda:ncl"}, "`backend` must name .*, but is 'cpu:gloo,cuda:ncl'"),
        ("none", {"backend": "undefined"}, "`backend` must name .*, but is 'undefined'"),
        (
            "none",
            {"init_backend": "horovod"},
            "`init_backend` must be one of torch, deepspeed, colossalai, but is 'horovod'",
        ),
        ("none", {"port": 0}, "`port` must be from 1 to 65535, or None for MASTER_PORT, but is 0"),
        ("none", {"port": "1"}, "`port` must be from 1 to 65535, or None for MASTER_PORT, but is '1'"),
        ("none", {"timeout": 0}, "`timeout` must be positive, and below 1e9 seconds, but is 0"),
        ("none", {"timeout": math.inf}, "`timeout` must be positive, and below 1e9 seconds, but is inf"),
        ("none", {"timeout": timedelta(seconds=-1)}, "`timeout` must be positive, .*, but is datetime"),
    ],
)
def test_what_nobody_knows_is_refused_by_name(launcher: str, options: dict[str, Any], message: str) -> None:
    refuse(ValueError, message, launcher, **options)


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_a_backend_that_torch_was_built_without_is_refused(name: str) -> None:
    refuse((RuntimeError, AssertionError), f"{name.upper()}$|doesn't have {name.upper()} built in", "none", name)


@pytest.mark.parametrize(
    ("engine", "way"),
    [
        ("deepspeed", r"pip install 'lockstep-engine\[deepspeed\]'"),
        ("colossalai", r"the recipe in docs/engines\.md"),
    ],
)
def test_an_engine_that_is_not_installed_is_refused_with_the_way_to_get_it(
    engine: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)  # how Python marks what can't be imported
    refuse(DistError, f"Install it with {way}", "none", init_backend=engine)


def test_a_launcher_that_did_not_start_this_process_is_refused() -> None:
    assert infer_launcher() == "none"
    for launcher, variable in (("pytorch", "RANK"), ("slurm", "SLURM_PROCID"), ("mpi", "OMPI_COMM_WORLD_RANK")):
        refuse(TopologyError, f"{variable}.* must be set for launcher '{launcher}'", launcher)


@pytest.mark.parametrize("seconds", ["soon", "0", "inf", "nan"])
def test_a_heartbeat_that_is_no_number_of_seconds_is_refused_before_there_is_a_group(monkeypatch, seconds: str):
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT", seconds)
    with pytest.raises(ValueError, match=f"LOCKSTEP_HEARTBEAT must be a positive number .*, but is '{seconds}'"):
        init_dist("none")
    assert not is_distributed()


def test_ending_what_did_not_begin_does_nothing() -> None:
    destroy_dist()
    destroy_dist()
    assert not is_distributed()


@ranks(2, fresh=True)
def test_a_missing_rank_is_a_timeout_error_after_the_timeout(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=1)
    told = tmp_path / "told"
    if get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"did not take part .* in time \(rank 0 of 2\)"):
            all_reduce(torch.ones(1))
        assert time.monotonic() - began > 0.9
        told.touch()
    while not told.exists():
        time.sleep(0.01)


@ranks(2, fresh=True)
def test_a_handle_may_be_awaited_again_after_a_timeout_of_its_own(tmp_path: Path) -> None:
    init_dist("pytorch")
    data, told = torch.ones(2), tmp_path / "told"
    if get_rank() == 0:
        handle = all_reduce(data, async_op=True)
        with pytest.raises(CollectiveTimeoutError):
            handle.wait(timedelta(milliseconds=50))
        assert not handle.is_completed()
        told.touch()
        handle.wait()
    else:
        while not told.exists():
            time.sleep(0.01)
        all_reduce(data, async_op=True).wait()
    assert data.tolist() == [2.0, 2.0]


def lose_rank_1(folder: Path, call: Callable[[], Any]) -> None:
    """Kill rank 1 while it waits in a collective for another, which comes later."""
    barrier()
    killed_at = time.monotonic() + 0.2
    if get_rank() == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if get_rank() == (0 if get_world_size() == 2 else 2):
        time.sleep(0.4)
    named = r"rank 1 of the default group .* ended or lost the connection .*\n  rank 1: is gone \(process \d+ on "
    with pytest.raises(PeerError, match=named):
        call()
    (folder / str(get_rank())).write_text(str(time.monotonic() - killed_at))


def reduce_much() -> None:
    all_reduce(torch.ones(2**20))


def gather_tensors() -> None:
    for _ in range(2):  # a rank that got all that it needs from the lost one finds out in the second
        all_gather(torch.ones(1))


def gather_objects() -> None:
    for _ in range(2):
        all_gather_object("x" * 2**20)


@pytest.mark.parametrize(
    ("size", "call"), [(3, reduce_much), (3, gather_tensors), (3, gather_objects), (2, reduce_much), (2, barrier)]
)
def test_a_rank_killed_in_a_collective_is_a_peer_error_on_the_others_at_once(
    size: int, call: Callable[[], Any], tmp_path: Path
) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(size, lose_rank_1, tmp_path, call)
    assert [(x.rank, x.kind, x.summary) for x in failure.value.reports] == [(1, "died", "killed by SIGKILL")]
    for survivor in {0, size - 1} - {1}:
        assert float((tmp_path / str(survivor)).read_text()) < 5


JOBS_THAT_SIMPLY_END = """
import gc, os, sys
import torch
from torch.distributed import FileStore
from torch.nn.parallel import DistributedDataParallel
from lockstep.dist import all_gather_object, all_reduce, get_default_group, init_dist

def job(rank, number):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    init_dist("pytorch", store=FileStore(f"{sys.argv[1]}/{number}", 2))
    all_gather_object(rank)
    if number < 3:
        for _ in range(300):
            all_reduce(torch.ones(10_000), async_op=True)
        return None
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(20):
        all_reduce(torch.ones(10_000))
    return get_default_group(), model

def main():
    codes = []
    for number in range(6):
        if number == 3:
            import torch._dynamo  # as DDP does; here once for all jobs
        gc.freeze()  # else the end of each job walks through all of torch
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                return job(rank, number)
            children.append(child)
        codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(codes)

held = main()
"""


def test_processes_that_simply_end_exit_with_code_0_holding_group_and_model_or_with_work_in_flight(
    tmp_path: Path,
) -> None:
    """Each rank is forked from a process that has imported torch, and runs to the end of its script.

    Under bare torch 2.13 about one in four aborts: its group's threads free tensors while the interpreter ends.
    """
    command = [sys.executable, "-W", "error", "-c", JOBS_THAT_SIMPLY_END, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.stdout == f"{[0] * 12}\n", ended.stderr
    assert ended.returncode == 0
    assert ended.stderr == ""


def test_a_device_that_two_others_share_is_told_on_every_rank_of_their_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_HOSTID", "")
    store = HashStore()
    for local_rank in (1, 2):
        store.set(f"device/0/{local_rank}", "3 ")
    rank_0: Any = SimpleNamespace(rank=0, world_size=3, node_rank=0, local_rank=0, local_size=3)
    _tell_device(torch.device("cpu", 0), rank_0, store)
    with pytest.raises(TopologyError, match="the local ranks 1, 2 share one with another"):
        _refuse_shared(torch.device("cpu", 0), rank_0, store)


def test_no_rank_is_awaited_to_compare_devices():
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    store.set("device/0/0", "3 ")  # of the others, more are told of than there are
    rank_0: Any = SimpleNamespace(rank=0, world_size=2, node_rank=0, local_rank=0, local_size=8)
    _refuse_shared(torch.device("cpu", 0), rank_0, store)


@pytest.mark.parametrize(("count", "told"), [(1, b""), (2, b"0 ")])
def test_a_device_that_a_rank_sees_alone_is_not_told_by_its_number(
    count: int, told: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    store = HashStore()
    rank_0: Any = SimpleNamespace(rank=0, world_size=2, node_rank=0, local_rank=0, local_size=2)
    _tell_device(torch.device("cpu", 0), rank_0, store)
    assert (store.get("device/0/0") if store.check(["device/0/0"]) else b"") == told
