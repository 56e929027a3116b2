"""Where ranks first meet: jobs on one machine keep out of each other's way, and what can't be met is said."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lockstep.dist import all_gather_object, destroy_dist, init_dist, is_distributed, rendezvous
from lockstep.errors import CollectiveTimeoutError, TopologyError
from lockstep.testing import ranks
from lockstep.testing.pool import run_body

from .reference import assert_group_works


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port where something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


other_free_port = free_port


def meet(launcher: str, port: int | None = None) -> list[str]:
    """Join; return what every rank of the job was to the test."""
    init_dist(launcher, port=port)
    assert_group_works()
    return all_gather_object(os.environ["SEAT"])


def become_rank(rank: int, size: int, **others: str) -> None:
    """Forget what the test has set, but for where this process sits; then set numbers as by hand."""
    os.environ["SEAT"] = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), **others}


def become_rank_of_mpi(rank: int, size: int, job: str) -> None:
    """Look as the ranks of mpirun do, to whom nobody gives a port."""
    become_rank(rank, size)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name, number in (("RANK", rank), ("SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", size)):
        os.environ[f"OMPI_COMM_WORLD_{name}"] = str(number)
    os.environ |= {"OMPI_MCA_orte_hnp_uri": job}


def seat() -> int:
    return int(os.environ["RANK"])


@ranks(4, fresh=True)
def test_two_jobs_with_numbers_set_by_hand_run_at_once(free_port: int, other_free_port: int) -> None:
    job, rank = divmod(seat(), 2)
    become_rank(rank, 2, MASTER_PORT=str((free_port, other_free_port)[job]))
    assert meet("pytorch") == [["0", "1"], ["2", "3"]][job]


@ranks(4, fresh=True)
def test_two_jobs_without_a_port_find_their_own_ranks() -> None:
    job, rank = divmod(seat(), 2)
    become_rank_of_mpi(rank, 2, "ab"[job])
    for _ in range(2):
        assert meet("mpi") == [["0", "1"], ["2", "3"]][job]
        destroy_dist()


@ranks(2, fresh=True)
def test_ranks_that_are_given_a_port_need_nothing_else_in_common(free_port: int) -> None:
    become_rank_of_mpi(seat(), 2, "ab"[seat()])  # as launchers of two machines may call one job
    assert meet("mpi", free_port) == ["0", "1"]


@ranks(4, fresh=True)
def test_a_job_that_finds_another_one_at_its_port_ends_and_leaves_that_one_alone(
    free_port: int, tmp_path: Path
) -> None:
    job, rank = divmod(seat(), 2)
    become_rank_of_mpi(rank, 2, "ab"[job])
    rendezvous._port_of_job = lambda topology: free_port  # as if the ports of two jobs were the same by chance
    if job == 0:
        assert meet("mpi") == ["0", "1"]
        (tmp_path / f"first {rank}").touch()
    while len(list(tmp_path.glob("first*"))) < 2:
        time.sleep(0.01)
    if job == 1:
        with pytest.raises(CollectiveTimeoutError if rank else TopologyError, match=r"serves no store|must be free"):
            init_dist("mpi", timeout=0.5)
        (tmp_path / f"second {rank}").touch()
    while len(list(tmp_path.glob("second*"))) < 2:
        time.sleep(0.01)
    if job == 0:
        assert_group_works()


@ranks(1, fresh=True)
def test_a_port_in_use_is_refused_by_name(busy_port: int, free_port: int) -> None:
    os.environ["MASTER_PORT"] = str(busy_port)
    before = dict(os.environ)
    with pytest.raises(TopologyError, match=f"MASTER_PORT must be free on rank 0, but 127.0.0.1:{busy_port} can't be"):
        init_dist("pytorch")
    assert not is_distributed()
    assert dict(os.environ) == before
    init_dist("pytorch", port=free_port)
    assert_group_works()


@ranks(2, fresh=True)
def test_the_argument_beats_master_port(busy_port: int, free_port: int) -> None:
    become_rank(seat(), 2, MASTER_PORT=str(busy_port))
    assert meet("pytorch", free_port) == ["0", "1"]


@ranks(2, fresh=True)
def test_without_port_and_job_nobody_can_be_found() -> None:
    become_rank(rank := seat(), 2)
    message = rf"MASTER_PORT must be set, since the launcher 'pytorch' gives .* \(rank {rank} of 2\)"
    with pytest.raises(TopologyError, match=message):
        init_dist("pytorch")


@ranks(1, fresh=True)
def test_on_several_nodes_the_address_of_rank_0_must_be_known() -> None:
    become_rank_of_mpi(0, 2, "nodes")
    os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1"
    with pytest.raises(TopologyError, match=r"MASTER_ADDR must name the host of rank 0, .* \(rank 0 of 2\)"):
        init_dist("mpi")


@ranks(1, fresh=True)
def test_a_rank_that_does_not_come_to_the_meeting_is_a_timeout_error(free_port: int) -> None:
    become_rank(0, 2, MASTER_PORT=str(free_port))
    before = dict(os.environ)
    message = r"`init_dist` must meet all 2 ranks within 0.5 s, but rank 1 did not come \(rank 0 of 2\)"
    with pytest.raises(CollectiveTimeoutError, match=message):
        init_dist("pytorch", timeout=0.5)
    assert not is_distributed()
    assert dict(os.environ) == before


@ranks(1, fresh=True)
def test_a_rank_0_that_does_not_serve_is_a_timeout_error(free_port: int) -> None:
    become_rank(1, 2, MASTER_PORT=str(free_port))
    with pytest.raises(
        CollectiveTimeoutError, match=r"must meet all 2 ranks .* rank 0 serves no store at 127.0.* \(rank 1 of 2\)"
    ):
        init_dist("pytorch", timeout=0.5)


@ranks(3, fresh=True)
def test_who_has_not_started_is_said_while_the_others_wait(free_port: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, logged("lockstep.dist") as messages:
        patch.setattr(rendezvous, "_SECONDS_TO_SAY", 0.2)
        patch.setattr(rendezvous, "_LONGEST_PAUSE", 0.1)
        become_rank(seat(), 3, MASTER_PORT=str(free_port))
        if seat() == 2:  # comes when the others have said that they wait
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
        else:
            threading.Thread(target=touch_at_message, args=(tmp_path / str(seat()), messages), daemon=True).start()
        init_dist("pytorch")
        if seat() == 0:
            assert any(text.endswith("s for rank 2 to start (rank 0 of 3)") for text in messages)
        destroy_dist()


@ranks(1, fresh=True)
def test_a_rank_without_rank_0_says_for_what_it_waits(free_port: int) -> None:
    with pytest.MonkeyPatch.context() as patch, logged("lockstep.dist") as messages:
        patch.setattr(rendezvous, "_SECONDS_TO_SAY", 0.1)
        become_rank(1, 2, MASTER_PORT=str(free_port))
        with pytest.raises(CollectiveTimeoutError):
            init_dist("pytorch", timeout=0.5)
    assert set(messages) == {f"waiting 0 s for rank 0 at 127.0.0.1:{free_port} to start (rank 1 of 2)"}
    assert len(messages) <= 3  # after 0.1, 0.2 and 0.4 s at the latest


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Collect the messages of a logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


def touch_at_message(path: Path, messages: list[str]) -> None:
    while not messages:
        time.sleep(0.01)
    path.touch()


def join_the_agents_store(port: int, attempt: int) -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    become_rank(seat(), 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **agent)
    for _ in range(2):
        assert meet("pytorch") == ["0", "1"]
        destroy_dist()


def test_every_attempt_and_every_group_meets_anew_in_the_store_that_a_launcher_serves() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    for attempt in range(2):
        run_body(join_the_agents_store, (port, attempt), {}, size=2, fresh=True)
    assert store.num_keys() > 0
