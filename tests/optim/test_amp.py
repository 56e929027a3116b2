"""Half precision: autocast, a loss scale on which all ranks agree, and resuming it."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.checkpoint import read_meta
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.hooks import Hook
from lockstep.model import train_step
from lockstep.optim import AmpOptimWrapper, OptimWrapperDict, build_optim_wrapper
from lockstep.optim.amp import PATIENCE, LossScaler
from lockstep.registry import OPTIM_WRAPPERS
from lockstep.runner import Runner
from lockstep.strategy import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lockstep.testing import ranks, run_ranks

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
STEPS = 6
# Overflows in the first steps, falls far, and grows again soon.
LARGE = {"init_scale": 2.0**22, "backoff_factor": 2.0**-5, "growth_interval": 2}


class Net(nn.Module):
    """Notes the dtype of what its layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.head(self.body(x))
        self.seen.add(out.dtype)
        return (out.float() - y).square().mean()


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def own_batches() -> list[tuple[Tensor, Tensor]]:
    rank, size = get_rank(), get_world_size()
    return [(x[rank::size], y[rank::size]) for x, y in zip(X.split(8), Y.split(8), strict=True)][:STEPS]


def optim_config(**changes: Any) -> dict[str, Any]:
    return {
        "type": "AmpOptimWrapper",
        "optimizer": {"type": "AdamW", "lr": 0.05},
        "clip_grad": {"max_norm": 0.5},
        **changes,
    }


def by_hand(dtype: torch.dtype, scale: dict[str, Any] | None, counts: int) -> tuple[list[float], list[float]]:
    """Return losses and scales of a loop as PyTorch's users write it."""
    model: nn.Module = net()
    if get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", enabled=scale is not None, **(scale or {}))
    losses, scales = [], []
    for index, batch in enumerate(own_batches(), start=1):
        with torch.autocast("cpu", dtype):
            loss = model(*batch)
        scaler.scale(loss / counts if counts > 1 else loss).backward()
        losses.append(loss.item())
        if index % counts == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return losses, scales


def by_strategy(strategy: Any, **changes: Any) -> tuple[list[float], list[float], set[torch.dtype]]:
    model, wrapper = strategy.prepare(net(), optim_config(**changes))
    wrapper.initialize_count_status(model, 0, STEPS)
    step = getattr(model, "train_step", partial(train_step, model))
    losses, scales = [], []
    for batch in own_batches():
        losses.append(step(batch, wrapper)["loss"].item())
        scales.append(wrapper.loss_scale)
    return losses, scales, strategy.core().seen


@pytest.mark.parametrize(("size", "kind"), [(1, SingleDeviceStrategy), (2, DDPStrategy)])
@pytest.mark.parametrize(
    ("dtype", "scale"), [("bfloat16", None), ("float16", LARGE), ("float16", {}), ("bfloat16", {"init_scale": 64.0})]
)
def test_steps_are_bit_by_bit_those_by_hand(size: int, kind: type, dtype: str, scale: dict[str, Any] | None):
    given = {} if scale is None else {"loss_scale": scale}
    expected = run_ranks(size, by_hand, getattr(torch, dtype), scale, 1)
    results = run_ranks(size, by_strategy, kind(), dtype=dtype, **given)
    assert [(losses, scales) for losses, scales, _ in results] == expected
    assert {seen for _, _, dtypes in results for seen in dtypes} == {getattr(torch, dtype)}
    losses, scales = expected[0]
    assert losses[-1] < losses[0]
    if scale is LARGE:  # it shrank, then grew
        assert min(scales) < 2.0**22
        assert any(later > earlier for earlier, later in pairwise(scales))


def test_accumulation_is_that_by_hand_and_the_scale_stays_within_a_window():
    (losses, scales), (expected, expected_scales) = (
        by_strategy(SingleDeviceStrategy(), dtype="float16", loss_scale=LARGE, accumulative_counts=3)[:2],
        by_hand(torch.float16, LARGE, 3),
    )
    assert (losses, scales) == (expected, expected_scales)
    assert scales[0] == scales[1] == 2.0**22 > scales[2]


@pytest.mark.parametrize("counts", [1, 2])
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", "dynamic"), ("float16", LARGE)])
def test_fsdp_has_the_losses_and_scales_of_one_process(dtype: str, scale: Any, counts: int):
    changes = {"dtype": dtype, "loss_scale": scale, "accumulative_counts": counts}
    ((losses, scales, _),) = run_ranks(1, by_strategy, SingleDeviceStrategy(), **changes)
    results = run_ranks(2, by_strategy, FSDPStrategy(), **changes, use_fsdp=True)
    means = torch.tensor([losses for losses, _, _ in results]).mean(0)
    assert means.tolist() == pytest.approx(losses, rel=2e-2)
    for _, own_scales, seen in results:
        assert own_scales == scales
        assert seen == {getattr(torch, dtype)}
    assert (min(scales) < max(scales)) == (dtype == "float16")


def sharded_with_one_bad_shard(fused: bool | None, whole_part: bool, bad_step: int) -> list[tuple[Any, ...]]:
    """Return scale, steps taken and weights after each step; in one, a shard of rank 1 overflows."""
    model = net()
    fully_shard(model.head)
    fully_shard(model.body)
    extra = nn.Linear(1, 1, bias=False) if whole_part else nn.Identity()
    nn.init.ones_(next(iter(extra.parameters()))) if whole_part else None
    optimizer = torch.optim.AdamW([*model.parameters(), *extra.parameters()], lr=0.1, fused=fused)
    wrapper = AmpOptimWrapper(optimizer=optimizer, dtype="float16", clip_grad={"max_norm": 1.0})
    assert wrapper.device_type == "cpu"
    seen = []
    for index, (x, _) in enumerate(own_batches()[:3]):
        with wrapper.optim_context(model):
            loss = extra(model.head(model.body(x))).float().square().mean() * 1e-3
        wrapper.backward(wrapper.scale_loss(loss))
        if whole_part:  # whoever leaves parameters whole averages their gradients
            extra.weight.grad.fill_(0.5 * wrapper.loss_scale)
        shard = model.body[0].weight.grad.to_local()
        if index == bad_step and get_rank() == 1:
            shard[-1, -1] = math.inf
        wrapper.step()
        wrapper.zero_grad()
        steps = {int(state["step"]) for state in optimizer.state.values()}
        weights = model.body[0].weight.full_tensor().sum().item()
        seen.append((wrapper.loss_scale, steps, weights, [p.sum().item() for p in extra.parameters()]))
    return seen


@pytest.mark.parametrize(("fused", "whole_part"), [(None, False), (True, False), (None, True)])
def test_an_overflow_in_one_shard_is_skipped_on_every_rank(fused: bool | None, whole_part: bool):
    left, right = run_ranks(2, sharded_with_one_bad_shard, fused, whole_part, 1)
    assert left == right
    assert [scale for scale, *_ in left] == [2.0**16, 2.0**15, 2.0**15]
    assert [steps for _, steps, *_ in left] == [{1}, {1}, {2}]
    weights = [rest for _, _, *rest in left]
    assert weights[0] == weights[1] != weights[2]
    assert math.isfinite(weights[2][0])


@ranks(2)
def test_under_ddp_an_overflow_on_one_rank_is_one_on_all():
    model, wrapper = DDPStrategy().prepare(net(), optim_config(dtype="float16", loss_scale={"init_scale": 1.0}))
    for x, y in own_batches()[:2]:
        with wrapper.optim_context(model):
            loss = model(x, y)
        wrapper.update_params(loss * math.inf if get_rank() else loss)
    assert all_gather_object(wrapper.loss_scale) == [0.25, 0.25]
    assert all_gather_object(not wrapper.optimizer.state) == [True, True]
    assert wrapper.grad_norm == 0  # of the updates that were made: none


def test_a_fixed_scale_stays_and_bad_updates_are_skipped():
    model = net()
    wrapper = AmpOptimWrapper(8, "bfloat16", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.head.weight.clone()
    for factor in (math.inf, 1.0):
        with wrapper.optim_context(model):
            loss = model(X, Y) * factor
        wrapper.update_params(loss)
        assert wrapper.loss_scale == 8
        assert torch.equal(model.head.weight, before) == math.isinf(factor)
    assert wrapper.extra_state()["loss_scaler"]["scale"] == 8
    wrapper.load_extra_state({"loss_scaler": {"scale": 2.0, "_growth_tracker": 0}})
    assert wrapper.loss_scale == 8


def test_the_norm_is_that_of_the_last_update_that_was_made():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapper = AmpOptimWrapper(dtype="float16", loss_scale=1.0, optimizer=optimizer, clip_grad={"max_norm": 1.0})
    norms = []
    for factor in (math.inf, 3.0, math.nan, 2.0):
        wrapper.update_params(model(torch.ones(1)).sum() * factor)
        norms.append(float(wrapper.grad_norm))
    assert norms == [0.0, 3.0, 3.0, 2.0]


def test_gradients_that_are_never_finite_end_the_training_although_the_loss_is():
    model = net()
    wrapper = AmpOptimWrapper(dtype="float16", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    wrapper.update_params(model(X, Y))  # one that is finite
    with pytest.raises(FloatingPointError, match=f"not in any of the last {PATIENCE} updates"):  # noqa: PT012
        for _ in range(2 * PATIENCE):
            with wrapper.optim_context(model):
                loss = model(X, Y) * 1e-3 + (model.head.weight * 0).abs().sqrt().sum()
            assert loss.isfinite()
            wrapper.update_params(loss)
    assert 0 < wrapper.inner_count <= 2 * PATIENCE


def test_it_can_be_that_nothing_has_a_gradient():
    model = net()
    wrapper = AmpOptimWrapper(dtype="float16", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    wrapper.update_params(torch.zeros((), requires_grad=True))
    assert wrapper.loss_scale == 2.0**16


def test_the_default_on_the_cpu_is_bfloat16_without_a_scale():
    wrapper = build_optim_wrapper(net(), optim_config())
    assert (wrapper.device_type, wrapper.dtype, wrapper.loss_scale) == ("cpu", torch.bfloat16, 1.0)
    assert "loss_scaler" not in wrapper.extra_state()
    assert OPTIM_WRAPPERS["AmpOptimWrapper"] is AmpOptimWrapper


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"dtype": "float32"}, ValueError, "'float16', 'bfloat16', such a torch.dtype or None, but is 'float32'"),
        ({"dtype": torch.float32}, ValueError, "but is torch.float32"),
        ({"dtype": "bf16"}, ValueError, "did you mean `bfloat16`"),
        ({"loss_scale": "dynamc"}, TypeError, "'dynamic', a number or a dict"),
        ({"loss_scale": True}, TypeError, "'dynamic', a number or a dict"),
        ({"loss_scale": 0}, ValueError, "above 0, but is 0"),
        ({"loss_scale": {"initial_scale": 4}}, ValueError, "'initial_scale': did you mean `init_scale`"),
        (
            {"clip_grad": {"max_norm": 1, "error_if_nonfinite": True}},
            ValueError,
            "must be False for an AmpOptimWrapper",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes, error, says):
    with pytest.raises(error, match=says):
        build_optim_wrapper(net(), optim_config(**changes))


def test_the_scale_is_part_of_the_state():
    def make() -> AmpOptimWrapper:
        return AmpOptimWrapper(LARGE, "float16", optimizer=torch.optim.SGD(net().parameters(), lr=0.1))

    wrapper, other = make(), make()
    model = net()
    wrapper.optimizer.param_groups[0]["params"] = list(model.parameters())
    for x, y in own_batches()[:4]:
        with wrapper.optim_context(model):
            loss = model(x, y)
        wrapper.update_params(loss)
    assert wrapper.loss_scale < LARGE["init_scale"]
    other.load_state_dict(wrapper.state_dict())
    assert other.extra_state()["loss_scaler"] == wrapper.extra_state()["loss_scaler"]
    third = OptimWrapperDict(one=make())
    third.load_extra_state(json.loads(json.dumps(OptimWrapperDict(one=wrapper).extra_state())))
    assert third["one"].extra_state() == wrapper.extra_state()


def test_a_checkpoint_without_a_scale_is_told_of(caplog):
    wrapper = build_optim_wrapper(net(), optim_config(dtype="float16"))
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        wrapper.load_extra_state({})
    assert "no loss scale was saved: it begins with 65536" in caplog.text


def test_a_scaler_that_is_not_enabled_does_nothing():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler("cpu", enabled=False)
    for _ in range(PATIENCE):
        scaler.scale(model(X, Y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0


class Watch(Hook):
    """Notes loss and scale of every iteration, and ends a run as a crash would."""

    priority = "LOWEST"

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after = stop_after
        self.by_iter: dict[int, tuple[float, float]] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.by_iter[runner.iter] = (outputs["loss"].item(), runner.optim_wrapper.loss_scale)
        if runner.iter + 1 == self.stop_after:
            raise KeyboardInterrupt


def run(work_dir: Path, strategy: str, stop_after: int | None = None, **changes: Any) -> dict[int, tuple[float, float]]:
    watch = Watch(stop_after)
    runner = Runner(
        net(), work_dir, train_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 8 // get_world_size()},
        train_cfg={"max_iters": 12}, strategy=strategy, randomness={"seed": 7}, visualizer=[], custom_hooks=[watch],
        # The scale grows after three good updates: how many there have been is part of the state.
        optim_wrapper=optim_config(dtype="float16", loss_scale={"init_scale": 2.0**20, "growth_interval": 3}),
        default_hooks={"checkpoint": {"by_epoch": False, "interval": 4}}, **changes,
    )  # fmt: skip
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    return watch.by_iter


@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_resumed_run_goes_on_with_its_scale(size: int, strategy: str, tmp_path: Path):
    whole = run_ranks(size, run, tmp_path / "whole", strategy)
    first = run_ranks(size, run, tmp_path / "parts", strategy, 9)
    second = run_ranks(size, run, tmp_path / "parts", strategy, resume=True)
    scales = [scale for _, scale in whole[0].values()]
    assert len(set(scales)) > 2
    for one, other, all_of_it in zip(first, second, whole, strict=True):
        assert min(other) == 8
        assert one | other == all_of_it
        assert [scale for _, scale in all_of_it.values()] == scales


class Breaks(Net):
    """Its loss is no number any more from the third batch on."""

    batches = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.batches += 1
        loss = super().forward(x, y)
        return loss * math.nan if self.batches >= 3 else loss


def test_a_loss_that_is_none_is_found_although_its_updates_are_skipped(tmp_path: Path):
    runner = Runner(
        Breaks(), tmp_path, train_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 8}, visualizer=[],
        train_cfg={"max_iters": 12}, optim_wrapper=optim_config(dtype="float16"), strategy="single",
        default_hooks={"nan_check": {"interval": 1}},
    )  # fmt: skip
    with pytest.raises(FloatingPointError, match="the loss must be finite, but is not in iteration 3"):
        runner.train()
    assert all(parameter.isfinite().all() for parameter in runner.model.parameters())


class Pair(nn.Module):
    """Trains two parts in turn, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 1), nn.Linear(6, 1)

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        x, y = data
        for name, part in (("left", self.left), ("right", self.right)):
            with optim_wrapper[name].optim_context(part):
                loss = (part(x).float() - y).square().mean()
            optim_wrapper[name].update_params(loss)
        return {"loss": loss.detach()}


def train_pair(work_dir: Path, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(2)
    runner = Runner(
        Pair(), work_dir, train_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 4}, visualizer=[],
        train_cfg={"max_epochs": 2}, randomness={"seed": 7},
        strategy={"type": "ddp", "model_wrapper": {"type": "MMSeparateDistributedDataParallel"}},
        optim_wrapper={
            "left": optim_config(dtype="float16", loss_scale={"init_scale": 2.0**24, "growth_interval": 3}),
            "right": optim_config(dtype="float16"),
        }, **changes,
    )  # fmt: skip
    runner.train()
    return runner.optim_wrapper.extra_state()


def test_each_of_several_optimizers_has_its_own_scale_which_a_checkpoint_keeps(tmp_path: Path):
    left, right = run_ranks(2, train_pair, tmp_path)
    assert left == right
    assert left["left"] != left["right"]
    (checkpoint,) = tmp_path.glob("2*/epoch_2")
    assert read_meta(checkpoint)["optim_wrapper"] == left
    assert run_ranks(2, train_pair, tmp_path / "resumed", load_from=checkpoint, resume=True) == [left, left]
