"""What ranks tell each other beside the training arrives whole, whoever has which names."""

from __future__ import annotations

import math
from datetime import timedelta

from lockstep.dist import barrier, get_rank, get_world_size
from lockstep.dist.numbers_of_ranks import NumbersOfRanks
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
        lambda rank: {f"number {index}": index / 3 + rank for index in range(200)},  # more than fit into a row
        lambda rank: {f"number {index}": -index / 3 + rank for index in range(200)},
        lambda rank: {"time": 0.4},
        lambda rank: {"time": 0.5},
    ]
    for sent in rounds:
        numbers.send(sent(get_rank()))
        received = numbers.receive()
        assert received == ([sent(rank) for rank in range(world_size)] if get_rank() == 0 else None)


@ranks(2)
def test_a_value_that_is_no_number_stays_in_its_place():
    numbers = NumbersOfRanks()
    for _ in range(2):  # the first time dicts travel as they are, then numbers alone
        numbers.send({"loss": math.nan if get_rank() else 3.0, "time": 1.0})
        received = numbers.receive()
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
