"""Who am I, how many are we, and what only the first rank does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import FileStore
from torch.utils.data import DataLoader, IterableDataset

from lockstep import groups
from lockstep.dist import (
    all_gather_object,
    all_reduce,
    barrier,
    get_backend,
    get_default_group,
    get_dist_info,
    get_local_group,
    get_local_rank,
    get_local_size,
    get_node_rank,
    get_num_nodes,
    get_rank,
    get_world_size,
    init_dist,
    init_local_group,
    is_distributed,
    is_main_process,
    local_main_process_first,
    main_process_first,
    master_only,
    run_on_main,
)
from lockstep.errors import DistError
from lockstep.testing import ranks

from .reference import assert_group_works
from .strategies import SIZES, run_on


def test_without_a_group_this_process_is_all_there_is() -> None:
    assert not is_distributed()
    assert get_dist_info() == (get_rank(), get_world_size()) == (0, 1)
    assert (get_local_rank(), get_local_size(), get_node_rank(), get_num_nodes()) == (0, 1, 0, 1)
    assert (get_backend(), get_default_group(), get_local_group()) == (None, None, None)
    assert is_main_process()
    init_local_group(1)
    init_local_group(0, 1)
    assert get_local_group() is None


@ranks(1, 2, 4)
def test_on_one_node_local_ranks_are_ranks() -> None:
    rank, size = get_dist_info()
    assert is_distributed()
    assert (rank, size) == (get_rank(), get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert (get_local_rank(), get_local_size(), get_node_rank(), get_num_nodes()) == (rank, size, 0, 1)
    assert get_backend() == torch_dist.get_backend()
    assert get_default_group() is get_local_group() is torch_dist.group.WORLD
    assert is_main_process() == (rank == 0)


@ranks(2)
def test_queries_of_a_group_speak_of_that_group() -> None:
    group = torch_dist.new_group([1])
    if get_rank() == 1:
        assert get_dist_info(group) == (get_rank(group), get_world_size(group)) == (0, 1)
        assert is_main_process(group)
        assert get_backend(group) == "gloo"


@ranks(4)
def test_local_groups_are_runs_of_consecutive_ranks_in_either_form() -> None:
    rank = get_rank()
    for call in (lambda: init_local_group(2), lambda: init_local_group(rank // 2, 2)):
        call()
        assert (get_local_rank(), get_local_size()) == (rank % 2, 2)
        assert all_gather_object(rank, group=get_local_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    init_local_group(4)
    assert (get_local_rank(), get_local_size()) == (rank, 4)


def refuse_local_groups() -> None:
    size = get_world_size()
    for wrong in (0, -1, size + 1):
        with pytest.raises(ValueError, match=f"must divide the world size, {size}, but is {wrong}"):
            init_local_group(wrong)
        with pytest.raises(ValueError, match=f"must divide the world size, {size}, but is {wrong}"):
            init_local_group(0, wrong)
    with pytest.raises(ValueError, match=f"`node_rank` must be {get_rank()} for 1 rank per node, but is 9"):
        init_local_group(9, 1)
    assert_group_works()


@pytest.mark.parametrize("size", SIZES)
def test_local_groups_that_do_not_fit_are_refused(size: int) -> None:
    run_on(size, refuse_local_groups)


@ranks(4, fresh=True)
def test_on_two_nodes_local_queries_need_no_local_group_but_its_users_do(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    init_dist("pytorch", store=FileStore(str(tmp_path / "store"), 4))
    assert (get_local_rank(), get_local_size(), get_node_rank(), get_num_nodes()) == (rank % 2, 2, rank // 2, 2)
    with pytest.raises(DistError, match=r"`get_local_group` on several nodes needs init_local_group\(\) first"):
        get_local_group()
    with pytest.raises(DistError, match=r"needs init_local_group\(\) first"), local_main_process_first():
        pass
    init_local_group(get_node_rank(), get_local_size())
    assert all_gather_object(rank, group=get_local_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    with local_main_process_first():
        pass
    assert_group_works()


@ranks(2, fresh=True)
def test_in_a_group_of_other_making_the_environment_says_who_is_local(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    store = FileStore(str(tmp_path / "store"), 2)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert (get_local_rank(), get_local_size(), get_node_rank(), get_num_nodes()) == (rank, 2, 0, 1)
    for contradiction in ({"RANK": "1", "LOCAL_RANK": "1"}, {"RANK": "0", "LOCAL_RANK": "0"}):
        os.environ |= contradiction
        if rank != int(contradiction["RANK"]):
            with pytest.raises(DistError, match="the local rank is unknown, because the default group was not made by"):
                get_local_rank()
    init_local_group(1)
    assert (get_local_rank(), get_local_size()) == (0, 1)


@master_only
def greet(name: str, *, mark: str = "!") -> str:
    """Say hello."""
    return f"hello {name}{mark} from {get_rank()}"


def greetings() -> str | None:
    return greet("all", mark="?")


@pytest.mark.parametrize("size", SIZES)
def test_master_only_runs_on_rank_0_and_gives_none_elsewhere(size: int) -> None:
    assert run_on(size, greetings) == ["hello all? from 0"] + [None] * (size - 1)
    assert (greet.__name__, greet.__doc__) == ("greet", "Say hello.")


@pytest.mark.parametrize(
    "ask",
    [
        get_rank, get_world_size, get_dist_info, get_local_rank, get_local_size, get_node_rank, is_main_process,
        master_only(lambda: 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world_size", ["1", "2"])
def test_who_asks_a_rank_for_its_place_before_there_is_a_group_is_told_once(monkeypatch, caplog, ask, world_size):
    monkeypatch.setattr(groups, "_may_be_alone", False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(int(world_size) - 1))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, world_size)
    exec("ask()", {"__name__": "lockstep.model", "ask": ask})  # lockstep's own question is none of the user's
    assert not caplog.records
    for _ in range(2):
        assert ask() in (0, 1, (0, 1))  # True is 1
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == int(world_size) - 1
    assert all("test_queries.py:" in one and "as rank 1 of 2" in one and "init_dist()" in one for one in told)


def enter_first() -> None:
    with main_process_first():
        pass


@pytest.mark.parametrize("call", [enter_first, barrier, lambda: all_reduce(torch.ones(1)), lambda: run_on_main(int)])
def test_who_calls_a_collective_before_there_is_a_group_is_told_once(monkeypatch, caplog, call):
    monkeypatch.setattr(groups, "_may_be_alone", False)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        call()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "test_queries.py:" in told
    assert "does nothing with other ranks until there is a group, but it was started as rank 1 of 2" in told


class Strided(IterableDataset):
    """Yields every nth number, for this rank of n."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(get_rank(), 8, get_world_size()))


def test_a_worker_that_is_not_forked_is_told_that_it_has_no_group(monkeypatch, capfd):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    loader = DataLoader(Strided(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert len(list(loader)) == 8
    told = capfd.readouterr().err
    assert "as rank 1 of 2" in told
    assert "ask where the dataset is made, and keep the answer in it" in told
