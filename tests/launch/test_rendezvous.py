"""Several nodes: agents on this machine that meet at an address, and real network namespaces."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from threading import Event, Thread
from threading import enumerate as enumerate_threads

import pytest
from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from lockstep.launch import JobSpec, rendezvous
from lockstep.launch.job import LOOPBACK, interface_towards
from lockstep.launch.rendezvous import JobEndedError, NodesRendezvous
from lockstep.testing.pool import free_port

TALK = """
    import os, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    {before}
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    print(f"attempt {{attempt}} rank {{rank}} sum {{total.item()}}")
    {after}
    dist.destroy_process_group()
"""


@pytest.fixture
def rdzv():
    return f"{LOOPBACK}:{free_port()}"


@pytest.mark.parametrize("is_here", [True, False])
def test_node_0_finds_out_whether_what_answers_at_its_address_is_itself(is_here):
    """Behind NAT it listens on all addresses; another machine's may be given, where another program listens."""
    with socket.create_server((LOOPBACK, 0)) as here, socket.create_server((LOOPBACK, 0)) as there:
        with socket.create_connection(here.getsockname()):  # another node, which looks whether node 0 is there
            address = (here if is_here else there).getsockname()
            with nullcontext() if is_here else pytest.raises(OSError, match="does not arrive here"):
                rendezvous._require_reached(here, *address)
        assert here.gettimeout() is None or not is_here


@pytest.fixture
def node(rdzv):
    """Return a function that makes the rendezvous of one of two nodes."""
    made = []

    def node(rank, nnodes=2, seconds=10.0, least=None, say=lambda text: None):
        rendezvous = NodesRendezvous(JobSpec(1, nnodes, rank, rdzv, None, least, seconds), say)
        made.append(rendezvous)
        return rendezvous

    yield node
    for one in reversed(made):
        one.shutdown()


@pytest.fixture
def soon(monkeypatch):
    """Let nodes that do not come be given up soon."""
    monkeypatch.setattr(rendezvous, "_SECONDS_PER_BEAT", 0.1)
    monkeypatch.setattr(rendezvous, "_SECONDS_UNTIL_LOST", 1.0)
    monkeypatch.setattr(rendezvous, "_SECONDS_UNTIL_LOST_AT_THE_END", 1.0)
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "_SECONDS_FOR_MORE", 1.0)


def start_nodes(scripts, rdzv, script, *options, nproc=(1, 1), before=((), ())):
    jobs = []
    for rank in range(2):
        place = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv", rdzv, "--nproc", str(nproc[rank]))
        jobs.append(scripts.start(*place, *options, script, before=before[rank]))
    return jobs


def ends(jobs):
    return [(job.wait(timeout=90), job.stdout.read(), job.stderr.read()) for job in jobs]


def test_nodes_may_start_in_any_order_and_differ_in_size(scripts, rdzv):
    script = scripts.write(TALK.format(before="", after=""))
    place = ("--nnodes", "2", "--rdzv", rdzv)
    late = scripts.start(*place, "--node-rank", "1", script)
    assert "starting 1 rank on node 1 of 2" in late.stderr.readline()
    assert f"waiting for node 0 at {rdzv}" in late.stderr.readline()
    first, second = ends([scripts.start(*place, "--node-rank", "0", "--nproc", "2", script), late])
    assert (first[0], second[0]) == (0, 0)
    assert sorted(first[1].splitlines()) == [f"attempt 0 rank {rank} sum 3.0" for rank in (0, 1)]
    assert second[1] == "attempt 0 rank 2 sum 3.0\n"


def test_a_failure_on_one_node_starts_all_nodes_again(scripts, rdzv):
    # Rank 0 is not talking to the one that fails, so that only the rendezvous can tell its node.
    before = "if attempt == '0': time.sleep(60) if rank == 0 else os.kill(os.getpid(), 9)"
    script = scripts.write(TALK.format(before=before, after=""))
    first, second = ends(start_nodes(scripts, rdzv, script, "--max-restarts", "1"))
    assert (first[0], second[0]) == (0, 0)
    assert (first[1], second[1]) == ("attempt 1 rank 0 sum 1.0\n", "attempt 1 rank 1 sum 1.0\n")
    assert "a rank failed on another node: starting all ranks again" in first[2]
    assert "rank 1 was ended by SIGKILL" in second[2]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_node_that_gives_up_ends_the_others_with_its_exit_code(scripts, rdzv, culprit):
    before = f"sys.exit(3) if rank == {culprit} else time.sleep(60)"
    script = scripts.write(TALK.format(before=before, after=""))
    told = ends(start_nodes(scripts, rdzv, script))
    assert [code for code, _, _ in told] == [3, 3]
    assert f"error: node {culprit} has failed; what went wrong is written there" in told[1 - culprit][2]
    assert f"error: rank {culprit} exited with code 3" in told[culprit][2]


def test_a_node_whose_ranks_only_followed_lets_the_cause_come_first(scripts, rdzv):
    before = """
    from lockstep.errors import PeerError
    if rank == 0:
        raise PeerError("rank 1 is gone", rank=1, cause="")
    time.sleep(1)
    sys.exit(3)
    """
    script = scripts.write(TALK.format(before=before, after=""))
    first, second = ends(start_nodes(scripts, rdzv, script))
    assert (first[0], second[0]) == (3, 3)
    assert "error: node 1 failed before this one: look there first. Here:\n\nrank 0 raised PeerError" in first[2]
    assert "error: rank 1 exited with code 3" in second[2]


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(120)"])
def test_a_rank_that_others_on_another_node_wait_for_in_vain_is_named_on_both(scripts, rdzv, ends):
    script = scripts.write(f"""
        import os, signal, time, torch
        from lockstep.dist import all_reduce, get_rank, init_dist
        init_dist(timeout=5)
        all_reduce(torch.ones(1))
        if get_rank() == 1:
            {ends}
        all_reduce(torch.ones(1))
    """)
    first, second = [(job.wait(timeout=90), job.stderr.read()) for job in start_nodes(scripts, rdzv, script)]
    assert (first[0], second[0]) == (1, 1)
    waits = "rank 1 did not come to a collective: look on its node first. Here, rank 0 raised CollectiveTimeoutError ("
    assert f"error: {waits}" in first[1]
    what = "was stopped (SIGSTOP, pid" if "STOP" in ends else "was still running (pid"
    assert f"error: rank 1 {what}" in second[1]
    assert "It was here (most recent call first):" in second[1]
    assert "node 0 has failed; what went wrong is written there" in second[1]


def test_a_node_whose_launcher_is_killed_is_named(scripts, rdzv):
    joins = "from lockstep.dist import init_dist, all_reduce; init_dist()"
    after = """
    for _ in range(1000):
        time.sleep(0.1)
        all_reduce(total)
    """
    talk = TALK.replace('dist.init_process_group("gloo")', joins).replace("dist.all_reduce(total)", "all_reduce(total)")
    script = scripts.write(talk.format(before="", after=after).replace('")\n    for', '", flush=True)\n    for'))
    jobs = start_nodes(scripts, rdzv, script)
    for job in jobs:
        assert job.stdout.readline().startswith("attempt 0")
    jobs[1].kill()
    first, _ = ends(jobs)
    assert first[0] == 1
    assert re.search(
        r"error: node 1 gave no sign of life .* Look there first\. Here:\n\nrank 0 raised PeerError", first[2]
    )


def test_a_node_that_waits_at_another_programs_port_ends_with_its_own_code(scripts, rdzv):
    """Its thread that connects would abort the process, if it came back when Python has ended."""
    host, _, port = rdzv.rpartition(":")
    with socket.create_server((host, int(port))) as server:

        def answer() -> None:
            with suppress(OSError):  # closed
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(100)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = Thread(target=answer)
        thread.start()
        place = ("--nnodes", "2", "--node-rank", "1", "--rdzv", rdzv, "--rdzv-timeout", "3")
        jobs = [scripts.start(*place, scripts.write("")) for _ in range(2)]
        told = ends(jobs)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for code, _, errors in told:
        assert code == 1, errors
        assert "something listens there, but does not answer as a job does" in errors
        assert "terminate called" not in errors


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_node_that_is_stopped_ends_the_others_with_its_exit_code(scripts, rdzv, stopped):
    script = scripts.write(TALK.format(before="", after="time.sleep(60)"))
    jobs = start_nodes(scripts, rdzv, script)
    for job in jobs:
        assert job.stdout.readline().startswith("attempt 0")
    jobs[stopped].send_signal(signal.SIGINT)
    assert [code for code, _, _ in ends(jobs)] == [130, 130]


@pytest.mark.parametrize("loading", [True, False])
def test_interrupting_a_node_that_waits_ends_it(scripts, rdzv, loading):
    script = scripts.write("")
    job = scripts.start("--nnodes", "2", "--rdzv", rdzv, script)
    assert "starting 1 rank on node 0 of 2" in job.stderr.readline()
    if loading:
        time.sleep(0.3)  # in the midst of torch's import, which would lose the interruption or abort
    else:
        assert "waiting for node 1" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=60) == 130
    assert "terminate called" not in job.stderr.read()


def test_node_0_tells_of_a_name_that_others_do_not_reach(node, monkeypatch):
    monkeypatch.setattr(rendezvous, "loopback_of", lambda host: "127.0.1.1")
    said = []
    with pytest.raises(RendezvousTimeoutError):
        node(0, seconds=0.1, say=said.append).next_rendezvous()
    assert "127.0.1.1 on this machine" in said[0]
    assert "which no other machine reaches. Give --rdzv" in said[0]


def test_missing_nodes_are_named(node):
    with pytest.raises(RendezvousTimeoutError, match=r"nodes 1, 2 did not come within 0 s; start it"):
        node(0, nnodes=3, seconds=0.3).next_rendezvous()


def test_a_node_that_waits_names_the_others_that_are_missing(node, soon):
    said = []
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(node(0, nnodes=4, seconds=2.0).next_rendezvous)
        with pytest.raises(RendezvousTimeoutError, match=r"nodes 2, 3 did not come within 1 s"):
            node(1, nnodes=4, seconds=1.0, say=said.append).next_rendezvous()
        assert said[0].startswith("waiting for nodes 2, 3 (")
        with pytest.raises(RendezvousTimeoutError):
            first.result()


def test_a_node_that_waits_does_not_ask_for_each_of_the_others(node, monkeypatch):
    first, second = node(0, nnodes=100), node(1, nnodes=100, seconds=60.0)
    first._store = first._open(time.monotonic() + 10.0)
    second._store = second._open(time.monotonic() + 10.0)
    keys, looks = [], itertools.count()
    check = Store.check

    def counting(store, asked):
        keys.append(asked)
        return check(store, asked)

    def look(seconds):
        if next(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "check", counting)
    monkeypatch.setattr(rendezvous.time, "sleep", look)
    with pytest.raises(KeyboardInterrupt):
        second.next_rendezvous()
    assert 5 <= len(keys) < 30  # it has looked 5 times


def test_a_missing_first_node_is_named(node, rdzv):
    with pytest.raises(RendezvousTimeoutError, match=f"node 0 at {rdzv} did not come"):
        node(1, seconds=0.3).next_rendezvous()


def test_nodes_that_disagree_on_their_number_are_told(node):
    with pytest.raises(RendezvousTimeoutError):
        node(0, nnodes=2, seconds=0.1).next_rendezvous()
    with pytest.raises(
        RendezvousError, match="`--nnodes` must be the same on all nodes, but is 3 here and 2 elsewhere"
    ):
        node(1, nnodes=3).next_rendezvous()


def test_the_node_that_waits_for_others_learns_of_another_number(node):
    first = node(0, nnodes=2, seconds=300.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.next_rendezvous)
        with pytest.raises(RendezvousError, match="is 3 here and 2 elsewhere"):
            node(1, nnodes=3).next_rendezvous()
        with pytest.raises(RendezvousError, match="must be the same on all nodes, but is 2 here and 3 on node 1"):
            waiting.result(60)


@pytest.mark.usefixtures("soon")
def test_two_nodes_of_one_rank_are_told(node):
    with pytest.raises(RendezvousTimeoutError):
        node(0, nnodes=3, seconds=0.1).next_rendezvous()
    first = node(1, nnodes=3, seconds=0.1)
    with pytest.raises(RendezvousTimeoutError):
        first.next_rendezvous()
    with pytest.raises(RendezvousError, match=r"must be different on each node, but is 1 on two of them$"):
        node(1, nnodes=3).next_rendezvous()
    first.shutdown()


@pytest.mark.usefixtures("soon")
def test_a_node_that_is_lost_while_it_waits_may_be_started_again(node):
    first, second, third = (node(rank, nnodes=3) for rank in range(3))
    with ThreadPoolExecutor(3) as thread:
        waiting = [thread.submit(first.next_rendezvous)]
        lost = node(1, nnodes=3, seconds=0.5)
        with pytest.raises(RendezvousTimeoutError):
            lost.next_rendezvous()
        lost.shutdown()
        time.sleep(1.5)  # so that node 0 knows of it
        waiting += [thread.submit(one.next_rendezvous) for one in (second, third)]
        assert places([one.result(timeout=10) for one in waiting]) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_connections_leave_no_files_open(node):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    first, second = node(0), node(1)
    places(meet(first, second))
    stores = [second._connect()]
    before = count()
    stores += [second._connect() for _ in range(4)]
    assert count() < before + 40


def test_a_taken_port_is_told(node, rdzv):
    taken = socket.create_server((LOOPBACK, int(rdzv.rpartition(":")[2])))
    with taken, pytest.raises(RendezvousConnectionError, match=f"listen at {rdzv}: Address already in use. Another"):
        node(0).next_rendezvous()
    said = []
    # It answers nothing, and torch alone would wait for ever.
    taken = socket.create_server((LOOPBACK, int(rdzv.rpartition(":")[2])))
    says = f"node 0 at {rdzv} .something listens there, .* did not come"
    with taken, pytest.raises(RendezvousTimeoutError, match=says):
        node(1, seconds=6.0, say=said.append).next_rendezvous()
    assert said
    assert "another program?" in said[0]


def meet(*nodes):
    """Let nodes meet, each in a thread of its own."""
    with ThreadPoolExecutor(len(nodes)) as threads:
        return list(threads.map(lambda node: node.next_rendezvous(), nodes))


def test_each_attempt_has_a_store_of_its_own_for_the_ranks(node):
    nodes = node(0), node(1)
    ports = set()
    for attempt in range(3):
        infos = meet(*nodes)
        assert [info.rank for info in infos] == [0, 1]
        assert [one.attempt for one in nodes] == [attempt] * 2
        (address,) = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
        ports.add(address[1])
    assert len(ports) == 3


def test_a_node_that_begins_another_attempt_is_noticed(node):
    first, second = node(0), node(1)
    meet(first, second)
    assert (first.num_nodes_waiting(), second.num_nodes_waiting()) == (0, 0)
    with ThreadPoolExecutor(1) as thread:
        restarted = thread.submit(second.next_rendezvous)
        while not first.num_nodes_waiting():
            time.sleep(0.01)
        first.next_rendezvous()
        assert restarted.result().rank == 1


def test_a_node_that_has_finished_cannot_start_again(node):
    first, second = node(0), node(1)
    meet(first, second)
    second.await_others()  # it does not own the store, so that it may go
    with pytest.raises(RendezvousClosedError, match="node 1 has finished already"):
        first.next_rendezvous()


def test_the_first_node_waits_for_the_others(node):
    first, second = node(0), node(1)
    meet(first, second)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.await_others)
        time.sleep(0.3)
        assert not waiting.done()
        second.await_others()
        waiting.result(timeout=5)


def test_the_first_to_give_up_is_remembered(node):
    first, second = node(0), node(1)
    meet(first, second)
    assert second.give_up(3) == (1, 3)
    assert first.give_up(4) == (1, 3)
    assert first.num_nodes_waiting() == 1
    first.await_others()  # in vain
    with pytest.raises(RendezvousClosedError, match="node 1 has failed"):
        first.next_rendezvous()


def test_the_loss_of_the_first_node_is_told(node):
    first, second = node(0), node(1)
    meet(first, second)
    first.shutdown()
    assert second.num_nodes_waiting() == 1
    with pytest.raises(RendezvousClosedError, match=r"node 0 at .* is gone"):
        second.next_rendezvous()
    assert second.give_up(3) == (0, 3)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("least", [None, 1])
def test_the_first_node_does_not_wait_for_one_that_is_lost_at_the_end(node, least):
    said = []
    first, second = node(0, least=least, say=said.append), node(1, least=least)
    meet(first, second)
    waits = Thread(target=first.await_others, daemon=True)
    waits.start()
    waits.join(2)
    assert waits.is_alive()  # it waits for a node that works for longer
    assert said[0].startswith("waiting for node 1 to end (")
    second.shutdown()  # as if it were lost
    waits.join(30)
    assert not waits.is_alive()
    assert said[-1:] == ["this node ends without node 1, lost since the last collective"]


def places(infos):
    return [(info.rank, info.world_size) for info in infos]


@pytest.mark.usefixtures("soon")
def test_nodes_are_left_out_and_taken_in_again(node):
    first, second, third = (node(rank, nnodes=3, least=1) for rank in range(3))
    assert places(meet(first, third)) == [(0, 2), (1, 2)]  # the second is late
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(second.next_rendezvous)
        time.sleep(0.5)
        assert (first.num_nodes_waiting(), late.done()) == (0, False)  # it does not restart the others
        assert places(meet(first, third)) == [(0, 3), (2, 3)]
        assert places([late.result(timeout=5)]) == [(1, 3)]
    assert second.attempt == 1
    third.shutdown()  # as if it were lost
    assert places(meet(first, second)) == [(0, 2), (1, 2)]
    again = node(2, nnodes=3, least=1)
    with ThreadPoolExecutor(1) as thread:
        returned = thread.submit(again.next_rendezvous)
        time.sleep(1.0)
        assert places(meet(first, second)) == [(0, 3), (1, 3)]
        assert places([returned.result(timeout=5)]) == [(2, 3)]


@pytest.mark.usefixtures("soon")
def test_too_few_nodes_are_named(node):
    with pytest.raises(RendezvousTimeoutError, match="nodes 1, 2 did not come"):
        node(0, nnodes=3, seconds=2.0, least=2).next_rendezvous()


class Clock:
    """What `rendezvous` uses of `time`, by a clock that may be ahead."""

    ahead = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_more_nodes_are_awaited_for_a_while_after_enough_have_come(node, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    first, second, third = (node(rank, nnodes=3, seconds=300.0, least=2) for rank in range(3))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(first.next_rendezvous)]
        time.sleep(0.5)
        clock.ahead = 60.0  # longer than more nodes are awaited
        waiting.append(threads.submit(second.next_rendezvous))
        time.sleep(1.0)
        assert not waiting[0].done()
        assert places([third.next_rendezvous(), *(one.result(60) for one in waiting)]) == [(2, 3), (0, 3), (1, 3)]


def test_enough_nodes_start_where_the_time_is_over_before_more_were_awaited(node):
    nodes = [node(rank, nnodes=3, seconds=seconds, least=2) for rank, seconds in enumerate((5.0, 60.0))]
    assert places(meet(*nodes)) == [(0, 2), (1, 2)]


@pytest.mark.usefixtures("soon")
def test_a_node_that_came_early_stays_while_more_are_awaited(node):
    first, second = node(0, nnodes=3, least=2), node(1, nnodes=3, seconds=2.0, least=2)
    with ThreadPoolExecutor(1) as thread:
        early = thread.submit(second.next_rendezvous)
        time.sleep(1.5)
        assert places([first.next_rendezvous(), early.result(10)]) == [(0, 2), (1, 2)]


@pytest.mark.usefixtures("soon")
def test_two_living_nodes_of_one_rank_are_told_also_where_nodes_may_come_back(node):
    first, second = node(0, least=1), node(1, least=1)
    meet(first, second)
    with pytest.raises(RendezvousError, match="`--node-rank` must be different on each node, but is 1 on two"):
        node(1, least=1).next_rendezvous()


@pytest.mark.usefixtures("soon")
def test_a_node_that_waits_learns_of_the_end(node):
    first, second = node(0, least=1), node(1, least=1)
    first.next_rendezvous()
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(second.next_rendezvous)
        time.sleep(0.5)
        first.await_others()
        with pytest.raises(JobEndedError, match="the job has ended without this node"):
            late.result(timeout=5)


def test_the_interface_towards_loopback_is_known():
    assert interface_towards(LOOPBACK) in ("lo", "lo0")
    assert interface_towards("no.such.host.invalid") is None


@pytest.fixture
def namespaces():
    """Return the words that run a command on one of two hosts, which are namespaces joined by a cable."""
    if sys.platform != "linux" or os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("network namespaces need root on Linux")
    names = [f"lockstep-{os.getpid()}-{node}" for node in range(2)]
    cables = [f"ls{os.getpid()}{end}"[:15] for end in "ab"]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for node, (name, cable) in enumerate(zip(names, cables, strict=True)):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.213.77.{node + 1}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_train_together_and_listen_on_their_own_address_alone(scripts, namespaces):
    script = scripts.write(TALK.format(before="", after="time.sleep(60)"))
    jobs = start_nodes(scripts, "10.213.77.1:29533", script, nproc=(2, 2), before=namespaces)
    for rank, job in enumerate(jobs):
        lines = {job.stdout.readline() for _ in range(2)}
        assert lines == {f"attempt 0 rank {2 * rank + local} sum 6.0\n" for local in range(2)}
    for node, words in enumerate(namespaces):
        shown = subprocess.run([*words, "ss", "-Hltn"], check=True, capture_output=True, text=True).stdout
        addresses = {line.split()[3].rpartition(":")[0] for line in shown.splitlines()}
        assert addresses == {f"10.213.77.{node + 1}"}


def test_a_launcher_does_not_end_within_a_heartbeat(monkeypatch):
    """Its request to the store would come back to an interpreter that is shutting down, which aborts the process."""
    begun = Event()

    class SlowStore(HashStore):
        def set(self, key: str, value: str) -> None:
            if value != "token 0":
                begun.set()
                time.sleep(0.3)

    monkeypatch.setattr(rendezvous, "_SECONDS_PER_BEAT", 0.2)
    heartbeats = rendezvous._Heartbeats(HashStore())
    heartbeats.begin(1, "token", SlowStore)
    assert begun.wait(60)
    heartbeats.end()
    assert "lockstep-heartbeat" not in {thread.name for thread in enumerate_threads()}
