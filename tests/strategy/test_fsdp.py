"""`FSDPStrategy`: its states, optimizers given as objects, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import TensorDataset

from lockstep.checkpoint import load_state, save_state
from lockstep.dist import get_world_size, is_distributed
from lockstep.errors import ConfigError
from lockstep.model import MMFullyShardedDataParallel, train_step
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.runner import Runner
from lockstep.strategy import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, build_strategy
from lockstep.testing import ranks, run_ranks

from ..runs import StopAfter
from .transformer import (
    ADAMW,
    BATCH,
    INPUTS,
    STEPS,
    TARGETS,
    Losses,
    Transformer,
    optim_config,
    own_batches,
    seeded,
    train_by_hand,
)

pytestmark = pytest.mark.layouts

TENSOR = {"degree": 2, "plan": {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}}
KINDS = {"single": SingleDeviceStrategy, "ddp": DDPStrategy, "fsdp": FSDPStrategy}


def prepared(kind: str, model: nn.Module, steps: int = 0, **options: Any):
    strategy = KINDS[kind](**options)
    model, optim_wrapper = strategy.prepare(model, optim_config())
    return strategy, continued(model, optim_wrapper, 0, steps), model, optim_wrapper


def continued(model: nn.Module, optim_wrapper: OptimWrapper, start: int, stop: int) -> list[float]:
    return [train_step(model, batch, optim_wrapper)["loss"].item() for batch in own_batches()[start:stop]]


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return (state.full_tensor() if isinstance(state, DTensor) else state.detach()).clone()


def assert_equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, dict):
            assert_equal(value, right[key])
        else:
            assert torch.equal(value, right[key]), key


def save_trained(kind: str, path: Path) -> tuple[dict, dict, list[float]]:
    strategy, _, model, optim_wrapper = prepared(kind, seeded(), 3)
    state = {"model": strategy.model_state(), "optimizer": strategy.optim_state()}
    save_state(path, state, {})
    saved = whole(state["model"]), whole(state["optimizer"]["state"])
    return *saved, continued(model, optim_wrapper, 3, 6)


def load_and_train(kind: str, path: Path) -> tuple[dict, dict, list[float]]:
    torch.manual_seed(99)  # other weights
    strategy, _, model, optim_wrapper = prepared(kind, Transformer())
    state = load_state(path, {"model": strategy.model_state(), "optimizer": strategy.optim_state()})
    strategy.load_state(state["model"], state["optimizer"])
    loaded = whole(strategy.model_state()), whole(strategy.optim_state()["state"])
    return *loaded, continued(model, optim_wrapper, 3, 6)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [(("ddp", 2), ("fsdp", 2)), (("fsdp", 2), ("ddp", 2)), (("fsdp", 2), ("fsdp", 4)), (("fsdp", 4), ("single", 1))],
    ids=str,
)
def test_a_checkpoint_of_one_strategy_is_loaded_by_another(saved_by, loaded_by, tmp_path: Path):
    saved = run_ranks(saved_by[1], save_trained, saved_by[0], tmp_path / "checkpoint")
    loaded = run_ranks(loaded_by[1], load_and_train, loaded_by[0], tmp_path / "checkpoint")
    weights, moments, _ = saved[0]
    assert {"exp_avg", "exp_avg_sq", "step"} <= moments["layers.0.linear1.weight"].keys()
    for rank_weights, rank_moments, _ in (*saved, *loaded):
        assert_equal(rank_weights, weights)
        assert_equal(rank_moments, moments)
    means = [
        torch.tensor([losses for *_, losses in results], dtype=torch.float64).mean(0).tolist()
        for results in (saved, loaded)
    ]
    assert means[1] == pytest.approx(means[0], rel=1e-5)


@ranks(2)
def test_states_are_taken_over_from_any_layout_and_after_a_validation():
    strategy, _, model, optim_wrapper = prepared("fsdp", seeded(), 2)
    with torch.no_grad():
        model.eval()
        model.val_step(own_batches()[0])  # the outermost parameters are whole now
        model_state, optim_state = strategy.model_state(), strategy.optim_state()
    model.train()
    assert all(isinstance(value, DTensor) for value in model_state.values())
    whole_state, whole_optim = whole(model_state), {**optim_state, "state": whole(optim_state["state"])}
    after = continued(model, optim_wrapper, 2, 4)
    for shape in (None, (2, 1), (1, 2)):
        other, _, other_model, other_wrapper = prepared("fsdp", Transformer(), device_mesh=shape)
        other.load_state(whole_state, whole_optim)
        assert_equal(whole(other.model_state()), whole_state)
        assert continued(other_model, other_wrapper, 2, 4) == pytest.approx(after, rel=1e-6)
    back, _, back_model, back_wrapper = prepared("ddp", Transformer())
    back.load_state(other.model_state(), other.optim_state())  # sharded over a mesh of two axes
    assert_equal(whole(back.model_state()), whole(other.model_state()))
    assert_equal(whole(back.optim_state()["state"]), whole(other.optim_state()["state"]))
    assert continued(back_model, back_wrapper, 4, 6) == pytest.approx(
        continued(other_model, other_wrapper, 4, 6), rel=1e-6
    )


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"cpu_offload": True}),
        (2, {"mixed_precision": "bf16", "activation_checkpointing": ["TransformerEncoderLayer"]}),
        (4, {"device_mesh": (2, 2), "cpu_offload": True}),
        (4, {"device_mesh": (2, 2), "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}),
        (2, {"tensor_parallel": TENSOR, "cpu_offload": True}),
        (4, {"tensor_parallel": TENSOR, "mixed_precision": "bf16"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_run_that_goes_on_is_the_one_that_never_stopped(size, options, tmp_path: Path):
    """With clipping; to the last bit."""
    whole_run = run_ranks(size, resumable, tmp_path / "whole", options, False)
    begun = run_ranks(size, resumable, tmp_path / "parts", options, False, 10)
    rest = run_ranks(size, resumable, tmp_path / "parts", options, True)
    for whole_losses, first, second in zip(whole_run, begun, rest, strict=True):
        assert first + second == whole_losses
        assert len(whole_losses) == STEPS
    alone, _ = run_ranks(1, train_by_hand, 1, True)[0]
    exact = "mixed_precision" not in options
    means = [sum(step) / size for step in zip(*whole_run, strict=True)]
    assert means == pytest.approx(alone, rel=0, abs=1e-5 if exact else 0.05)


def resumable(work_dir: Path, options: dict, resume: bool, stop_after: int | None = None) -> list[float]:
    """Return the losses of a run, from its checkpoint on, or up to it."""
    losses = Losses()
    strategy = FSDPStrategy(**options)
    shares = get_world_size() // (2 if "tensor_parallel" in options else 1)
    runner = Runner(
        seeded(),
        work_dir,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // shares, "shuffle": False},
        train_cfg={"max_epochs": 1},
        optim_wrapper=optim_config(1, True),
        default_hooks={"checkpoint": {"by_epoch": False, "interval": 10}},
        custom_hooks=[losses, StopAfter(stop_after)],
        strategy=strategy,
        resume=resume,
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    return losses.seen


@ranks(2)
def test_blocks_are_found_and_everybody_begins_as_rank_0():
    torch.manual_seed(torch.distributed.get_rank())
    model, optim_wrapper = build_strategy("fsdp").prepare(Transformer(), optim_config())
    assert isinstance(model, MMFullyShardedDataParallel)
    assert optim_wrapper.optimizer.param_groups[0]["params"] == list(model.parameters())
    units = [name for name, module in model.module.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", "layers.0", "layers.1", "layers.2"]
    torch.manual_seed(0)
    for (name, value), alone in zip(whole(model.state_dict()).items(), Transformer().parameters(), strict=True):
        assert torch.equal(value, alone.detach()), name


@ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_that_is_given_gets_the_sharded_parameters(wrapped):
    expected = prepared("fsdp", seeded(), 4)[1]
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    model, optim_wrapper = FSDPStrategy().prepare(model, OptimWrapper(optimizer) if wrapped else optimizer)
    assert optim_wrapper.optimizer is optimizer
    assert continued(model, optim_wrapper, 0, 4) == expected


@ranks(2)
def test_several_optimizers_train_the_sharded_parameters():
    model = seeded()
    optim_wrapper = OptimWrapperDict(
        layers=OptimWrapper(torch.optim.SGD(model.layers.parameters(), lr=0.1)),
        head=OptimWrapper(torch.optim.SGD(model.head.parameters(), lr=0.1)),
    )
    strategy = FSDPStrategy()
    model, optim_wrapper = strategy.prepare(model, optim_wrapper)
    before = whole(strategy.model_state())
    model(*own_batches()[0]).backward()
    optim_wrapper["head"].step()
    after = whole(strategy.model_state())
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight"}


@ranks(2)
def test_an_optimizer_that_can_not_be_handed_over_is_refused():
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*own_batches()[0]).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"AdamW has a state already.*Give its config"):
        FSDPStrategy().prepare(model, optimizer)
    other = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="SGD updates none of them"):
        FSDPStrategy().prepare(seeded(), torch.optim.SGD(other.parameters(), lr=1.0))
    model = seeded()
    with pytest.raises(ConfigError, match="SGD has parameters of another model"):
        FSDPStrategy().prepare(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0))


@ranks(1, fresh=True)
def test_one_process_without_a_group_becomes_a_group_of_one():
    assert not is_distributed()
    alone = prepared("single", seeded(), 3)[1]
    assert prepared("fsdp", seeded(), 3)[1] == pytest.approx(alone, rel=1e-6)
    assert is_distributed()


@ranks(2)
def test_a_model_on_the_meta_device_is_made_block_by_block_and_filled_from_a_state():
    source, _, model, optim_wrapper = prepared("fsdp", seeded(), 1)
    with torch.device("meta"):
        empty = Transformer()
    made: list[str] = []

    def init(module: nn.Module) -> None:
        made.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            parameter.zero_()

    strategy = FSDPStrategy(param_init_fn=init)
    other, other_wrapper = strategy.prepare(empty, optim_config())
    assert "MultiheadAttention" in made
    strategy.load_state(source.model_state(), source.optim_state())
    assert continued(other, other_wrapper, 1, 4) == continued(model, optim_wrapper, 1, 4)


@ranks(2)
def test_a_model_that_is_wrapped_already_is_taken_as_it_is():
    wrapped = MMFullyShardedDataParallel(seeded())
    strategy = FSDPStrategy()
    model, _ = strategy.prepare(wrapped, optim_config())
    assert model is wrapped
    assert strategy.model_state().keys() == Transformer().state_dict().keys()


@ranks(2)
def test_mmengines_arguments_are_understood():
    strategy = build_strategy(
        {
            "type": "FSDPStrategy",
            "model_wrapper": {
                "type": "MMFullyShardedDataParallel",
                "use_orig_params": True,
                "auto_wrap_policy": {
                    "type": "transformer_auto_wrap_policy",
                    "transformer_layer_cls": ["TransformerEncoderLayer"],
                },
            },
            "activation_checkpointing": {"check_fn": lambda module: isinstance(module, nn.TransformerEncoderLayer)},
            "state_dict_cfg": "full",
        }
    )
    model, _ = strategy.prepare(seeded(), optim_config())
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 4
    assert all("forward" in vars(layer) for layer in model.module.layers)


@ranks(2)
def test_wrong_options_are_refused():
    with pytest.raises(TypeError, match=r"unknown argument `auto_warp_policy`: did you mean `auto_wrap_policy`"):
        FSDPStrategy(auto_warp_policy="repeated_blocks").prepare(seeded())
    with pytest.raises(ConfigError, match=r"has the unknown key 'checkpoint_wrapper_fn'\. Known: `check_fn`"):
        FSDPStrategy(activation_checkpointing={"check_fn": len, "checkpoint_wrapper_fn": len})
    with pytest.raises(TypeError, match=r"`activation_checkpointing\.context_fn` must be a function without arguments"):
        FSDPStrategy(activation_checkpointing={"check_fn": len, "context_fn": ["mm"]})
    with pytest.raises(ValueError, match=r"names 'Layer'.*did you mean `LayerNorm`"):
        FSDPStrategy(activation_checkpointing=["Layer"]).prepare(seeded())


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


@ranks(2)
def test_outputs_of_some_operators_may_be_kept():
    losses, products = {}, {}
    stored = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for name, options in {
        "all": None,
        "none": ["TransformerEncoderLayer"],
        "some": {"check_fn": ["TransformerEncoderLayer"], "context_fn": stored},
    }.items():
        model, wrapper = FSDPStrategy(activation_checkpointing=options).prepare(seeded(), optim_config())
        with Products() as products[name]:
            losses[name] = [train_step(model, batch, wrapper)["loss"] for batch in own_batches()[:3]]
    assert losses["all"] == losses["none"] == losses["some"]
    assert products["all"].count == products["some"].count < products["none"].count


@ranks(1)
def test_activation_checkpointing_may_be_off():
    for off in (False, {"check_fn": None, "context_fn": None}):
        model, _ = FSDPStrategy(activation_checkpointing=off).prepare(seeded())
        assert not any("forward" in vars(part) for part in model.modules())
