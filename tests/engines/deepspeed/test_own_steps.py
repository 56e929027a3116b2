"""A model's own `train_step` under each stage of ZeRO, against one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lockstep.engines import load_engine
from lockstep.errors import ConfigError
from lockstep.strategy.deepspeed.engine import device_number_known
from lockstep.testing import ranks, run_ranks

from ..own_steps import (
    OF_WHOLE_PARAMETERS,
    SGD,
    STEPS,
    ByParts,
    Distillation,
    Mixup,
    Outside,
    PartsBesides,
    Penalty,
    Plain,
    RawBackward,
    RawThenStep,
    X,
    Y,
    alone,
    train_own,
)
from .training import STAGES, strategy_of

BF16 = {"bf16": {"enabled": True}}


def train_all(stage: int, kinds: list[type[Any]], counts: int = 1, **options: Any) -> list[list[float]]:
    return [train_own(kind, strategy_of(f"zero{stage}", **options), counts) for kind in kinds]


@pytest.mark.parametrize("counts", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_train_step_of_the_models_own_is_the_one_that_runs(stage: int, counts: int):
    kinds = [kind for kind in STEPS if stage < 3 or kind not in OF_WHOLE_PARAMETERS]
    for losses, kind in zip(run_ranks(2, train_all, stage, kinds, counts)[0], kinds, strict=True):
        assert losses == pytest.approx(alone(kind, counts), abs=1e-5, rel=0), kind


@pytest.mark.parametrize("counts", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_outside_of_the_model_counts_as_one_inside(stage: int, counts: int):
    (losses,) = run_ranks(2, train_all, stage, [Outside], counts)[0]
    assert losses == pytest.approx(alone(Plain, counts), abs=1e-5, rel=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_in_half_precision_its_parts_take_what_the_model_takes(stage: int):
    kinds = [Mixup, ByParts, PartsBesides]
    for losses, kind in zip(run_ranks(2, train_all, stage, kinds, **BF16)[0], kinds, strict=True):
        assert losses == pytest.approx(alone(kind), abs=0.02), kind


@ranks(2)
def test_parts_take_it_in_a_validation_too():
    model, _ = strategy_of("zero1", **BF16).prepare(ByParts(), SGD)
    assert model.val_step((X[:3], Y[:3])).shape == (3, 1)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_going_round_the_optim_wrapper_is_refused(stage: int):
    with pytest.raises(
        RuntimeError, match=r"`train_step` of RawBackward must run its backward pass by `optim_wrapper.update_params"
    ):
        train_own(RawBackward, strategy_of(f"zero{stage}"))
    with pytest.raises(RuntimeError, match="`step` must follow `update_params` or `backward`"):
        train_own(RawThenStep, strategy_of(f"zero{stage}"))


@ranks(2)
def test_a_share_of_a_parameter_is_not_taken_for_the_whole():
    for kind, name in ((Penalty, "head.weight"), (Distillation, "teacher.weight")):
        message = rf"`train_step` of {kind.__name__} must leave '{name}'.*Use stage=2, or strategy 'fsdp'"
        with pytest.raises(ConfigError, match=message):
            train_own(kind, strategy_of("zero3"))


@ranks(2)
def test_stage_3_needs_no_local_rank_in_the_environment():
    local_rank = os.environ.pop("LOCAL_RANK")
    try:
        train_own(Mixup, strategy_of("zero3"))
        assert "LOCAL_RANK" not in os.environ
    finally:
        os.environ["LOCAL_RANK"] = local_rank


@ranks(2)
def test_devices_may_be_named_by_their_uuids():
    """DeepSpeed asks the driver for free memory by the number of a GPU, which it reads from the variable."""
    cpu = load_engine("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
    cuda = load_engine("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3f2a")
        patch.setattr(cpu, "available_memory", lambda self: 2**40 + cuda._get_nvml_gpu_id(self, 0))
        train_own(Mixup, strategy_of("zero1"))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-3f2a"


@ranks(2)
def test_a_local_rank_is_no_number_of_a_device():
    """Where each rank sees its own device alone, all have number 0, whatever mpirun calls the local rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "5")
        patch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "5")
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        with device_number_known():
            assert os.environ["LOCAL_RANK"] == "0"
            assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ
        assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "5"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "5")
        train_own(Mixup, strategy_of("zero3"))
