"""Tensor parallelism under `FSDPStrategy`: alone, and together with sharding."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.checkpoint import load_state, save_state
from lockstep.dist import all_gather, all_gather_object, get_rank
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import EMAHook, Hook
from lockstep.model import MMFullyShardedDataParallel, train_step
from lockstep.model.shards import gather_full
from lockstep.model.tensor_parallel_plan import read_plan
from lockstep.runner import Runner
from lockstep.strategy import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy
from lockstep.testing import ranks, run_ranks

from .heads import Heads
from .transformer import (
    BATCH,
    INPUTS,
    STEPS,
    TARGETS,
    Losses,
    mean_over_ranks,
    optim_config,
    own_batches,
    seeded,
    train_by_hand,
    train_by_strategy,
)

pytestmark = pytest.mark.layouts

# Of the layers that PyTorch ships, the attention keeps its weights to itself.
PLAN = {"words": "colwise_rep", "layers.*.linear1": "colwise", "*.linear2": "rowwise", "head": "rowwise_rep"}
SHIPPED = {"tensor_parallel": {"degree": 2, "plan": PLAN}}
LAYOUTS = [(2, {}), (4, {}), (4, {"device_mesh": (2, 1)}), (4, {"sharding_strategy": "NO_SHARD"})]
_IDS = ["TP-2", "FSDP-2xTP-2", "HSDP-2x1xTP-2", "DDP-2xTP-2"]


def by_strategy(strategy: Strategy, *args: Any) -> tuple[list[float], list[float]]:
    losses, norms = train_by_strategy(strategy, *args)
    return mean_over_ranks(losses), norms


def assert_as_alone(results: list[tuple[list[float], list[float]]], alone: tuple[list[float], list[float]]) -> None:
    for losses, norms in results:
        assert losses == pytest.approx(alone[0], rel=0, abs=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-5)
        assert len(norms) == STEPS


@pytest.mark.parametrize("counts", [1, 4])
@pytest.mark.parametrize(("size", "options"), LAYOUTS, ids=_IDS)
def test_losses_and_global_gradient_norms_are_those_of_one_process(size: int, options: dict, counts: int):
    alone = run_ranks(1, train_by_hand, counts, True)[0]
    assert_as_alone(run_ranks(size, by_strategy, FSDPStrategy(**SHIPPED, **options), counts, True), alone)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": ["Block"]}], ids=["plain", "recomputing"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_model_says_itself_how_it_is_split(size: int, options: dict):
    """By heads, with an embedding that is the head's, and a norm inside the heads."""
    alone = run_ranks(1, train_by_hand, 1, True, Heads)[0]
    strategy = FSDPStrategy(tensor_parallel=2, **options)
    assert_as_alone(run_ranks(size, by_strategy, strategy, 1, True, Heads), alone)


def test_activations_may_be_split_along_the_sequence():
    """Between the blocks too, with the styles of torch's own."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "*.norm1": SequenceParallel(),
        "*.norm2": SequenceParallel(),
        "*.attn.[qkv]": "colwise",
        "*.attn.o": RowwiseParallel(output_layouts=Shard(1)),
        "*.mlp.gate": "colwise",
        "*.mlp.up": "colwise",
        "*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": "sequence_parallel",
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    make = partial(Heads, norm=False)
    alone = run_ranks(1, train_by_hand, 1, True, make)[0]
    strategy = FSDPStrategy(tensor_parallel={"degree": 2, "plan": plan})
    assert_as_alone(run_ranks(2, by_strategy, strategy, 1, True, make), alone)


@ranks(4)
def test_the_axes_have_names_and_neighbours_compute_together():
    def laid_out(**options: Any) -> tuple:
        strategy = FSDPStrategy(**SHIPPED, **options)
        model, _ = strategy.prepare(seeded())
        everyone = all_gather_object(strategy.data_shard)
        return model.mesh.mesh_dim_names, model.tensor_mesh.mesh.tolist(), everyone

    pair = [[0, 1], [2, 3]][get_rank() // 2]
    assert laid_out() == (("dp_shard",), pair, [(0, 2), (0, 2), (1, 2), (1, 2)])
    assert laid_out(device_mesh=(2, 1))[0] == ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    assert laid_out(device_mesh=mesh) == (("data",), pair, [(0, 2), (0, 2), (1, 2), (1, 2)])
    strategy = FSDPStrategy(device_mesh=mesh, tensor_parallel={"plan": PLAN})  # the mesh says the degree
    model, _ = strategy.prepare(seeded())
    assert model.tensor_mesh.size() == 2
    local = model.module.layers[0].linear1.weight.to_local()
    assert local.shape == (8, 16)  # a quarter of 32 rows
    assert FSDPStrategy(tensor_parallel=None).prepare(seeded())[0].data_shard is None


@ranks(2)
def test_ranks_that_compute_together_drop_the_same():
    """The ranks of the pool begin with different random states."""
    strategy = FSDPStrategy(tensor_parallel=2)
    model, optim_wrapper = strategy.prepare(seeded(partial(Heads, dropout=0.5)), optim_config())
    losses = [train_step(model, batch, optim_wrapper)["loss"] for batch in own_batches(1, strategy.data_shard)[:4]]
    first, second = all_gather(torch.stack(losses))
    assert torch.equal(first, second)
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.module.norm.parameters()])
    assert torch.equal(*all_gather(weights))


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: whole(value) if isinstance(value, dict) else gather_full(value.detach()).clone()
        for key, value in state.items()
    }


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, dict):
            assert_equal(value, right[key])
        else:
            assert torch.equal(value, right[key]), key


def continued(strategy: Strategy, model: nn.Module, optim_wrapper: Any, start: int, stop: int) -> list[float]:
    batches = own_batches(1, strategy.data_shard)[start:stop]
    return mean_over_ranks([train_step(model, batch, optim_wrapper)["loss"].item() for batch in batches])


def save_trained(strategy: Strategy, path: Path) -> tuple[dict, dict, list[float]]:
    model, optim_wrapper = strategy.prepare(seeded(Heads), optim_config())
    continued(strategy, model, optim_wrapper, 0, 3)
    state = {"model": strategy.model_state(), "optimizer": strategy.optim_state()}
    save_state(path, state, {})
    saved = whole(state["model"]), whole(state["optimizer"]["state"])
    return *saved, continued(strategy, model, optim_wrapper, 3, 6)


def load_and_train(strategy: Strategy, path: Path) -> tuple[dict, dict, list[float]]:
    torch.manual_seed(99)  # other weights
    model, optim_wrapper = strategy.prepare(Heads(), optim_config())
    state = load_state(path, {"model": strategy.model_state(), "optimizer": strategy.optim_state()})
    strategy.load_state(state["model"], state["optimizer"])
    loaded = whole(strategy.model_state()), whole(strategy.optim_state()["state"])
    return *loaded, continued(strategy, model, optim_wrapper, 3, 6)


ALONE = 1, SingleDeviceStrategy()
TENSOR = 2, FSDPStrategy(tensor_parallel=2)
BOTH = 4, FSDPStrategy(tensor_parallel=2)
CASES = {
    "single-TP": (ALONE, TENSOR),
    "TP-single": (TENSOR, ALONE),
    "DDP-TP": ((2, DDPStrategy()), TENSOR),
    "FSDP4-FSDPxTP": ((4, FSDPStrategy()), BOTH),
    "FSDPxTP-FSDP": (BOTH, (2, FSDPStrategy())),
    "FSDPxTP-TP": (BOTH, TENSOR),
    "TP-HSDPxTP": (TENSOR, (4, FSDPStrategy(tensor_parallel=2, device_mesh=(2, 1)))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_loaded_under_any_layout(case: str, tmp_path: Path):
    (size, by), (other_size, to) = CASES[case]
    saved = run_ranks(size, save_trained, by, tmp_path / "checkpoint")
    loaded = run_ranks(other_size, load_and_train, to, tmp_path / "checkpoint")
    weights, moments, losses = saved[0]
    assert {"exp_avg", "exp_avg_sq", "step"} <= moments["blocks.0.attn.q.weight"].keys()
    for rank_weights, rank_moments, rank_losses in (*saved, *loaded):
        assert_equal(rank_weights, weights)
        assert_equal(rank_moments, moments)
        assert rank_losses == pytest.approx(losses, rel=0, abs=1e-5)


@ranks(4)
def test_states_are_taken_over_from_any_layout():
    source = FSDPStrategy(tensor_parallel=2)
    model, optim_wrapper = source.prepare(seeded(Heads), optim_config())
    continued(source, model, optim_wrapper, 0, 2)
    weights, moments = whole(source.model_state()), whole(source.optim_state()["state"])
    others = []
    for options in ({}, {"tensor_parallel": 4}, {"tensor_parallel": 2, "device_mesh": (2, 1)}):
        strategy = FSDPStrategy(**options)
        others.append((strategy, *strategy.prepare(Heads(), optim_config())))
        strategy.load_state(source.model_state(), source.optim_state())
        assert_equal(whole(strategy.model_state()), weights)
        assert_equal(whole(strategy.optim_state()["state"]), moments)
    after = continued(source, model, optim_wrapper, 2, 4)
    for strategy, other, other_wrapper in others:
        assert continued(strategy, other, other_wrapper, 2, 4) == pytest.approx(after, rel=0, abs=1e-5)


@ranks(2)
def test_a_model_on_the_meta_device_is_made_in_full_and_then_split():
    made = []
    for options in ({}, {"tensor_parallel": 2}):
        with torch.device("meta"):
            empty = Heads()
        torch.manual_seed(11)
        strategy = FSDPStrategy(**options)
        model, _ = strategy.prepare(empty, optim_config())
        assert model.module.head.weight is model.module.embed.weight
        made.append(whole(strategy.model_state()))
    assert_equal(*made)
    assert made[0].keys() == Heads().state_dict().keys()


@ranks(2)
def test_an_average_of_the_weights_is_split_alike(tmp_path: Path):
    strategy = FSDPStrategy(tensor_parallel=2)
    hook = EMAHook(ema_type="StochasticWeightAverage")
    runner = Runner(
        seeded(Heads),
        tmp_path,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH},
        train_cfg={"by_epoch": False, "max_iters": 3},
        custom_hooks=[hook],
        strategy=strategy,
    )
    runner.train()
    trained, averaged = dict(hook.src_model.named_parameters()), dict(hook.ema_model.module.named_parameters())
    assert trained.keys() == averaged.keys()
    for name, parameter in trained.items():
        assert averaged[name].placements == parameter.placements
        assert not torch.equal(gather_full(averaged[name].detach()), gather_full(parameter.detach()))
    saved = runner.save_checkpoint("here", epoch=0, iteration=3)
    state = load_state(saved, {"model": Heads().state_dict()})["model"]
    assert torch.equal(state["blocks.0.attn.o.weight"], gather_full(averaged["blocks.0.attn.o.weight"].detach()))


class Seen(BaseMetric):
    """Counts what was predicted, and sums it up."""

    def process(self, data_batch, data_samples) -> None:
        self.results.extend([float(data_samples)] * len(data_batch[0]))

    def compute_metrics(self, results) -> dict[str, float]:
        return {"count": len(results), "mean": sum(results) / len(results)}


def run(work_dir: Path, size: int, **options: Any) -> tuple[list[float], dict[str, Any], float]:
    """Return the losses, the metrics and the learning rate of a run on `size` shares of the data."""
    losses = Losses()
    torch.manual_seed(11)
    runner = Runner(
        Heads(),
        work_dir,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // size, "shuffle": True},
        train_cfg={"max_epochs": 1},
        val_dataloader={"dataset": TensorDataset(INPUTS[:13], TARGETS[:13]), "batch_size": 1},
        val_evaluator=Seen(),
        optim_wrapper=optim_config(1, True),
        custom_hooks=[losses],
        randomness={"seed": 4, "diff_rank_seed": True},
        auto_scale_lr={"base_batch_size": BATCH},
        **options,
    )
    runner.train()
    (record,) = [line for line in runner_records(runner) if line["mode"] == "epoch"]
    assert record["loss"] == pytest.approx(sum(mean_over_ranks(losses.seen)) / STEPS, abs=1e-5)
    assert record["samples_per_second"] * record["time"] * STEPS == pytest.approx(len(INPUTS), rel=0.01)
    return mean_over_ranks(losses.seen), runner.last_evaluation.metrics, runner.optim_wrapper.get_lr()["lr"][0]


def runner_records(runner: Runner) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("size", [2, 4])
def test_a_runner_deals_samples_to_groups_and_counts_each_once(size: int, tmp_path: Path):
    alone = run_ranks(1, run, tmp_path / "alone", 1)[0]
    together = run_ranks(size, run, tmp_path / "together", size // 2, strategy=FSDPStrategy(tensor_parallel=2))
    for losses, metrics, rate in together:
        assert losses == pytest.approx(alone[0], abs=1e-5)
        assert metrics["count"] == 13
        assert metrics["mean"] == pytest.approx(alone[1]["mean"], abs=1e-5)
        assert rate == alone[2]


@ranks(2)
def test_a_sampler_that_deals_otherwise_is_refused(tmp_path: Path):
    data = TensorDataset(INPUTS, TARGETS)
    own = DataLoader(data, 4, sampler=DistributedSampler(data))
    with pytest.raises(
        ConfigError, match=r"`sampler` must split the data into 1 shards.*DistributedSampler splits it into 2"
    ):
        Runner(Heads(), tmp_path, train_dataloader=own, strategy=FSDPStrategy(tensor_parallel=2)).train()
    right = DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    cfg = {"by_epoch": False, "max_iters": 1}
    Runner(Heads(), tmp_path, train_dataloader=right, train_cfg=cfg, strategy=FSDPStrategy(tensor_parallel=2)).train()


@ranks(2)
@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"degree": 2, "plan": {"*.attn.w": "colwise"}}, r"'\*\.attn\.w' matches none: did you mean `.*attn\.[qkv]`"),
        ({"degree": 2, "plan": {"*.attn.q": "colwize"}}, r"is 'colwize': did you mean `colwise`"),
        ({"degree": 2, "plan": {"*.q": "colwise", "blocks.0.*.q": "rowwise"}}, r"in one way, but says 'colwise'"),
        ({"degree": 2, "plan": {"norm": "colwise"}}, "split Linear and Embedding layers, but `norm` is a RMSNorm"),
        ({"degree": 2, "plan": {"embed": "rowwise"}}, r"`embed.weight` and `head.weight` are one parameter"),
        ({"degree": 2, "plan": []}, "a dict of styles by patterns"),
        ({"degre": 2}, "'degre': did you mean `degree`"),
        ({"plan": {"*.q": "colwise"}}, "must have the key 'degree'"),
        (3, "must divide the number of ranks, but is 3 of 2"),
        (0, "at least 1, .* but is 0"),
        (True, "but is True"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name_on_all_ranks(request_: Any, says: str):
    with pytest.raises(ConfigError, match=says):
        FSDPStrategy(tensor_parallel=request_).prepare(Heads(norm=False))


def test_patterns_may_give_one_layer_equal_styles():
    plan = {"*.attn.q": ColwiseParallel(), "blocks.0.*.q": ColwiseParallel()}
    assert "blocks.0.attn.q" in read_plan(Heads(), plan)
    with pytest.raises(ConfigError, match="in one way"):
        read_plan(Heads(), plan | {"blocks.0.*.q": ColwiseParallel(output_layouts=Replicate())})


@ranks(2)
def test_sizes_that_do_not_divide_are_refused_by_name():
    odd = partial(FSDPStrategy, tensor_parallel={"degree": 2, "plan": {"head": "colwise"}})
    with pytest.raises(ConfigError, match=r"`head.out_features` must be a multiple of 2.*but is 17.*'rowwise_rep'"):
        odd().prepare(seeded())
    with pytest.raises(ConfigError, match=r"`num_heads` of Attention must be a multiple of 2.*but is 3"):
        FSDPStrategy(tensor_parallel=2).prepare(WideHeads())
    with pytest.raises(ConfigError, match=r"Transformer has none in `_tp_plan`"):
        FSDPStrategy(tensor_parallel=2).prepare(seeded())
    inner = {"degree": 2, "plan": {"*.out_proj": "rowwise"}}
    with pytest.raises(ConfigError, match=r"in a torch\.nn\.MultiheadAttention"):
        FSDPStrategy(tensor_parallel=inner).prepare(seeded())
    with pytest.raises(ConfigError, match="`process_group` must not be given with"):
        FSDPStrategy(process_group=torch.distributed.group.WORLD, **SHIPPED).prepare(seeded())
    with pytest.raises(ConfigError, match=r"shape for 1 groups of 2 ranks each, but is \(2, 1\)"):
        FSDPStrategy(device_mesh=(2, 1), **SHIPPED).prepare(seeded())
    with pytest.raises(TypeError, match=r"a DeviceMesh, its shape \(replicas, shards\) or None, but is 4"):
        FSDPStrategy(device_mesh=4, **SHIPPED).prepare(seeded())
    with pytest.raises(ValueError, match="but is NO_SHARD"):
        FSDPStrategy(device_mesh=(1, 1), sharding_strategy="NO_SHARD", **SHIPPED).prepare(seeded())
    with pytest.raises(ValueError, match="wants one axis for the data and the mesh has 2"):
        FSDPStrategy(device_mesh=(1, 1), sharding_strategy="FULL_SHARD", **SHIPPED).prepare(seeded())
    with pytest.raises(ConfigError, match=r"so that replicas \* shards is 1"):
        FSDPStrategy(sharding_strategy="HYBRID_SHARD", **SHIPPED).prepare(seeded())
    model = seeded()
    with pytest.raises(ConfigError, match="must not hold what tensor_parallel splits, but holds `head`"):
        FSDPStrategy(ignored_modules=[model.head], **SHIPPED).prepare(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    with pytest.raises(ConfigError, match="a last one called 'tp', but has data"):
        FSDPStrategy(device_mesh=mesh, **SHIPPED).prepare(seeded())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tp"))
    with pytest.raises(ConfigError, match="axis 'tp', 1, but is 2"):
        FSDPStrategy(device_mesh=mesh, **SHIPPED).prepare(seeded())


class WideHeads(Heads):
    """Three heads, of which two ranks can't take equally many."""

    def __init__(self) -> None:
        super().__init__(heads=3)


@ranks(2)
def test_a_part_of_the_model_may_know_the_plan_and_validation_works():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Heads()

        def forward(self, inputs, targets):
            return self.inner(inputs, targets)

    wrapped = MMFullyShardedDataParallel(Around(), tensor_parallel=2)
    assert isinstance(wrapped.module.inner.embed.weight, DTensor)
    model, _ = FSDPStrategy(**SHIPPED).prepare(seeded())
    model.eval()
    with torch.no_grad():
        alone = seeded()(INPUTS[:4], TARGETS[:4])
        assert model.val_step((INPUTS[:4], TARGETS[:4])).item() == pytest.approx(alone.item(), abs=1e-6)


class Draws(Hook):
    """Draws a random number, as dropout does."""

    def before_train(self, runner) -> None:
        self.drawn = torch.rand(1).item()


@ranks(4)
def test_ranks_that_share_samples_draw_the_same_also_with_a_seed_for_each_rank(tmp_path: Path):
    draws = Draws()
    Runner(
        seeded(), tmp_path, train_dataloader=DataLoader(TensorDataset(INPUTS, TARGETS), BATCH // 2),
        train_cfg={"max_iters": 1}, optim_wrapper=optim_config(1, False), strategy=FSDPStrategy(**SHIPPED),
        default_hooks={"checkpoint": None}, custom_hooks=[draws], randomness={"seed": 1, "diff_rank_seed": True},
    ).train()  # fmt: skip
    first, also_first, second, also_second = all_gather_object(draws.drawn)
    assert first == also_first != second == also_second
