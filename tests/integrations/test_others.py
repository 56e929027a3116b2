"""Ranks that dask, Monarch, TorchX and Kubeflow's variables make train as those of `lockstep launch` do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.launch.jobs import TWO_STEPS, Ended, Job, check_training

from lockstep.testing.pool import free_port

from .conftest import RECIPES, Start, losses_in


@pytest.fixture
def expected(tmp_path: Path, start: Start) -> list[float]:
    code = "import sys; from small import by_runner; by_runner('work_dirs/alone')"
    (tmp_path / "alone.py").write_text(code)
    start(sys.executable, "-m", "lockstep", "launch", "alone.py", "--nproc", "2")
    return losses_in(tmp_path / "work_dirs" / "alone")


def test_dask(tmp_path: Path, start: Start, expected: list[float]) -> None:
    done = start(sys.executable, str(Path(__file__).with_name("dask_jobs.py")))
    assert losses_in(tmp_path / "work_dirs" / "first") == losses_in(tmp_path / "work_dirs" / "again") == expected
    raised, killed = json.loads(done.stdout.splitlines()[-1])
    assert raised == "ValueError: bad luck"
    assert killed.startswith("PeerError: rank 1 of the default group (2) ended or lost the connection")


def test_monarch(tmp_path: Path, start: Start, expected: list[float]) -> None:
    start(sys.executable, str(RECIPES / "on_monarch.py"))
    assert losses_in(tmp_path / "work_dirs" / "small") == expected


def test_torchx(start: Start) -> None:
    done = start("torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--script", TWO_STEPS)
    # Before each line stand the name of the role and the number of the rank.
    reports = [line[line.index("{") :] for line in done.stderr.splitlines() if '{"launcher"' in line]
    check_training(Ended(0, "\n".join(reports), ""), "pytorch", [(0, 2, 0), (1, 2, 0)])


def test_the_variables_that_kubeflow_sets_for_torchrun() -> None:
    port = str(free_port())
    both = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
    }  # fmt: skip
    torchrun = (sys.executable, "-m", "torch.distributed.run", TWO_STEPS)
    with (
        Job(torchrun, env=both | {"PET_NODE_RANK": "0"}) as first,
        Job(torchrun, env=both | {"PET_NODE_RANK": "1"}) as second,
    ):
        ended = first.end() + second.end()
    check_training(ended, "pytorch", [(0, 1, 0), (0, 1, 1)])
