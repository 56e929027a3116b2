"""Two hosts: network namespaces with a cable between them, in each of them `lockstep launch`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.faults.test_elastic_nodes import Nodes, check_a_node_is_lost_and_comes_back

from .jobs import PYTHON, TWO_STEPS, Job, check_training, require, run_at_once

pytestmark = [
    pytest.mark.launchers,
    require("ip", "unshare", root=True, able_to=("unshare", "--net", "--mount", "true")),
]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29533  # the namespaces are new: every port is free


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Yield the names of two network namespaces, at the addresses above."""
    names = [f"lockstep-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_train_together(hosts: list[str]) -> None:
    layout = ("--nproc", "2", "--nnodes", "2", "--rdzv", f"{ADDRESSES[0]}:{PORT}")
    jobs = [
        ("ip", "netns", "exec", host, PYTHON, "-m", "lockstep", "launch", TWO_STEPS, *layout, "--node-rank", str(node))
        for node, host in enumerate(hosts)
    ]
    first, second = run_at_once(*jobs)
    check_training(first + second, "pytorch", [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)])
    assert [report["listening"] for report in (first + second).ranks] == [[a] for a in ADDRESSES for _ in range(2)]


def test_a_host_is_lost_and_comes_back(hosts: list[str], tmp_path: Path) -> None:
    places = [("ip", "netns", "exec", host) for host in hosts]
    with Nodes(tmp_path, f"{ADDRESSES[0]}:{PORT}", places) as nodes:
        check_a_node_is_lost_and_comes_back(nodes, tmp_path)


def test_a_host_whose_network_is_lost_ends(hosts: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time; open('ready_' + os.environ['RANK'], 'w'); time.sleep(600)")
    impatient = (
        "import lockstep.launch.rendezvous as module; module._SECONDS_OF_SILENCE = 2.0; "
        "from lockstep.cli.main import main; main()"
    )
    layout = ("launch", str(script), "--nproc", "1", "--nnodes", "2", "--rdzv", f"{ADDRESSES[0]}:{PORT}")
    with ExitStack() as stack:
        for node, host in enumerate(hosts):
            command = ("ip", "netns", "exec", host, PYTHON, "-c", impatient, *layout, "--node-rank", str(node))
            job = stack.enter_context(Job(command, cwd=tmp_path))
        while not all((tmp_path / f"ready_{node}").exists() for node in range(2)):
            assert job.running()
            time.sleep(0.1)
        ip("-n", hosts[1], "link", "set", "eth0", "down")
        ended = job.end()
    assert ended.code == 1
    assert f"error: node 0 at {ADDRESSES[0]}:{PORT} is gone" in ended.err
