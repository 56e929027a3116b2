from __future__ import annotations

import socket
from typing import get_args

import pytest

from lockstep.dist.consistency import CheckMode
from lockstep.launch import JobSpec, job
from lockstep.launch.job import loopback_of, quotas, variable_faults


def test_an_endpoint_is_host_and_port():
    assert JobSpec(2, nnodes=2, rdzv="node0:29500").endpoint() == ("node0", 29500)
    assert JobSpec(2, nnodes=2, node_rank=1, rdzv="[fe80::1]:1").endpoint() == ("fe80::1", 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"nproc": 0}, "`--nproc` must be at least 1, but is 0"),
        ({"nnodes": 0}, "`--nnodes` must be at least 1"),
        ({"nnodes": 2, "node_rank": 2, "rdzv": "a:1"}, "`--node-rank` must be from 0 to 1"),
        (
            {"node_rank": 1},
            "`--nnodes`, the number of machines, must be given for several of them, as `--node-rank` is 1",
        ),
        ({"node_rank": -1}, "`--node-rank` must be from 0 to 0"),
        (
            {"rdzv": "a:1"},
            "`--nnodes`, the number of machines, must be given for several of them, as `--rdzv` is 'a:1'",
        ),
        ({"nproc": 2, "least_nproc": 3}, "`least_nproc` must be from 1 to `nproc`, 2, but is 3"),
        ({"nnodes": 2, "rdzv": "a:1", "least_nnodes": 0}, "`least_nnodes` must be from 1 to `nnodes`, 2, but is 0"),
        ({"nnodes": 2}, "but is missing. Example: --rdzv node0:29500"),
        *(
            ({"nnodes": 2, "rdzv": rdzv}, "`--rdzv` must be HOST:PORT")
            for rdzv in (
                "host",
                ":1",
                "host:",
                "host:x",
                "host:0",
                "host:65536",
                "a..b:1",
                f"{64 * 'a'}:1",
                "http://a:1",
            )
        ),
        *(
            ({"rdzv_timeout_seconds": seconds}, f"`rdzv_timeout_seconds` must be above 0, but is {seconds}")
            for seconds in (-1, 0, float("nan"))
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        JobSpec(**arguments)


@pytest.mark.parametrize(
    ("host", "address", "told"),
    [
        ("node0", "127.0.1.1", "127.0.1.1"),  # as Debian's installer writes it
        ("node0", "10.0.0.5", None),
        ("localhost", "127.0.0.1", None),
        ("127.0.0.1", "127.0.0.1", None),
    ],
)
def test_a_name_of_a_machine_that_is_a_loopback_address_here_is_known(host, address, told, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", (address, 0))])
    assert loopback_of(host) == told


@pytest.mark.parametrize(
    ("listed", "files", "found"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, [1.5]),  # of a container
        ("0::/", {"cpu.max": "max 100000"}, []),
        ("0::/a.slice/b.scope", {"a.slice/cpu.max": "200000 100000", "a.slice/b.scope/cpu.max": "max 100000"}, [2.0]),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "50000\n"}, [4.0]),
        ("3:cpu:/docker/1", {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, [0.5]),
        ("3:cpuset:/\n4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, []),
    ],
)
def test_the_quotas_of_control_groups_and_of_those_around_them_count(tmp_path, listed, files, found):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    groups = tmp_path / "groups"
    groups.write_text(listed)
    assert list(quotas(groups, tmp_path)) == found
    assert list(quotas(tmp_path / "none", tmp_path)) == []


def test_the_modes_of_checks_are_those_of_the_collectives():
    assert get_args(CheckMode) == job._CHECK_MODES
    for value in ("", "inf", "nan", "0", "30"):
        faults = variable_faults({"LOCKSTEP_HEARTBEAT": value, "LOCKSTEP_CHECK": ""})
        assert [one.partition(" ")[0] for one in faults] == ["LOCKSTEP_HEARTBEAT"] * (value not in ("", "30"))
