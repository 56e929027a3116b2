"""A job that loses a machine goes on with the other one, and takes it in again at the next restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from tests.faults.test_elastic import every_sample_once, kept, prepare

from lockstep.testing.pool import free_port

EPOCHS = 12


class Nodes:
    """A job on two nodes of two ranks, of which one may be lost. A context manager.

    Args:
        folder: where it runs, and writes.
        rdzv: where the nodes meet.
        places: begins the command of each node.
        nnodes: how many nodes the job needs, and may have.
    """

    def __init__(
        self, folder: Path, rdzv: str, places: Sequence[Sequence[str]] = ((), ()), nnodes: str = "1:2"
    ) -> None:
        self._folder, self._places = folder, places
        words = prepare(folder, "2", 3, {}, seconds_per_step=0.2, epochs=EPOCHS)
        self._command = [sys.executable, "-m", "lockstep", *words, "--nnodes", nnodes, "--rdzv", rdzv]
        self._jobs: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._jobs:
            self.kill(node)

    def start(self, node: int) -> None:
        with self._errors(node).open("a") as errors:
            self._jobs[node] = subprocess.Popen(
                [*self._places[node], *self._command, "--node-rank", str(node)],
                cwd=self._folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip

    def kill(self, node: int) -> None:
        """Kill the launcher; the kernel then kills its ranks."""
        self._jobs[node].kill()
        self._jobs[node].wait()

    def kill_a_rank(self, node: int) -> None:
        children = psutil.Process(self._jobs[node].pid).children()
        next(one for one in children if "lockstep.launch.worker" in one.cmdline()).kill()

    def preempt(self, node: int) -> None:
        self._jobs[node].terminate()

    def end(self, node: int) -> int:
        return self._jobs[node].wait(timeout=150)

    def said(self, node: int) -> str:
        return self._errors(node).read_text()

    def await_ranks(self, count: int, attempt: int, lines: int = 12) -> None:
        """Wait until so many ranks have noted so much."""
        file = self._folder / "noted.jsonl"

        def is_there() -> bool:
            noted = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            return sum((line["ranks"], line["attempt"]) == (count, attempt) for line in noted) >= lines

        self.await_that(is_there)

    def await_that(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.said(0)
            assert self._jobs[0].poll() is None, self.said(0)
            time.sleep(0.05)

    def _errors(self, node: int) -> Path:
        return self._folder / f"errors_{node}"


def check_a_node_is_lost_and_comes_back(nodes: Nodes, folder: Path) -> None:
    nodes.start(1)
    nodes.start(0)
    nodes.await_ranks(4, attempt=0, lines=24)  # a checkpoint is saved after each fourth iteration
    nodes.kill(1)
    nodes.await_ranks(2, attempt=1)
    assert "1 of at most 2 nodes take part: node 0" in nodes.said(0)
    nodes.start(1)
    nodes.await_that(lambda: "the job goes on without this node until its ranks start again" in nodes.said(1))
    nodes.kill_a_rank(0)
    assert (nodes.end(0), nodes.end(1)) == (0, 0), nodes.said(0) + nodes.said(1)
    assert "2 of at most 2 nodes take part: nodes 0, 1" in nodes.said(0)
    lines = kept(folder)
    assert {(line["attempt"], line["ranks"]) for line in lines} == {(0, 4), (1, 2), (2, 4)}
    assert every_sample_once(lines, EPOCHS)


@pytest.fixture
def rdzv() -> str:
    return f"127.0.0.1:{free_port()}"


def test_a_node_is_lost_and_comes_back(tmp_path: Path, rdzv: str) -> None:
    with Nodes(tmp_path, rdzv) as nodes:
        check_a_node_is_lost_and_comes_back(nodes, tmp_path)


def test_a_node_that_comes_back_in_vain_ends_with_the_job(tmp_path: Path, rdzv: str) -> None:
    with Nodes(tmp_path, rdzv) as nodes:
        nodes.start(0)
        nodes.start(1)
        nodes.await_ranks(4, attempt=0)
        nodes.kill(1)
        nodes.await_ranks(2, attempt=1)
        nodes.start(1)
        assert (nodes.end(0), nodes.end(1)) == (0, 0), nodes.said(0) + nodes.said(1)
    assert "the job has ended without this node" in nodes.said(1)
    assert every_sample_once(kept(tmp_path), EPOCHS)


def test_a_node_that_waits_for_the_other_is_preempted_as_one_that_has_nothing_to_save(
    tmp_path: Path, rdzv: str
) -> None:
    with Nodes(tmp_path, rdzv, nnodes="2") as nodes:
        nodes.start(0)
        nodes.start(1)
        nodes.await_ranks(4, attempt=0)
        nodes.kill(1)
        nodes.await_that(lambda: "Starting all ranks again" in nodes.said(0))
        time.sleep(1)  # it ends its ranks before, and waits for the other node afterwards
        nodes.preempt(0)
        assert nodes.end(0) == 75, nodes.said(0)
    assert "Start the job again with --resume" in nodes.said(0)
    assert "had to be killed" not in nodes.said(0)


def test_the_first_node_must_stay(tmp_path: Path, rdzv: str) -> None:
    with Nodes(tmp_path, rdzv) as nodes:
        nodes.start(0)
        nodes.start(1)
        nodes.await_ranks(4, attempt=0)
        nodes.kill(0)
        assert nodes.end(1) == 1
    assert f"node 0 at {rdzv} is gone" in nodes.said(1)
