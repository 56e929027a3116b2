"""Questions and answers of ranks at the store, and what they cost it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from lockstep.watch.board import Board


class Counted:
    """A store that counts its requests."""

    def __init__(self, store: Any, after: Callable[[str], None] = lambda name: None) -> None:
        self.store, self.after, self.requests = store, after, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            self.requests[name] += 1
            result = function(*arguments)
            self.after(name)
            return result

        return call

    def taken(self) -> int:
        number = self.requests.total()
        self.requests.clear()
        return number


@pytest.mark.parametrize("size", [2, 32, 1000])
def test_requests_do_not_grow_with_the_number_of_ranks(size: int) -> None:
    met = HashStore()
    stores = [Counted(met) for _ in range(size)]
    boards = [Board(store, rank, size, lambda rank=rank: {"rank": rank}) for rank, store in enumerate(stores)]
    for board in boards:
        board.answer()  # as at their first look
    assert [store.taken() for store in stores] == [4] * size
    for board in boards:
        board.answer()
    assert [store.taken() for store in stores] == [1] * size  # nobody has asked

    def answer(name: str) -> None:
        if name == "multi_set":
            for board in boards[:-1]:
                board.answer()

    stores[-1].after = answer
    assert boards[-1].ask(range(size)) == {rank: {"rank": rank} for rank in range(size)}
    # Who has begun, and where; a number, the question, a look of its own, who has answered, and what.
    assert stores[-1].taken() == 7
    assert [store.taken() for store in stores[:-1]] == [3] * (size - 1)
    stores[-1].after = lambda name: None
    for board in boards[1:]:
        board.end({"rank": board.rank, "ended": True})
    assert boards[0].missing() == []
    assert boards[0].last_states(range(1, size)) == {rank: {"rank": rank, "ended": True} for rank in range(1, size)}
    assert stores[0].taken() <= 5
    assert [store.taken() for store in stores[1:]] == [1] * (size - 1)


def test_a_rank_without_a_board_is_found_by_few_requests() -> None:
    met = HashStore()
    absent = {37, 612}
    boards = {rank: Board(met, rank, 1000, dict) for rank in range(1000) if rank not in absent}
    boards[0].store = store = Counted(met)
    assert set(range(1000)) - {0, *boards[0].missing()} == set()  # no rank has ended
    assert store.taken() <= 50
    assert boards[0].gone([37]) == []
    assert store.taken() <= 2


def test_a_question_that_another_one_overwrites_is_answered() -> None:
    store = HashStore()
    boards = [Board(store, rank, 3, lambda rank=rank: {"rank": rank}) for rank in range(3)]
    boards[2].answer()
    first, second = store.add("asks", 1), store.add("asks", 1)
    store.set("asked/2", str(second))
    store.set("asked/2", str(first))
    boards[2].answer()
    assert boards[2].answered == second


def test_a_rank_on_another_machine_of_the_same_name_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    for boot, number in (("the other machine's", 1), ("this one's", 2)):
        with monkeypatch.context() as there:
            there.setattr("lockstep.topology.pid_namespace.machine", lambda boot=boot: boot)
            there.setattr(os, "getpid", lambda: 4194303)  # no process here has it
            Board(store, number, 3, dict)
    monkeypatch.setattr("lockstep.topology.pid_namespace.machine", lambda: "this one's")
    assert Board(store, 0, 3, dict).gone([1, 2]) == [2]


def test_a_process_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    met = HashStore()
    boards = [Board(met, rank, 2, dict) for rank in range(2)]
    assert boards[0].ask([]) == {}
    boards[0].missing()  # reads where rank 1 runs, here
    monkeypatch.setattr("lockstep.watch.board.stat_of", lambda pid: [])  # as without a free file descriptor
    assert boards[0].process(1) == ""
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert boards[0].process(1) == "gone"
