"""What ranks tell each other beside the training arrives whole, whoever has which names."""

from __future__ import annotations

import math
import tempfile
from datetime import timedelta

import pytest

from lockstep.dist import barrier, get_rank, get_world_size, streams
from lockstep.dist.numbers_of_ranks import NumbersOfRanks
from lockstep.errors import CollectiveTimeoutError, PeerError
from lockstep.testing import ranks


@ranks(1, 2, 3)
def test_numbers_come_in_the_order_of_ranks_also_when_names_come_and_go():
    world_size = get_world_size()
    numbers = NumbersOfRanks()
    rounds = [
        lambda rank: {"time": 1.5 + rank, "loss": math.inf},
        lambda rank: {"time": 2.5 + rank, "loss": -0.0},
        lambda rank: {"time": 0.1} if rank else {"loss": 1e-300},  # each lacks one
        lambda rank: {"time": 0.2, "late": 7.0} if rank == world_size - 1 else {"time": 0.2},  # one has a new one
        lambda rank: {"late": float(rank), "time": 0.3},
        lambda rank: {},
        # more than the system keeps for somebody who does not read
        lambda rank: {f"number {index}": index / 3 + rank for index in range(30_000)},
        lambda rank: {"time": 0.4},
        lambda rank: {"time": 0.5},
    ]
    for sent in rounds:
        numbers.send(sent(get_rank()))
        received = numbers.receive()
        assert received == ([sent(rank) for rank in range(world_size)] if get_rank() == 0 else None)
    numbers.close()


@ranks(2)
def test_a_value_that_is_no_number_stays_in_its_place():
    numbers = NumbersOfRanks()
    numbers.send({"loss": math.nan if get_rank() else 3.0, "time": 1.0})
    received = numbers.receive()
    numbers.close()
    if get_rank() == 0:
        assert received[0] == {"loss": 3.0, "time": 1.0}
        assert math.isnan(received[1]["loss"])
        assert received[1]["time"] == 1.0


@ranks(2)
def test_nobody_waits_between_sending_and_receiving():
    numbers = NumbersOfRanks()
    for round_ in range(3):
        if get_rank() == 0:
            numbers.send({"round": float(round_)})
            barrier()
        else:
            barrier()  # rank 0 is here only when it has sent
            numbers.send({"round": float(round_)})
        received = numbers.receive(timedelta(seconds=60))
        assert received == ([{"round": float(round_)}] * 2 if get_rank() == 0 else None)
    numbers.close()


@ranks(2)
def test_a_rank_that_has_nothing_to_do_with_the_other_may_be_far_ahead():
    numbers, count = NumbersOfRanks(), 20
    received = []
    if get_rank() == 0:
        barrier()
    for round_ in range(count):
        numbers.send({"round": float(round_)})
        received.append(numbers.receive())
    if get_rank() == 1:
        barrier()  # it has sent all by now, and rank 0 has not asked for any
    else:
        assert received == [[{"round": float(round_)}] * 2 for round_ in range(count)]
    numbers.close()


@ranks(3)
def test_who_is_missing_is_named():
    numbers = NumbersOfRanks()
    numbers.send({"time": 1.0}) if get_rank() != 1 else numbers.close()
    if get_rank() == 0:
        with pytest.raises(PeerError, match=r"rank 1 of the group has ended .*\(rank 0 of 3\)") as caught:
            numbers.receive()
        assert caught.value.rank == 1
    barrier()
    numbers.close()


@ranks(2)
def test_a_stream_ends_for_processes_that_were_forked_meanwhile_too():
    numbers = NumbersOfRanks()
    if get_rank() == 1:
        with numbers._streams[0]._connection.dup():  # as a data loader's process holds it
            numbers.close()
            barrier()
    else:
        with pytest.raises(PeerError, match="it closed its stream"):
            numbers.receive(timedelta(seconds=60))
        barrier()
    numbers.close()


@ranks(2)
def test_who_is_late_is_named():
    numbers = NumbersOfRanks()
    if get_rank() == 0:
        numbers.send({"time": 1.0})
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 of the group has not sent what it was to"):
            numbers.receive(timedelta(seconds=0.05))
    barrier()
    numbers.close()


@ranks(3)
def test_where_a_rank_is_on_another_host_all_use_the_backend(monkeypatch):
    if get_rank() == 1:
        monkeypatch.setattr(streams, "_connect", lambda address, rank: None)
    numbers = NumbersOfRanks()
    assert not numbers.travels_beside
    numbers.send({"rank": float(get_rank())})
    received = numbers.receive()
    assert received == ([{"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0}] if get_rank() == 0 else None)
    numbers.close()


@ranks(2)
def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    numbers = NumbersOfRanks()
    assert numbers.travels_beside
    barrier()
    assert not any(tmp_path.iterdir())
    numbers.close()
