"""`Runner(compile=...)` under the strategies that are PyTorch's own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size, init_dist
from lockstep.errors import ConfigError
from lockstep.model import compile_in_place
from lockstep.model.fsdp import MMFullyShardedDataParallel
from lockstep.runner import Runner
from lockstep.strategy import FSDPStrategy, build_strategy
from lockstep.testing import ranks, run_ranks

from .heads import Block, Heads
from .transformer import BATCH, INPUTS, TARGETS, Losses, mean_over_ranks, optim_config, seeded, train_by_hand

pytestmark = pytest.mark.layouts

# Traces forward and backward pass, and translates nothing; a graph break raises.
TRACED = {"backend": "aot_eager", "fullgraph": True}


def stored() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


CASES = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "fsdp": (2, FSDPStrategy()),
    "fsdp-recomputing": (2, FSDPStrategy(activation_checkpointing={"check_fn": ["Block"], "context_fn": stored})),
    "tp": (2, FSDPStrategy(tensor_parallel=2)),
    "fsdp-tp-recomputing": (4, FSDPStrategy(tensor_parallel=2, activation_checkpointing=["Block"])),
    "fsdp-whole": (2, FSDPStrategy(auto_wrap_policy=None)),
}
# What gathers parameters breaks the graph of the whole.
OPTIONS = {"fsdp-whole": {"backend": "aot_eager"}}


def trained(
    work_dir: Path, strategy: Any, compile_: Any, epochs: int = 1, make: Any = Heads, **changes: Any
) -> tuple[list[float], int, list[str]]:
    """Return the losses, the number of graphs, and the names in the state."""
    # torch looks for a gradient where there may be none, and hides the warning, but not from those who make it raise.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    torch._dynamo.reset()
    counters.clear()
    losses = Losses()
    shares = get_world_size() // (2 if "tensor_parallel" in getattr(strategy, "_wrapper", {}) else 1)
    runner = Runner(
        seeded(make),
        work_dir,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // shares, "shuffle": False},
        train_cfg={"max_epochs": epochs},
        optim_wrapper=optim_config(1, True),
        custom_hooks=[losses],
        randomness={"seed": 1},
        strategy=strategy,
        compile=compile_,
        **changes,
    )
    runner.train()
    return mean_over_ranks(losses.seen), counters["stats"]["unique_graphs"], sorted(runner.strategy.model_state())


@pytest.mark.parametrize("case", CASES)
def test_what_is_compiled_trains_alike_and_keeps_its_names(case: str, tmp_path: Path):
    size, strategy = CASES[case]
    alone, _ = run_ranks(1, train_by_hand, 1, True, Heads)[0]
    for losses, graphs, names in run_ranks(size, trained, tmp_path, strategy, OPTIONS.get(case, TRACED)):
        assert losses == pytest.approx(alone, rel=0, abs=1e-5)
        assert graphs == 1  # of the model, or of one block for all
        assert names == sorted(Heads().state_dict())


def wrapped_by_hand() -> nn.Module:
    return MMFullyShardedDataParallel(Heads(), auto_wrap_policy=["Block"])


def test_the_blocks_of_a_model_that_its_user_has_wrapped_are_compiled(tmp_path: Path):
    alone, _ = run_ranks(1, train_by_hand, 1, True, Heads)[0]
    losses, graphs, names = run_ranks(2, trained, tmp_path, "fsdp", TRACED, 1, wrapped_by_hand)[0]
    assert losses == pytest.approx(alone, rel=0, abs=1e-5)
    assert graphs == 1
    assert names == sorted(Heads().state_dict())


def resumed(work_dir: Path, strategy: str, compile_: Any) -> tuple[list[float], int, list[str]]:
    return trained(work_dir, strategy, compile_, epochs=2, resume=True, default_hooks={"checkpoint": None})


@pytest.mark.parametrize(("first", "second"), [(TRACED, False), (False, TRACED)], ids=["from compiled", "to compiled"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_goes_between_compiled_and_not(strategy: str, first: Any, second: Any, tmp_path: Path):
    (whole, *_), _ = run_ranks(2, trained, tmp_path / "whole", strategy, False, 2)
    (begun, *_), _ = run_ranks(2, trained, tmp_path / "work", strategy, first)
    (rest, *_), _ = run_ranks(2, resumed, tmp_path / "work", strategy, second)
    assert begun + rest == pytest.approx(whole, rel=0, abs=1e-5)


def compiled_by_hand() -> nn.Module:
    return torch.compile(Heads(), backend="aot_eager")


def compiled_blocks() -> nn.Module:
    model = Heads()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


@pytest.mark.parametrize("make", [compiled_by_hand, compiled_blocks])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_its_user_has_compiled_has_no_other_names(strategy: str, make: Any, tmp_path: Path):
    alone, _ = run_ranks(1, train_by_hand, 1, True, Heads)[0]
    losses, graphs, names = run_ranks(2, trained, tmp_path, strategy, False, 1, make)[0]
    assert losses == pytest.approx(alone, rel=0, abs=1e-5)
    assert graphs
    assert names == sorted(Heads().state_dict())


@ranks(2, fresh=True, timeout=240, warnings="default")
def test_torchs_own_backend_translates_the_blocks(tmp_path: Path):
    """New processes, because it keeps some of its own running."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    init_dist("pytorch")
    plain, *_ = trained(tmp_path / "plain", "fsdp", False)
    losses, graphs, _ = trained(tmp_path / "compiled", "fsdp", True)
    assert graphs == 1
    assert losses == pytest.approx(plain, rel=0, abs=1e-5)


def test_only_the_outermost_units_are_compiled_each_by_itself():
    model = Heads()
    assert set(FSDPStrategy().compiled_parts(model)) == set(model.blocks)
    assert set(FSDPStrategy(auto_wrap_policy=["Mlp", "Block"]).compiled_parts(model)) == set(model.blocks)
    assert FSDPStrategy(auto_wrap_policy=None).compiled_parts(model) == [model]
    compile_in_place(model, model.blocks, {"backend": "eager"})
    assert [type(block) for block in model.blocks] == [Block, Block]
    assert all("forward" in vars(block) for block in model.blocks)


@pytest.mark.parametrize("name", ["single", "fsdp"])
def test_it_is_no_argument_of_a_strategy(name: str):
    with pytest.raises(ConfigError, match="`compile` must be an argument of the Runner or the Session"):
        build_strategy({"type": name, "compile": True})
