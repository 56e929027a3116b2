"""Steps that all ranks take together leave none waiting, and hold no more than they say."""

from __future__ import annotations

import time
import weakref
from functools import partial

import pytest
from torch import Tensor

from lockstep.checkpoint.together import read_once, run_then_complete
from lockstep.dist import all_gather_object, get_rank
from lockstep.testing import ranks


def fail(number: int) -> None:
    raise OSError(number, f"error {number}")


@ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_what_cannot_be_undone_leaves_no_rank_waiting(failing: int) -> None:
    step = partial(fail, 28) if get_rank() == failing else partial(int)
    with pytest.raises(OSError, match=rf"saving: rank {failing}: error 28") as caught:
        run_then_complete("saving", step, list, undo=partial(fail, 5))
    if get_rank() == 0:
        assert getattr(caught.value.__cause__, "errno", None) == (28 if failing == 0 else 5)
    assert all_gather_object(get_rank()) == [0, 1]


@ranks(1, 2)
def test_a_bucket_is_let_go_before_there_is_memory_for_the_next() -> None:
    placed: dict[int, weakref.ref[Tensor]] = {}
    contents: dict[int, list[int]] = {}

    def held() -> list[int]:
        return [number for number, bucket in placed.items() if bucket() is not None]

    def read(number: int, data: Tensor) -> None:
        for _ in range(500):  # a thread of gloo's lets go of it a moment later
            if held():
                time.sleep(0.01)
        assert not held()
        data.fill_(number)

    def place(number: int, data: Tensor) -> None:
        placed[number] = weakref.ref(data)
        contents[number] = data.tolist()

    sizes = [3, 1, 2, 4, 1]
    read_once(sizes, read, place)
    assert contents == {number: [number] * size for number, size in enumerate(sizes)}
