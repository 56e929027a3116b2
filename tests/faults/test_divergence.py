"""One flipped bit on one rank is found within an interval, and named; what differs by design is not."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from lockstep.diagnostics import replicas
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError, DivergenceError
from lockstep.hooks import EMAHook, Hook, ReplicaCheckHook
from lockstep.model import BaseModel
from lockstep.testing import ranks

from .runs import FlipBit, bits_of, make_model, make_runner

NAMES = {
    "weight": "0.up.weight",
    "buffer": "0.scale",
    "exp_avg": "exp_avg of 0.up.weight",
    "exp_avg_sq": "exp_avg_sq of 0.up.weight",
    "step": "step of 0.up.weight",
    "lr": "lr of parameter group 0 of AdamW",
}


def train_until_it_is_found(tmp_path: Path, strategy: str, what: str, rank: int) -> DivergenceError:
    hooks = [FlipBit(what, rank, after=7, bit=20), ReplicaCheckHook(interval=5)]
    runner = make_runner(tmp_path, strategy, hooks, 20)
    with pytest.raises(DivergenceError) as caught:
        runner.train()
    error = caught.value
    assert error.iteration == 10  # the check that follows
    assert len(set(all_gather_object(str(error)))) == 1  # the same on every rank, and the group is usable
    assert "All was equal after iteration 5." in str(error)
    return error


@ranks(2, 4)
@pytest.mark.parametrize("what", ["weight", "buffer", "exp_avg", "exp_avg_sq", "lr"])
def test_a_flipped_bit_under_ddp_is_named(tmp_path: Path, what):
    # What is flipped spreads to the weight, which comes first; the buffer and the options stand by themselves.
    error = train_until_it_is_found(tmp_path, "ddp", what, rank=get_world_size() - 1)
    assert NAMES[what].replace(" of ", "` of `") in str(error)
    assert error.ranks == (get_world_size() - 1,)
    others = {2: "rank 0", 4: "ranks 0-2"}[get_world_size()]
    assert re.search(
        rf"rank {get_world_size() - 1} of {get_world_size()} \(on .+\) against {others}, after", str(error)
    )


class Mark:
    """An object that another process shows otherwise."""


@ranks(2)
def test_objects_among_the_options_are_alike_on_all_ranks(tmp_path: Path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0].update(mark=Mark(), layers={"a", "b", "c", "d"})
    make_runner(tmp_path, "ddp", [ReplicaCheckHook(interval=1)], 2, model=model, optim_wrapper=optimizer).train()


@ranks(2)
@pytest.mark.parametrize("what", ["exp_avg", "step"])
def test_the_first_value_alone_is_named_where_each_iteration_is_checked(tmp_path: Path, what):
    runner = make_runner(tmp_path, "ddp", [FlipBit(what, 1, after=3), ReplicaCheckHook(interval=1)], 5)
    with pytest.raises(DivergenceError) as caught:
        runner.train()
    assert (caught.value.name, caught.value.ranks, caught.value.iteration) == (NAMES[what], (1,), 3)
    assert "further value" not in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.ranks) == (str(caught.value), (1,))


class Gan(BaseModel):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, *others, mode="loss"):
        return self.critic(self.generator(x)).square().mean()

    def train_step(self, data, optim_wrapper):
        losses = {}
        for name in optim_wrapper:
            losses[f"{name}_loss"] = self(*data)
            optim_wrapper[name].update_params(losses[f"{name}_loss"])
        return losses


class ChangeOne(Hook):
    """Changes one of two learning rates or averages, or the shape of a buffer, on one rank."""

    priority = "HIGH"

    def __init__(self, what: str) -> None:
        self.what = what

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter != 2 or get_rank() != 1:
            return
        if self.what == "generator":
            runner.optim_wrapper["generator"].param_groups[0]["lr"] *= 2
        elif self.what == "shape":
            runner.strategy.core().scale = torch.ones(8, 1)
        else:
            first = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
            first.ema_model.module.generator.weight.data[0] += 1


@ranks(2)
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("generator", "lr of parameter group 0 of Adam 'generator'"),
        ("average", "average 1 of generator.weight"),
        ("shape", "scale"),
    ],
)
def test_of_two_alike_the_one_that_differs_is_named(tmp_path: Path, what, name):
    model = Gan()
    model.register_buffer("scale", torch.ones(1, 8))
    optimizer = {"optimizer": {"type": "Adam", "lr": 1e-3}}
    averages = [{"type": "EMAHook", "momentum": each} for each in (0.1, 0.2) if what == "average"]
    runner = make_runner(
        tmp_path,
        {"type": "ddp", "broadcast_buffers": False},
        [ChangeOne(what), *averages, ReplicaCheckHook(interval=1)],
        5,
        model=model,
        loss=None,
        optim_wrapper={"generator": optimizer, "critic": optimizer},
    )
    with pytest.raises(DivergenceError) as caught:
        runner.train()
    assert (caught.value.name, caught.value.ranks) == (name, (1,))


@ranks(4)
@pytest.mark.parametrize("what", ["weight", "exp_avg"])
def test_ranks_with_the_same_shard_are_compared(tmp_path: Path, what):
    check = ReplicaCheckHook(interval=1)
    runner = make_runner(tmp_path, "hybrid", [FlipBit(what, 3, after=3), check], 5)
    with pytest.raises(DivergenceError) as caught:
        runner.train()
    # Ranks 1 and 3 hold the second half. Which of them is right can't be known: the first counts as usual.
    assert (caught.value.name, caught.value.ranks) == (NAMES[what], (3,))
    assert "(dp_shard 1) differs" in str(caught.value)
    assert "rank 3 of 4" in str(caught.value)
    assert "against rank 1, after iteration 3" in str(caught.value)


@ranks(2)
@pytest.mark.parametrize("what", ["buffer", "step", "lr"])
def test_under_plain_fsdp_what_is_whole_is_compared(tmp_path: Path, what):
    runner = make_runner(tmp_path, "fsdp", [FlipBit(what, 1, after=3), ReplicaCheckHook(interval=1)], 5)
    with pytest.raises(DivergenceError) as caught:
        runner.train()
    assert caught.value.name == NAMES[what]


class FlipNorm(Hook):
    """Flips a bit of a weight that ranks of a tensor-parallel group hold alike."""

    priority = "HIGH"

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 2 and get_rank() == 1:
            bits_of(dict(runner.strategy.core().named_parameters())["0.norm.weight"])[0] ^= 1 << 30


class DrawOnce(Hook):
    """Draws a random number on one rank."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 2 and get_rank() == 1:
            torch.rand(1)


@ranks(2, 4)
@pytest.mark.parametrize(("hook", "name"), [(FlipNorm, "0.norm.weight"), (DrawOnce, "torch's random state")])
def test_under_tensor_parallelism_whole_weights_and_random_state_are_compared(tmp_path: Path, hook, name):
    runner = make_runner(tmp_path, "tensor", [hook(), ReplicaCheckHook(interval=1)], 5)
    with pytest.raises(DivergenceError) as caught:
        runner.train()
    assert (caught.value.name, caught.value.ranks, caught.value.iteration) == (name, (1,), 3)


@ranks(2)
def test_a_checkpoint_of_unequal_replicas_is_not_written(tmp_path: Path):
    changes = {
        "default_hooks": {"progress": None, "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 4}}
    }
    runner = make_runner(tmp_path, "ddp", [FlipBit("weight", 1, after=6), ReplicaCheckHook()], 20, **changes)
    with pytest.raises(DivergenceError, match="Resume from a checkpoint of that iteration or before"):
        runner.train()
    if get_rank() == 0:
        assert [path.name for path in runner.run_dir.glob("iter_*")] == ["iter_4"]


@ranks(2)
def test_what_is_ignored_may_differ(tmp_path: Path):
    hooks = [FlipBit("buffer", 1, after=3), ReplicaCheckHook(interval=1, ignore=["*.scale"])]
    runner = make_runner(tmp_path, "ddp", hooks, 5)
    runner.train()
    assert runner.iter == 5


def amp(optimizer: str, **more: Any) -> dict[str, Any]:
    return {"type": "AmpOptimWrapper", "optimizer": {"type": optimizer, "lr": 1e-3}, **more}


NO_FAULT: dict[str, tuple[Any, dict[str, Any]]] = {
    "float16 accumulated": ("ddp", amp("AdamW", dtype="float16", accumulative_counts=3)),
    "bfloat16 clipped": ("ddp", amp("NAdam", dtype="bfloat16", clip_grad={"max_norm": 1.0})),
    "fp16": (
        {"type": "ddp", "comm_hook": fp16_compress_hook},
        {"optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9}},
    ),
    "broadcast buffers": ({"type": "ddp", "broadcast_buffers": True}, {"optimizer": {"type": "RMSprop", "lr": 1e-3}}),
    "fsdp": ("fsdp", {"optimizer": {"type": "Adam", "lr": 1e-3, "fused": True}}),
    "tensor parallel": ("tensor", {"optimizer": {"type": "AdamW", "lr": 1e-3}}),
}
COMPLETE = int(os.environ.get("LOCKSTEP_FAULTS_ITERS", "40"))  # of a longer run


@ranks(2, 4, timeout=300)
@pytest.mark.parametrize("case", NO_FAULT)
def test_there_is_no_false_alarm(tmp_path: Path, case):
    strategy, optim_wrapper = NO_FAULT[case]
    hooks = [{"type": "EMAHook", "momentum": 0.01}, ReplicaCheckHook(interval=1)]
    schedule = [{"type": "CosineAnnealingLR", "by_epoch": False}]
    runner = make_runner(
        tmp_path, strategy, hooks, COMPLETE, param_scheduler=schedule, optim_wrapper=optim_wrapper,
    )  # fmt: skip
    runner.train()
    assert runner.iter == COMPLETE


@ranks(4)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_groups_that_train_by_themselves_are_not_compared_with_each_other(tmp_path: Path, kind):
    groups = [torch.distributed.new_group(members) for members in ([0, 1], [2, 3])]
    strategy = {"type": kind, "process_group": groups[get_rank() // 2]}
    hooks = [FlipBit("buffer", 3, after=3), ReplicaCheckHook(interval=1)]
    with pytest.raises(DivergenceError) as caught:
        make_runner(tmp_path, strategy, hooks, 5).train()
    assert (caught.value.name, caught.value.ranks, caught.value.iteration) == (NAMES["buffer"], (3,), 3)


@ranks(2)
def test_unequal_amounts_of_data_and_synchronised_norms_are_no_fault(tmp_path: Path):
    # Rank 1 has fewer batches, and keeps its running statistics while it waits for rank 0.
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_model())
    data = TensorDataset(*[torch.randn(12 - 4 * get_rank(), 8)] * 2)
    loader = DataLoader(data, batch_size=4)
    loader.rank = get_rank()  # type: ignore[attr-defined]  # it is a part of its own
    runner = make_runner(
        tmp_path,
        "ddp",
        [ReplicaCheckHook(interval=1)],
        8,
        model=model,
        train_dataloader=loader,
    )
    runner.train()
    assert runner.iter == 8


@ranks(3)
@pytest.mark.parametrize("lacks", [False, True])
def test_what_differs_and_what_is_missing_is_found_alike_on_every_rank(lacks):
    digests = {(f"layers.{number}.attention.weight", ""): ["float32 [8, 8] 1"] for number in range(2800)}
    changed, last = ("layers.7.attention.weight", ""), ("layers.2799.attention.weight", "")
    if get_rank() == 2:
        digests[changed] = ["float32 [8, 8] 2"]
        if lacks:
            del digests[last]
    found = replicas._differences(digests)
    expected = [(changed, [0, 1], [2], [])] + [(last, [0, 1], [2], [2])] * lacks
    assert [(each.key, each.usual, each.unusual, each.lacking) for each in found] == expected


def test_one_rank_has_nothing_to_compare(tmp_path: Path):
    runner = make_runner(tmp_path, None, [ReplicaCheckHook(interval=1)], 3)
    runner.train()
    assert runner.iter == 3


def test_a_wrong_interval_is_refused():
    with pytest.raises(ConfigError, match="`interval` must be an int of at least 1, but is 0"):
        ReplicaCheckHook(interval=0)


def test_a_strategy_that_lays_out_parameters_in_its_own_way_is_refused():
    with pytest.raises(ConfigError, match=r"a subclass of NativeStrategy, such as .* but the strategy is object"):
        ReplicaCheckHook().before_train(SimpleNamespace(strategy=object()))
