"""Blocks that ranks enter in order, or leave together: a failure inside is an error on every rank, nobody waits."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from lockstep.dist import (
    PeerError,
    all_gather_object,
    all_reduce,
    barrier,
    get_rank,
    init_local_group,
    local_main_process_first,
    main_process_first,
    run_on_main,
)
from lockstep.errors import DistError
from lockstep.testing import ranks

from .reference import assert_group_works


def fail_inside(block: AbstractContextManager[None], error: BaseException | None, entered: list[int]) -> None:
    with block:
        entered.append(get_rank())
        if error is not None:
            raise error


FIRST = pytest.mark.parametrize("first", [main_process_first, local_main_process_first])


@FIRST
@ranks(1, 3)
def test_rank_0_has_left_the_block_before_others_enter_it(tmp_path: Path, first) -> None:
    cache = tmp_path / "cache"
    with first():
        if get_rank() == 0:
            time.sleep(0.05)
            cache.write_text("downloaded")
        found = cache.read_text()
    assert found == "downloaded"
    assert_group_works()


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt("no space left"), SystemExit(3)])
@FIRST
@ranks(3)
def test_where_rank_0_raises_the_others_do_not_enter_and_name_it(first, error: BaseException) -> None:
    entered: list[int] = []
    with pytest.raises((type(error), PeerError)) as caught:
        fail_inside(first(), error, entered)
    assert entered == ([0] if get_rank() == 0 else [])
    if get_rank() == 0:
        assert caught.value is error
    else:
        assert (caught.value.rank, caught.value.cause) == (0, f"{type(error).__name__}: {error}")
    assert_group_works()


@FIRST
@ranks(2)
def test_an_error_of_a_later_rank_is_its_own(first) -> None:
    if get_rank() == 1:
        with pytest.raises(OSError, match="mine"), first():
            raise OSError("mine")
    else:
        with first():
            pass
    assert_group_works()


@ranks(3)
def test_the_first_rank_is_that_of_the_group_in_hand(tmp_path: Path) -> None:
    group = torch_dist.new_group([1, 2])
    if get_rank() == 0:
        with pytest.raises(ValueError, match="must contain the calling process"), main_process_first(group):
            pass
    else:
        with main_process_first(group):
            (tmp_path / str(get_rank())).touch()
            assert (tmp_path / "1").exists()


@ranks(4)
def test_every_node_has_a_first_rank_of_its_own(tmp_path: Path) -> None:
    init_local_group(2)
    first_of_node = get_rank() // 2 * 2
    with local_main_process_first():
        (tmp_path / str(get_rank())).touch()
        assert (tmp_path / str(first_of_node)).exists()


@ranks(4)
def test_a_failure_on_one_node_is_no_concern_of_another() -> None:
    init_local_group(2)
    if get_rank() < 2:
        with pytest.raises((OSError, PeerError)), local_main_process_first():
            raise OSError("only here")
    else:
        with local_main_process_first():
            pass
    assert_group_works()


def test_one_process_just_runs_the_block() -> None:
    ran = []
    for first in (main_process_first, local_main_process_first):
        with first():
            ran.append(first)
        with pytest.raises(OSError, match="mine"), first():
            raise OSError("mine")
    assert ran == [main_process_first, local_main_process_first]


@ranks(2)
def test_a_message_too_long_for_the_way_is_cut_and_any_text_survives_it() -> None:
    error = ValueError("é\udcff" * 400) if get_rank() == 0 else None
    with pytest.raises((ValueError, PeerError)) as caught:
        fail_inside(main_process_first(), error, [])
    if get_rank() == 1:
        assert caught.value.cause.startswith("ValueError: é\\udcffé")
        assert len(caught.value.cause) < 512
    assert_group_works()


@ranks(1, 2, 3)
def test_what_rank_0_returns_reaches_every_rank() -> None:
    called: list[int] = []

    def find() -> dict[str, object]:
        called.append(get_rank())
        return {"path": "epoch_3", "weights": torch.arange(20_000)}

    found = run_on_main(find)
    assert found["path"] == "epoch_3"
    assert torch.equal(found["weights"], torch.arange(20_000))
    assert called == ([0] if get_rank() == 0 else [])
    assert run_on_main(lambda: None) is None
    assert_group_works()


@pytest.mark.parametrize("error", [OSError("no such folder"), KeyboardInterrupt("no such folder"), SystemExit(3)])
@ranks(2, 3)
def test_what_rank_0_raises_for_all_reaches_every_rank(error: BaseException) -> None:
    def find() -> None:
        raise error

    with pytest.raises(type(error) if get_rank() == 0 else PeerError) as caught:
        run_on_main(find)
    if get_rank() != 0:
        assert caught.value.rank == 0
        assert type(error).__name__ in str(caught.value)
    assert_group_works()


@ranks(2)
def test_what_rank_0_can_not_pickle_for_all_is_an_error_on_every_rank() -> None:
    with pytest.raises(TypeError if get_rank() == 0 else PeerError, match="picklable"):
        run_on_main(lambda: lambda: None)
    assert_group_works()


@ranks(2)
def test_rank_0_alone_of_a_subgroup_runs_what_the_subgroup_is_to_know() -> None:
    group = torch_dist.new_group([1])
    if get_rank() == 1:
        assert run_on_main(get_rank, group) == 1
    assert_group_works()


COLLECTIVES = {
    "all_reduce": lambda: all_reduce(torch.ones(1)),
    "sync_grads": lambda: all_reduce(torch.ones(1, requires_grad=True) * 2, sync_grads=True),
    "object": lambda: all_gather_object(1),
    "barrier": barrier,
    "another block": lambda: run_on_main(get_rank),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@ranks(2)
def test_a_collective_inside_of_what_rank_0_runs_alone_raises_there_at_once(name: str) -> None:
    with pytest.raises(DistError, match="inside run_on_main, which the others wait for"):
        run_on_main(COLLECTIVES[name])
    with pytest.raises(DistError, match="inside main_process_first"), main_process_first():
        COLLECTIVES[name]()
    assert_group_works()
