"""Where ranks first meet: jobs on one machine keep out of each other's way, and what can't be met is said."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lockstep.dist import all_gather_object, destroy_dist, init_dist, is_distributed, rendezvous
from lockstep.errors import CollectiveTimeoutError, PeerError, TopologyError
from lockstep.testing import ranks
from lockstep.testing.pool import free_port, run_body

from .reference import assert_group_works


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port where something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    """A port where nobody listens."""
    return free_port()


other_free_port = pytest.fixture(name="other_free_port")(free_port)


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
    says = f"MASTER_PORT must be free on rank 0, but 127.0.0.1:{busy_port} can't be .* say launcher='none'"
    with pytest.raises(TopologyError, match=says):
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
    # On several nodes neither: the ranks of another job would come to the same place.
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(TopologyError, match=message):
        init_dist("pytorch")


def test_a_search_for_rank_0_goes_on_at_short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a sidecar of a service mesh takes each connection, and closes it while rank 0 is not there."""
    now, attempts = 0.0, 0

    def connect(search: rendezvous._Search) -> None:
        nonlocal attempts
        attempts += 1

    monkeypatch.setattr(rendezvous._Search, "_may_be_store", lambda _: True)
    monkeypatch.setattr(rendezvous._Search, "_connect", connect)
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now)
    search = rendezvous._Search("127.0.0.1", 1, 2)
    for _ in range(600):
        now += 0.5
        assert search.find("group") is None
    assert 300 / 6 < attempts < 300


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
            expected = f"s for rank 2 to start (rank 0 of 3, at 127.0.0.1:{free_port})"
            assert any(text.endswith(expected) for text in messages)
        destroy_dist()


@ranks(1, fresh=True)
def test_a_rank_without_rank_0_says_for_what_it_waits(free_port: int) -> None:
    with pytest.MonkeyPatch.context() as patch, logged("lockstep.dist") as messages:
        patch.setattr(rendezvous, "_SECONDS_TO_SAY", 0.1)
        become_rank(1, 2, MASTER_PORT=str(free_port))
        with pytest.raises(CollectiveTimeoutError):
            init_dist("pytorch", timeout=0.5)
    expected = f"waiting 0 s for rank 0 at 127.0.0.1:{free_port} to start, where nobody listens (rank 1 of 2)"
    assert set(messages) == {expected}
    assert len(messages) <= 3  # after 0.1, 0.2 and 0.4 s at the latest


ANSWERS: dict[str, Callable[[socket.socket], object]] = {
    "a word at once": lambda client: client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 20),
    "an answer": lambda client: client.recv(1) and client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "nothing": lambda client: client.recv(1 << 20) and client.recv(1 << 20),
    "the end": lambda client: client.close(),
}


@pytest.mark.parametrize("answer", ANSWERS)
@ranks(1, fresh=True)
def test_another_program_at_the_port_is_said_within_the_timeout(answer: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.MonkeyPatch.context() as patch,
        logged("lockstep.dist") as messages,
    ):
        threading.Thread(target=serve, args=(server, ANSWERS[answer]), daemon=True).start()
        patch.setattr(rendezvous, "_SECONDS_TO_SAY", 0.1)
        become_rank(1, 2, MASTER_PORT=str(port := server.getsockname()[1]))
        other = f"127.0.0.1:{port}.*, where another program listens, or another job. Set MASTER_PORT to a free port"
        with pytest.raises(CollectiveTimeoutError, match=f"rank 0 serves no store at {other}"):
            init_dist("pytorch", timeout=4)
    assert re.search(f"waiting .* for rank 0 at {other}", messages[-1])


def serve(server: socket.socket, answer: Callable[[socket.socket], object]) -> None:
    clients = []
    with suppress(OSError):
        while True:
            clients.append(server.accept()[0])
            threading.Thread(target=answer, args=(clients[-1],), daemon=True).start()


@pytest.mark.parametrize(("rank", "host"), [(0, "no-such-host.invalid"), (1, "no-such-host.invalid"), (1, "a..b")])
@ranks(1, fresh=True)
def test_a_name_that_this_host_does_not_know_is_an_error_at_once(free_port: int, rank: int, host: str) -> None:
    become_rank(rank, 2, LOCAL_WORLD_SIZE="1", MASTER_ADDR=host, MASTER_PORT=str(free_port))
    message = f"MASTER_ADDR must .* but is '{host}', which this host, {socket.gethostname()}, does not know: "
    with pytest.raises(TopologyError, match=message):
        init_dist("pytorch")


@ranks(1, fresh=True)
def test_an_address_that_is_not_used_is_said_while_a_rank_waits(free_port: int) -> None:
    address = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": str(free_port)}
    with pytest.MonkeyPatch.context() as patch, logged("lockstep.dist") as messages:
        patch.setattr(rendezvous, "_SECONDS_TO_SAY", 0.1)
        become_rank(0, 2, **address)
        with pytest.raises(CollectiveTimeoutError):
            init_dist("pytorch", timeout=0.5)
    where = f"at 127.0.0.1:{free_port}, since all ranks are said to be on this machine, not at no-such-host.invalid"
    assert messages[0] == f"waiting 0 s for rank 1 to start (rank 0 of 2, {where})"


@ranks(1, fresh=True)
def test_rank_0_on_another_host_than_its_address_is_an_error(free_port: int) -> None:
    address = "127.0.0.2" if sys.platform == "darwin" else "0.0.0.1"  # nobody has it
    become_rank(0, 2, LOCAL_WORLD_SIZE="1", MASTER_ADDR=address, MASTER_PORT=str(free_port))
    with pytest.raises(
        TopologyError, match=rf"MASTER_ADDR must .* it does not reach itself at {address}:{free_port}: "
    ):
        init_dist("pytorch")


@ranks(3, fresh=True)
def test_two_processes_of_one_rank_are_counted_once(free_port: int) -> None:
    become_rank(min(seat(), 1), 3, MASTER_PORT=str(free_port))
    is_rank_0 = os.environ["RANK"] == "0"
    # Rank 0, which serves the store, gives up first.
    expected, timeout = (CollectiveTimeoutError, 2) if is_rank_0 else (PeerError, 60)
    with pytest.raises(expected, match=r"rank 2 did not come|rank 0, which serves .* has ended \(rank 1 of 3\)"):
        init_dist("pytorch", timeout=timeout)


@ranks(3, fresh=True)
def test_a_process_of_a_rank_that_goes_on_already_is_an_error(free_port: int, tmp_path: Path) -> None:
    if seat() < 2:
        become_rank(seat(), 2, MASTER_PORT=str(free_port))
        assert meet("pytorch") == ["0", "1"]
        (tmp_path / os.environ["SEAT"]).touch()
    while len(list(tmp_path.glob("[01]"))) < 2:
        time.sleep(0.01)
    if "SEAT" not in os.environ:
        become_rank(1, 2, MASTER_PORT=str(free_port))
        with pytest.raises(TopologyError, match="another one has come as rank 1 of 2 already"):
            init_dist("pytorch", timeout=5)
        (tmp_path / "2").touch()
    while not (tmp_path / "2").exists():
        time.sleep(0.01)


@ranks(2, fresh=True)
def test_ranks_of_other_world_sizes_are_told(free_port: int) -> None:
    become_rank(seat(), 2 + seat(), MASTER_PORT=str(free_port))
    # Rank 0 serves the store: if it comes last, and ends first, rank 1 may learn only that.
    message = r"WORLD_SIZE must be the same on all ranks, but is [23] on rank [01], and [23] on|rank 0, .* has ended"
    with pytest.raises((TopologyError, PeerError), match=message):
        init_dist("pytorch", timeout=30)


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
