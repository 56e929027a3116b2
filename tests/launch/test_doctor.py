"""Three hosts, of which one has a slow cable: the doctor names it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from .jobs import PYTHON, require, run_at_once

pytestmark = [
    pytest.mark.launchers,
    require("ip", "tc", "unshare", root=True, able_to=("unshare", "--net", "--mount", "true")),
]

SLOW = 2
RDZV = "10.78.0.1:29534"


def do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Yield three network namespaces on one switch; the last one sends 10 MB/s at most."""
    switch = f"lockstep-{os.getpid()}-switch"
    names = [f"lockstep-{os.getpid()}-h{number}" for number in range(3)]
    try:
        for name in (switch, *names):
            do("ip", "netns", "add", name)
        do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        do("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            do(
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"p{number}",
                "netns",
                switch,
            )
            do("ip", "-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            do("ip", "-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            do("ip", "-n", name, "link", "set", "eth0", "up")
            do("ip", "-n", name, "link", "set", "lo", "up")
        shape = ("root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "400ms")
        do("tc", "-n", names[SLOW], "qdisc", "add", "dev", "eth0", *shape)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_the_slow_host_is_named(hosts: list[str]) -> None:
    layout = ("--nnodes", "3", "--rdzv", RDZV, "--nproc", "1", "--json")
    # Each host has a name of its own.
    jobs = [
        (
            *("ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"),
            *(PYTHON, "-m", "lockstep", "doctor", *layout, "--node-rank", str(node)),
        )
        for node, host in enumerate(hosts)
    ]
    first, *others = run_at_once(*jobs)
    assert (first.code, [one.out for one in others]) == (0, ["", ""]), first.err
    found = {one["name"]: one for one in json.loads(first.out)["findings"]}
    assert found["hosts over ranks"]["facts"]["hosts"] == hosts
    network = found["network over ranks"]
    assert network["status"] == "warning"
    assert f"slow: ranks 0 and 2 ({hosts[0]}, {hosts[2]})" in network["text"]
    assert f"slow: ranks 1 and 2 ({hosts[1]}, {hosts[2]})" in network["text"]
    # On a loaded machine, a message between the other two may be late, too, but not as slow as the throttled host's.
    assert not re.search(r"slow: ranks 0 and 1 .*\b\d{1,2} MB/s", network["text"])
    assert f"rank 2 ({hosts[2]})" in network["remedy"]
