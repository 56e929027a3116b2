"""`ColossalAIStrategy` in a Runner, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import all_reduce, get_rank, get_world_size, init_dist, is_distributed
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.model import MMDistributedDataParallel, is_model_wrapper, unwrap_model
from lockstep.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.runner import Runner
from lockstep.strategy import (
    ColossalAIModelWrapper,
    ColossalAIOptimWrapper,
    ColossalAIStrategy,
    build_strategy,
)
from lockstep.testing import ranks, run_ranks

from .training import PLUGINS, config_of, strategy_of, train

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        out = self.down(self.up(x).tanh())
        return (out - y).square().mean() if mode == "loss" else (torch.cat([-out, out], 1), y.flatten())


class Trace(Hook):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[float] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses.append(outputs["loss"] * runner.train_loop.samples)
        if runner.optim_wrapper.grad_norm is not None:
            self.norms.append(runner.optim_wrapper.grad_norm.item())


def run(work_dir: Path, strategy: Any, batch_size: int) -> tuple[list[float], list[float], float]:
    """Train with a last window and a last batch that are short, a schedule, validation and clipping."""
    torch.manual_seed(3)
    trace = Trace()
    runner = Runner(
        Regression(),
        work_dir,
        train_dataloader={"dataset": TensorDataset(X, Y), "batch_size": batch_size, "shuffle": False},
        train_cfg={"max_epochs": 3},
        val_dataloader={"dataset": TensorDataset(X, (Y > 0).long()), "batch_size": batch_size},
        val_evaluator={"type": "Accuracy"},
        optim_wrapper={
            "optimizer": {"type": "AdamW", "lr": 0.05}, "accumulative_counts": 5, "clip_grad": {"max_norm": 0.5},
        },
        param_scheduler={"type": "CosineAnnealingLR"},
        custom_hooks=[trace],
        strategy=strategy,
        randomness={"seed": 0},
    )  # fmt: skip
    runner.train()
    sums = torch.stack(trace.losses)
    shares = runner.strategy.data_shard[1]
    if shares > 1:
        all_reduce(sums)
    return sums.tolist(), trace.norms, runner.val_loop.metrics["accuracy"]


@pytest.mark.parametrize("kind", PLUGINS)
def test_a_runner_trains_and_validates_as_on_one_process(kind: str, tmp_path: Path):
    losses, norms, accuracy = run_ranks(1, run, tmp_path, "single", 4)[0]
    for rank_losses, rank_norms, rank_accuracy in run_ranks(2, run, tmp_path, config_of(kind), 2):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-5)
        assert rank_accuracy == accuracy
        assert len(norms) > 5


@ranks(2)
def test_mmengines_names_and_spellings_are_understood():
    assert STRATEGIES["colossalai"] is ColossalAIStrategy
    assert MODEL_WRAPPERS["CollosalAIModelWrapper"] is ColossalAIModelWrapper
    plugins = ("lowlevel-zero", "LowLevelZeroPlugin", {"type": "low_level_zero", "stage": 1})
    for plugin in plugins:
        strategy = build_strategy(
            {
                "type": "ColossalAIStrategy",
                "plugin": plugin,
                "model_wrapper": {"type": "CollosalAIModelWrapper"},
            }
        )
        model, optim_wrapper = strategy.prepare(
            Regression(), {"type": "ColossalAIOptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1}}
        )
        assert is_model_wrapper(model)
        assert isinstance(unwrap_model(model), Regression)
        assert isinstance(optim_wrapper, ColossalAIOptimWrapper)
        assert model.train_step((X[:2], Y[:2]), optim_wrapper)["loss"] > 0
        assert model.val_step((X[:2], Y[:2]))[0].shape == model.test_step((X[:2], Y[:2]))[0].shape == (2, 2)


@ranks(2)
def test_everybody_begins_as_rank_0_and_an_optimizer_may_be_given():
    for kind in ("zero1", "zero2"):
        torch.manual_seed(get_rank())
        model = Regression()
        model.register_buffer("not_saved", torch.tensor([get_rank()]), persistent=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        strategy = strategy_of(kind)
        _, optim_wrapper = strategy.prepare(model, OptimWrapper(optimizer, accumulative_counts=2))
        torch.manual_seed(0)
        for name, value in Regression().state_dict().items():
            assert torch.equal(strategy.model_state()[name], value)
        assert model.not_saved.tolist() == [0]
        assert optim_wrapper.get_lr() == {"lr": [0.5]}
        assert optim_wrapper.optimizer is optimizer


@ranks(2)
def test_between_updates_nothing_is_sent():
    model, optim_wrapper = strategy_of("zero1").prepare(
        Regression(), {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 2}
    )
    share = slice(4 * get_rank(), 4 * get_rank() + 4)
    model.train_step((X[share], Y[share]), optim_wrapper)
    gradient = model.module.up.weight.grad.clone()
    mean = gradient.clone()
    all_reduce(mean, "mean")
    assert not torch.allclose(gradient, mean)


@ranks(1, fresh=True)
def test_one_process_becomes_a_group_of_one():
    assert not is_distributed()
    plain = train("single")
    assert not is_distributed()
    assert train("zero1")[0] == pytest.approx(plain[0], abs=5e-6)
    assert is_distributed()


@ranks(2, fresh=True)
def test_the_group_of_init_dist_is_adopted():
    init_dist("pytorch", init_backend="colossalai")
    assert get_world_size() == 2
    model, optim_wrapper = ColossalAIStrategy().prepare(Regression(), {"optimizer": {"type": "SGD", "lr": 0.1}})
    assert model.train_step((X[:2], Y[:2]), optim_wrapper)["loss"] > 0


@ranks(2)
def test_without_an_optim_wrapper_the_model_is_only_looked_at():
    strategy = strategy_of("zero1")
    model = Regression()
    assert strategy.prepare(model) == (model, None)
    assert strategy.data_shard == (get_rank(), 2)
    assert strategy.model_state().keys() == model.state_dict().keys()
    strategy.load_state({name: torch.zeros_like(value) for name, value in strategy.model_state().items()})
    assert model(X, Y)[0].sum() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugin": "gemini"}, r"`plugin` must be 'lowlevel_zero', but is 'gemini'.*strategies 'ddp' and 'fsdp'"),
        ({"plugin": "TorchFSDPPlugin"}, r"must be 'lowlevel_zero', but is 'TorchFSDPPlugin'"),
        ({"plugin": 3}, "`plugin` must be the name of a plugin, or a dict .*, but is 3"),
        ({"mixed_precision": "fp16"}, r"`mixed_precision` must be None.*Give the plugin precision='bf16'"),
        ({"precision": "fp16"}, r"`precision` must be 'fp32' or 'bf16', but is 'fp16'.*does not run on a CPU"),
        ({"stage": 3}, r"`stage` must be 1 or 2, but is 3.*strategy='fsdp'"),
        ({"max_norm": 1.0}, r"`max_norm` must be given to the optim wrapper.*clip_grad=dict\(max_norm"),
        ({"plugin": "HybridParallelPlugin"}, r"is 'HybridParallelPlugin'.*also with `tensor_parallel`"),
        ({"overlap_allgather": True}, r"`overlap_allgather` must be left out, but is True.*Use strategy 'fsdp'"),
        ({"extra_dp_size": 2}, r"`extra_dp_size` must be left out, but is 2"),
        ({"tensor_parallel": 2}, r"`tensor_parallel` must not be given to strategy 'colossalai'\. Use strategy 'fsdp'"),
    ],
)
def test_options_that_would_go_wrong_are_refused_with_the_alternative(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_strategy({"type": "ColossalAIStrategy", **options})


def test_without_the_package_the_recipe_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "colossalai.accelerator", None)  # how Python marks what can't be imported
    with pytest.raises(ConfigError, match=r"needs ColossalAI 0\.5\.0, but importing it failed: .*docs/engines\.md"):
        ColossalAIStrategy().prepare(Regression())


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "options", "optim", "message"),
    [
        ("zero1", {}, {**SGD, "clip_grad": {"max_norm": 1.0, "norm_type": 1}}, r"clips to the 2-norm alone.*'ddp'"),
        ("zero1", {}, {**SGD, "clip_grad": {"type": "value", "clip_value": 1.0}}, "clips to the 2-norm alone"),
        (
            "zero1",
            {},
            {"type": "AmpOptimWrapper", **SGD},
            r"is of type AmpOptimWrapper.*precision='bf16'",
        ),
        ("zero1", {}, {"up": SGD, "down": SGD}, r"is of type OptimWrapperDict.*strategy 'ddp'"),
        ("zero1", {}, {"optimizer": {"type": "Adafactor"}}, r"must update each number by itself.*but is Adafactor"),
    ],
)
def test_runs_that_would_go_wrong_are_refused_with_the_alternative(kind, options, optim, message):
    model = Regression()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        strategy_of(kind, **options).prepare(model, optim)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@ranks(2)
def test_models_that_would_go_wrong_are_refused_with_the_alternative():
    with torch.device("meta"), pytest.raises(ConfigError, match="must have values, but is on the meta device"):
        strategy_of("zero1").prepare(Regression())
    with pytest.raises(ConfigError, match=r"`model` must not be wrapped .*is a MMDistributedDataParallel"):
        strategy_of("zero1").prepare(MMDistributedDataParallel(Regression()), SGD)
    optimizers = {name: torch.optim.SGD([nn.Parameter(torch.ones(1))]) for name in "ab"}
    with pytest.raises(ConfigError, match="with one optimizer"):
        ColossalAIOptimWrapper.of(OptimWrapperDict(**{name: OptimWrapper(item) for name, item in optimizers.items()}))
    with pytest.raises(ConfigError, match="is of type AmpOptimWrapper"):
        ColossalAIOptimWrapper.of(AmpOptimWrapper(optimizer=optimizers["a"]))
    with pytest.raises(RuntimeError, match="must be given an engine"):
        ColossalAIOptimWrapper(optimizers["a"]).step()
