"""A fake group of 1,024 ranks in one process: the other ranks are taken to have, and to do, what this one does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import (
    all_gather,
    all_gather_object,
    all_reduce_dict,
    broadcast_object,
    broadcast_object_list,
    check_collectives,
    collect_results,
    destroy_dist,
    gather,
    gather_object,
    get_world_size,
    main_process_first,
    run_on_main,
    scatter,
    scatter_object_list,
    sync_random_seed,
)
from lockstep.dist.objects import start_gather_bytes
from lockstep.errors import DistError
from lockstep.strategy import build_strategy
from lockstep.testing import ranks

SIZE = 1024


def join(rank: int) -> None:
    destroy_dist()
    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)


def on_main(value: object, rank: int) -> object:
    return value if rank == 0 else None


@ranks(1, fresh=True)
def test_objects_and_results() -> None:
    for rank in (0, 3):
        join(rank)
        large, places = {"a": torch.ones(2**16)}, [None] * SIZE
        assert [one["a"].sum().item() for one in all_gather_object(large)] == [2**16] * SIZE
        all_gather_object(places, rank)
        assert places == [rank] * SIZE
        assert gather_object(7) == on_main([7] * SIZE, rank)
        assert start_gather_bytes(b"record").wait() == on_main([b"record"] * SIZE, rank)
        assert broadcast_object("x", 5) == run_on_main(lambda: "x") == "x"
        broadcast_object_list(places, 5)
        assert collect_results(["a", "b"], 2 * SIZE) == on_main(["a"] * SIZE + ["b"] * SIZE, rank)
        assert collect_results(["a", "b"], 2, indices=[1, 0]) == on_main(["b", "a"], rank)


@ranks(1, fresh=True)
def test_tensors_seeds_and_checks() -> None:
    for rank in (0, 3):
        join(rank)
        check_collectives("always")
        data = torch.arange(3.0)
        assert torch.equal(torch.stack(all_gather(data)), data.expand(SIZE, 3))
        assert [x.tolist() for x in gather(data)] == ([[0.0, 1.0, 2.0]] * SIZE if rank == 0 else [])
        scatter(data, [torch.ones(3)] * SIZE if rank == 0 else None)
        assert data.tolist() == ([1.0] * 3 if rank == 0 else [0.0, 1.0, 2.0])  # rank 0 is not there to send it
        output = [None]
        scatter_object_list(output, list(range(SIZE)), rank)
        assert output == [rank]
        with pytest.raises(DistError, match=r"must be scattered by rank \d of 1024 itself, but `src` is 9"):
            scatter_object_list(output, None, 9)
        assert all_reduce_dict({"a": torch.ones(2)}).keys() == {"a"}
        with main_process_first():
            assert isinstance(sync_random_seed(), int)
        check_collectives("off")


@ranks(1, fresh=True)
def test_a_model_is_prepared_and_takes_a_step() -> None:
    for rank in (0, 3):
        for strategy in ("ddp", "fsdp"):
            join(rank)
            model = nn.Linear(64, 4096)
            wrapped, optim_wrapper = build_strategy(strategy).prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            optim_wrapper.update_params(wrapped(torch.ones(2, 64)).square().mean())
            own = sum(x.numel() if strategy == "ddp" else x.to_local().numel() for x in wrapped.parameters())
            assert own == 65 * 4096 // (1 if strategy == "ddp" else SIZE)


@ranks(1, fresh=True)
def test_a_session_and_a_runner_share_out_the_data(tmp_path) -> None:
    for rank in (0, 3):
        join(rank)
        session = Session(tmp_path / f"session_{rank}", strategy="ddp", log_level="ERROR")
        model, data = nn.Linear(4, 1), TensorDataset(torch.ones(8 * SIZE, 4), torch.ones(8 * SIZE, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        *_, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
        assert len(loader) == 4
        runner = Runner(
            nn.Linear(4, 1), tmp_path / f"runner_{rank}", loss=nn.MSELoss(), strategy="ddp", log_level="ERROR",
            train_dataloader={"dataset": data, "batch_size": 2, "num_workers": 0}, train_cfg={"max_epochs": 1},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, visualizer=[],
            default_hooks={"progress": None, "checkpoint": None},
        )  # fmt: skip
        runner.train()
        assert (runner.iter, get_world_size()) == (4, SIZE)
