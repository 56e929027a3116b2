"""Models of one's own in stages, by policies of their own, and what is refused of pipelines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import all_gather, get_rank, init_dist
from lockstep.errors import ConfigError
from lockstep.model import BaseDataPreprocessor, BaseModel
from lockstep.runner import Runner
from lockstep.strategy import build_strategy
from lockstep.strategy.colossalai.engine import require_engine
from lockstep.testing import ranks, run_ranks

from ..training import whole
from .test_pipeline import HYBRID, llama, strategy_of
from .training import kept, policy_base

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
ADAM = {"optimizer": {"type": "AdamW", "lr": 0.01}, "clip_grad": {"max_norm": 0.5}}


class Scaling(BaseDataPreprocessor):
    """Brings inputs to a scale, and in training to random ones."""

    def __init__(self, jitter: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))
        self.jitter = jitter

    def forward(self, data: Any, training: bool = False) -> Any:
        x, y = super().forward(data, training)
        factor = 1 + self.jitter * torch.rand(()) if training else 1.0
        return x * self.scale * factor, y * factor


class Stack(BaseModel):
    """Layers of one's own, with a buffer; tells two losses, and predicts a list."""

    def __init__(self, dropout: float = 0.0, jitter: float = 0.0) -> None:
        super().__init__(Scaling(jitter))
        self.up = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.head.register_buffer("unit", torch.ones(1))

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return self.finish(self.through(self.up(x), 0, len(self.layers)), y, mode)

    def through(self, hidden: Tensor, begin: int, end: int) -> Tensor:
        for layer in self.layers[begin:end]:
            hidden = layer(hidden).tanh()
        return hidden

    def finish(self, hidden: Tensor, y: Tensor, mode: str) -> Any:
        out = self.head(hidden)
        if mode == "loss":
            square, size = (out - y).square().mean(), 0.1 * out.abs().mean()
            return {"loss_square": square, "loss_sizes": [size], "mean": out.mean()}
        return [*out.flatten().tolist()] if mode == "predict" else out


def stage_forward(model: Stack, x: Tensor, y: Tensor, mode: str = "tensor", hidden: Any = None, *, stage: Any) -> Any:
    begin, end = stage.get_stage_index(stage.distribute_layers(len(model.layers)))
    hidden = model.through(model.up(x) if stage.is_first_stage() else hidden, begin, end)
    return model.finish(hidden, y, mode) if stage.is_last_stage() else {"hidden": hidden}


def stack_policy(**faults: Any) -> Any:
    require_engine()
    from colossalai.shardformer.policies.base_policy import ModulePolicyDescription

    class StackPolicy(policy_base()):  # type: ignore[misc]
        def module_policy(self) -> dict[Any, Any]:
            forward = partial(stage_forward, stage=self.pipeline_stage_manager)
            return {type(self.model): ModulePolicyDescription(method_replacement={"forward": forward})}

        def get_held_layers(self) -> list[nn.Module]:
            stage, model = self.pipeline_stage_manager, self.model
            begin, end = stage.get_stage_index(stage.distribute_layers(len(model.layers)))
            held = [model.up] if stage.is_first_stage() else []
            if stage.is_last_stage() and not faults.get("forgets"):
                held.append(model.head)
            if faults.get("repeats"):
                held.append(model.layers[1])
            return [*held, *model.layers[begin:end]]

    return StackPolicy()


def train(layout: str, dropout: float = 0.0, jitter: float = 0.0) -> Any:
    """Return values to log, predictions, the names in the state, and how the random numbers go on."""
    strategy = strategy_of(layout) if layout == "single" else strategy_of(layout, custom_policy=stack_policy())
    torch.manual_seed(7 if layout == "single" else 7 + get_rank())
    model, optim_wrapper = strategy.prepare(seeded(dropout, jitter), ADAM)
    step = partial(model.train_step, optim_wrapper=optim_wrapper)
    batches = zip(X.split(9), Y.split(9), strict=True)
    logged = [{name: value.item() for name, value in step(batch).items()} for batch in batches]
    logged.append(optim_wrapper.grad_norm.item())
    model.eval()
    with torch.no_grad():
        predicted = model.val_step([X[:5], Y[:5]]), model.test_step((X, Y))
    return logged, predicted, list(strategy.model_state()), torch.rand(3)


def seeded(dropout: float = 0.0, jitter: float = 0.0) -> Stack:
    torch.manual_seed(3)
    return Stack(dropout, jitter)


def test_a_model_of_ones_own_is_trained_and_predicts_as_in_one_process():
    logged, predicted, names, _ = run_ranks(1, train, "single")[0]
    assert {"loss", "loss_square", "loss_sizes", "mean"} == logged[0].keys()
    for rank_logged, rank_predicted, rank_names, _ in run_ranks(2, train, "pp2"):
        for ours, theirs in zip(rank_logged, logged, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        for ours, theirs in zip(rank_predicted, predicted, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        assert rank_names == names
        assert {"data_preprocessor.scale", "head.unit"} < set(names)


def test_stages_draw_for_themselves_and_leave_the_numbers_of_the_replica_alike():
    (logged, _, _, numbers), (other_logged, _, _, other_numbers) = run_ranks(2, train, "pp2", 0.5, 0.5)
    assert logged == other_logged
    assert torch.equal(numbers, other_numbers)
    again, _, _, _ = run_ranks(2, train, "pp2", 0.5, 0.5)[0]
    assert again == logged
    assert run_ranks(2, train, "pp2", 0.0, 0.5)[0][0] != logged


class Counting(Stack):
    """Has buffers that are each rank's own."""

    def through(self, hidden: Tensor, begin: int, end: int) -> Tensor:
        if self.training and end == len(self.layers):
            self.head.unit += get_rank()
        return super().through(hidden, begin, end)


@ranks(4)
def test_buffers_stay_each_ranks_own_and_those_of_the_first_replica_are_saved(tmp_path: Path):
    runner = Runner(
        Counting(),
        tmp_path,
        train_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 6},
        train_cfg={"max_iters": 2},
        optim_wrapper=ADAM,
        strategy=kept(build_strategy({**HYBRID, "pp_size": 2, "num_microbatches": 3, "custom_policy": stack_policy()})),
    )
    runner.train()
    if get_rank() % 2:  # the last stages
        assert runner.model.module.head.unit == 1 + 2 * 3 * get_rank()
    assert whole(runner.strategy.model_state())["head.unit"] == 1 + 2 * 3 * 1


class DrawsInLayers(Stack):
    def through(self, hidden: Tensor, begin: int, end: int) -> Tensor:
        self.drawn = torch.rand(1)
        return super().through(hidden, begin, end)


@ranks(2)
def test_stages_drop_by_different_patterns():
    model, optim_wrapper = strategy_of("pp2", custom_policy=stack_policy()).prepare(DrawsInLayers(), ADAM)
    model.train_step((X, Y), optim_wrapper)
    first, second = all_gather(model.module.drawn)
    assert first != second


class OwnStep(Stack):
    def val_step(self, data: Any) -> Any:
        return self(*data)


class Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.layers.requires_grad_(False)


@ranks(2)
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Stack, None, r"must be one of .*LlamaForCausalLM.*, or come with a `custom_policy`.*but is a Stack"),
        (nn.Linear, None, "but is a Linear"),
        (OwnStep, {}, r"must leave `val_step` to lockstep.*but OwnStep has one of its own"),
        (Normed, {}, r"must have no BatchNorm with `pp_size` above 1.*GroupNorm"),
    ],
)
def test_models_that_would_go_wrong_are_refused(model: type[nn.Module], options: Any, message: str):
    policy = {} if options is None else {"custom_policy": stack_policy(**options)}
    with pytest.raises(ConfigError, match=message):
        strategy_of("pp2", **policy).prepare(model(6, 2) if model is nn.Linear else model(), ADAM)


@ranks(2, fresh=True)  # their groups have been made by then
@pytest.mark.parametrize(
    ("model", "faults", "message"),
    [
        (Frozen, {}, r"must have parameters to train, but stage 0 of 2 has none"),
        (Stack, {"forgets": True}, r"must give each parameter to a stage.*'head.weight' to none"),
        (
            Stack,
            {"repeats": True},
            r"among the policy's `get_shared_params`, but 'layers.1.weight' is on .*0, 1",
        ),
    ],
)
def test_stages_that_would_go_wrong_are_refused(model: type[nn.Module], faults: dict[str, Any], message: str):
    init_dist("pytorch")
    with pytest.raises(ConfigError, match=message):
        strategy_of("pp2", custom_policy=stack_policy(**faults)).prepare(model(), ADAM)


@ranks(2, fresh=True)
def test_a_group_that_some_stage_has_no_part_of_is_refused_under_zero():
    init_dist("pytorch")
    optim = {**ADAM, "paramwise_cfg": {"custom_keys": {"head": {"lr_mult": 10.0}}}}
    strategy_of("pp2", custom_policy=stack_policy()).prepare(Stack(), optim)
    with pytest.raises(ConfigError, match=r"each group of the optimizer must .* group . has none on stage 0"):
        strategy_of("pp2", custom_policy=stack_policy(), zero_stage=1, precision="bf16").prepare(Stack(), optim)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp_style": "interleaved", "num_model_chunks": 2}, "`pp_style` must be '1f1b' and `num_model_chunks` 1, but"),
        ({"zero_stage": 2, "precision": "bf16"}, "`zero_stage` must be 0 or 1.*Use zero_stage=1"),
        ({"num_microbatches": 2, "microbatch_size": 2}, "must not come with `microbatch_size`"),
        ({"microbatch_size": 0}, "`microbatch_size` must be an int of at least 1, but is 0"),
        ({"pp_size": 0}, "`pp_size` must be an int of at least 1, but is 0"),
    ],
)
def test_options_that_would_go_wrong_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_strategy({**HYBRID, "pp_size": 2, **options})


@ranks(2)
def test_what_a_stage_can_not_do_is_refused(tmp_path: Path):
    for options, message in (
        ({"tp_size": 2}, "`tp_size` times `pp_size`, which is 2, must divide the number of ranks, but is 2"),
        ({"tensor_parallel": {"degree": 1, "plan": {"*": "colwise"}}}, "`tensor_parallel` must be left out"),
    ):
        with pytest.raises(ConfigError, match=message):
            strategy_of("pp2", **options).prepare(llama(), ADAM)
    with pytest.raises(ConfigError, match=r"must update each number by itself.*but is Adafactor"):
        strategy_of("pp2").prepare(llama(), {"optimizer": {"type": "Adafactor"}})
    with pytest.raises(ConfigError, match="`compile` must be left out with `pp_size` above 1"):
        run_with(tmp_path, compile=True)
    with pytest.raises(ConfigError, match="ColossalAI's tensor parallelism and pipelines keep them in pieces"):
        run_with(tmp_path, custom_hooks=[{"type": "EMAHook"}])
    model, optim_wrapper = strategy_of("pp2").prepare(llama(), ADAM)
    words = torch.arange(12)[None]
    with pytest.raises(RuntimeError, match="must be used by its `train_step`"):
        model(input_ids=words)
    with pytest.raises(RuntimeError, match="must be trained by its `train_step`"):
        optim_wrapper.update_params(torch.ones(()))
    for batch, message in (
        ({"input_ids": words, "bias": torch.zeros(3)}, r"'bias' is a tensor of shape \(3,\)"),
        ({"input_ids": words[:0]}, "must hold samples"),
        ([words] * 20, "`forward` must name an argument for each part"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.val_step(batch)


def run_with(work_dir: Path, **options: Any) -> None:
    words = torch.arange(12)
    Runner(
        llama(),
        work_dir,
        train_dataloader={"dataset": [{"input_ids": words, "labels": words}], "batch_size": 1},
        train_cfg={"max_iters": 1},
        optim_wrapper=ADAM,
        strategy=kept(build_strategy({**HYBRID, "pp_size": 2})),
        **options,
    ).train()
