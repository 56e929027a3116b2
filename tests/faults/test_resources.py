"""A rank fails for lack of memory, of space on the disk, or of a network: it is named, with the reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from . import test_blame, test_survivors
from .cases import KILLED, OF_MEMORY, Case, gone
from .forking import PATIENCE
from .resources import ADDRESSES, ImpossibleError, little_memory, small_disk, two_hosts
from .running import outcome_of, start_rank
from .table import Table

RLIMIT = gone(then="has ended with RuntimeError:")
MEMORY = [
    Case("all_reduce", "memory of its control group", gone(), KILLED, 137, OF_MEMORY),
    Case("all_reduce", "memory by RLIMIT_AS", RLIMIT, "raised RuntimeError (pid {pid})", then="can't allocate memory"),
]
NO_SPACE = r"OSError: \[Errno 28\] .* could not be written: rank 0: No space left on device"
DISK = Case("save", "no space", NO_SPACE, "raised OSError (pid {pid})", failing=0)
FAR = r"CollectiveTimeoutError: ranks? (1|2, 3) of .* did not take part in call \d+, (.|\n)*  rank \d: does not answer"
UNREACHABLE = Case("all_reduce", "unreachable", FAR, "", timeout=2.0, failing=-1)
# What the ranks of the host say that is cut off, from the store, too.
ALONE = r"CollectiveTimeoutError: a rank of .* in call \d+, .* nor does the store answer"
CUT_OFF = replace(UNREACHABLE, error=ALONE)


@contextmanager
def possible(case: Case, size: int, table: Table) -> Iterator[None]:
    """Skip the test where this machine does not allow it, and say so in the table."""
    try:
        yield
    except ImpossibleError as error:
        table.impossible(case, size, str(error))
        pytest.skip(f"not possible here: {error}")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", MEMORY, ids=[case.id for case in MEMORY])
def test_memory(case: Case, size: int, tmp_path: Path, table: Table) -> None:
    with possible(case, size, table), little_memory(600) as environment:
        for name in ("alone", "launched"):
            (tmp_path / name).mkdir()
        test_survivors.check(case, size, tmp_path / "alone", table, environment=environment)
        test_blame.check(case, size, tmp_path / "launched", table, environment=environment)


@pytest.mark.parametrize("size", [2, 4])
def test_a_full_disk(size: int, tmp_path: Path, table: Table) -> None:
    for what, check in (("alone", test_survivors.check), ("launched", test_blame.check)):
        with possible(DISK, size, table), small_disk(tmp_path / f"disk_{what}", 2000) as environment:
            (tmp_path / what).mkdir()
            check(DISK, size, tmp_path / what, table, environment=environment)


@pytest.mark.parametrize("size", [2, 4])
def test_a_host_that_cannot_be_reached(size: int, tmp_path: Path, table: Table) -> None:
    half = size // 2  # ranks from there on are on the second host, and the first of them loses the network
    with possible(UNREACHABLE, size, table), two_hosts() as hosts:
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(half), "MASTER_ADDR": ADDRESSES[0]}
        shared |= {"MASTER_PORT": "29533", "GLOO_SOCKET_IFNAME": "eth0"}  # the namespaces are new: every port is free
        ranks = []
        for rank in range(size):
            node, local_rank = divmod(rank, half)
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(node)}
            ranks.append(start_rank(tmp_path, hosts[node], half, own, UNREACHABLE.words))
        codes = [rank.wait(PATIENCE) for rank in ranks]
        said = [(tmp_path / f"output_{rank}").read_text() for rank in range(size)]
    outcome = outcome_of(tmp_path, size, codes, time.time(), said)
    here = [UNREACHABLE.is_told_by(outcome.raised.get(rank)) for rank in range(half)]
    there = [CUT_OFF.is_told_by(outcome.raised.get(rank)) for rank in range(half, size)]
    table.alone(UNREACHABLE, size, outcome, here + there)
    assert all(here + there), outcome
    assert codes == [1] * size
