"""What is refused before training, in a sentence that names the alternative; what optimizers are understood."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.model import MMDistributedDataParallel
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.registry import OPTIMIZERS
from lockstep.strategy import DeepSpeedOptimWrapper, DeepSpeedStrategy
from lockstep.strategy.deepspeed.config import complete_config, read_config
from lockstep.testing import ranks

from ...strategy.transformer import optim_config, own_batches, seeded

SGD = {"type": "SGD", "lr": 0.1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 0}, "`zero_optimization.stage` must be 1, 2 or 3, but is 0. Use strategy 'ddp'"),
        ({"amp": {"enabled": True}}, "`amp` must not be given.*no Apex any more; use fp16"),
        ({"managed_gradient_accumulation": True}, "`managed_gradient_accumulation` must not be given"),
        (
            {"stage": 2, "zero_optimization": {"stage": 1}},
            "`zero_optimization.stage` must be given once, but is 1 .* 2",
        ),
        (
            {"offload": True, "config": {"zero_optimization": {"offload_optimizer": {"device": "none"}}}},
            "`zero_optimization.offload_optimizer.device` must be given once, but is 'none' .* 'cpu' by offload=True",
        ),
        (
            {"bf16": True, "config": {"bf16": {"enabled": False}}},
            "`bf16.enabled` must be given once, but is False .* True",
        ),
        ({"zero_optimisation": {"stage": 1}}, "is no key of a DeepSpeed config: did you mean `zero_optimization`"),
        ({"config": {"gradient_clipping": 1.0}, "gradient_clipping": 0.5}, "`gradient_clipping` must be given once"),
        (
            {"config": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}},
            "`optimizer` must not be given.*optim_wr",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "`scheduler` must not be given to DeepSpeedStrategy: .*`param_scheduler`",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            "`torch_autocast.dtype` must be 'bfloat16', but is 'float16'.*Use fp16=True",
        ),
        ({"torch_autocast": True}, "`torch_autocast.dtype` must be 'bfloat16', but is None"),
        ({"config": "nowhere.json"}, "`config` must be a DeepSpeed config or the path of one.*nowhere.json"),
    ],
)
def test_what_contradicts_itself_is_refused_when_the_strategy_is_made(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        DeepSpeedStrategy(**arguments)


@pytest.mark.parametrize("given", ["images", 0])
def test_one_input_to_half_is_given_in_a_list(given: Any):
    with pytest.raises(
        TypeError, match=rf"`inputs_to_half` must be a list of positions and names or None, but is {given!r}"
    ):
        DeepSpeedStrategy(bf16=True, inputs_to_half=given)


def test_a_missing_installation_is_refused_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.strategy.deepspeed.strategy.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lockstep-engine\[deepspeed\]'"):
        DeepSpeedStrategy()


@pytest.mark.parametrize(
    ("config", "counts", "clip_grad", "message"),
    [
        ({"gradient_accumulation_steps": 2}, 4, None, "given once, but is 2 in .* and 4 as `accumulative_counts`"),
        (
            {"gradient_clipping": 1.0},
            None,
            {"max_norm": 0.5},
            "`gradient_clipping` must be given once.* in `clip_grad`",
        ),
        ({}, None, {"type": "value", "clip_value": 1.0}, "to the 2-norm alone.*Use strategy 'fsdp' or 'ddp'"),
        ({}, None, {"max_norm": 1.0, "norm_type": 1}, "to the 2-norm alone"),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, 4, None, "is 2 in .* and 4 as"),
    ],
)
def test_an_optim_wrapper_that_contradicts_the_config_is_refused(config, counts, clip_grad, message: str):
    with pytest.raises(ConfigError, match=message):
        complete_config(read_config(config, {}), counts=counts, clip_grad=clip_grad, world_size=2)


def test_what_is_not_said_is_taken_from_who_says_it():
    config = read_config({"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}, {})
    full = complete_config(config, counts=4, clip_grad={"max_norm": 0.5}, world_size=2)
    assert (full["gradient_accumulation_steps"], full["gradient_clipping"]) == (4, 0.5)
    assert full["train_micro_batch_size_per_gpu"] == 1
    config = read_config({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1}, {})
    full = complete_config(config, counts=None, clip_grad=None, world_size=2)
    assert (full["gradient_accumulation_steps"], full["gradient_clipping"]) == (4, 1.0)


def test_stage_and_offload_are_short_for_a_section(tmp_path: Path):
    assert read_config(None, {})["zero_optimization"] == {"stage": 1}
    assert read_config({}, {})["zero_optimization"] == {"stage": 1}
    half = {"fp16": {"enabled": "auto", "loss_scale": 0}}
    assert read_config(half, {"fp16": True})["fp16"] == {"enabled": True, "loss_scale": 0}
    pinned = {"zero_optimization": {"offload_optimizer": {"device": "auto", "pin_memory": True}}}
    assert read_config(pinned, {"offload": True})["zero_optimization"] == {
        "stage": 1,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert read_config(None, {"stage": 3, "offload": True})["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
    }  # fmt: skip
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    assert read_config(file, {"bf16": True, "aio": {"block_size": 1}}) == {
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "aio": {"block_size": 1},
    }  # fmt: skip


def refuse(message: str, model: nn.Module | None = None, optim: Any = None, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepSpeedStrategy(**options).prepare(model or seeded(), optim or optim_config())


@ranks(2)
def test_what_deepspeed_can_not_do_here_is_refused_before_training():
    refuse("`fp16` must not be enabled on the CPU.*Use bf16=True", fp16=True)
    refuse(
        "with one optimizer under DeepSpeed, but is of type OptimWrapperDict.*use strategy 'ddp'",
        optim={"layers": {"optimizer": SGD}},
    )
    model = seeded()
    wrapper = OptimWrapperDict(
        layers=OptimWrapper(torch.optim.SGD(model.layers.parameters(), lr=0.1)),
        head=OptimWrapper(torch.optim.SGD(model.head.parameters(), lr=0.1)),
    )
    refuse("with one optimizer under DeepSpeed, but is of type OptimWrapperDict", model, wrapper)
    refuse("For half precision give the strategy bf16=True", optim={"type": "AmpOptimWrapper", "optimizer": SGD})
    refuse("`model` must not be wrapped.*MMDistributedDataParallel", MMDistributedDataParallel(seeded()))
    with torch.device("meta"):
        refuse("on the meta device.*Use strategy 'fsdp'", seeded())
    refuse("is 2 in .* and 4 as `accumulative_counts`", optim=optim_config(4), gradient_accumulation_steps=2)
    refuse("is 2 in .* and 1 as `accumulative_counts`", optim=optim_config(1), gradient_accumulation_steps=2)
    batches = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2}
    refuse("DeepSpeed refuses .* 10 != 2", optim=optim_config(2), config=batches)
    refuse("must update parameters of the model", optim=torch.optim.SGD(seeded().parameters()))
    refuse("DeepSpeed refuses what it is given: ", zero_optimization={"stage": 1, "no_such_key": 1})
    adafactor = {"optimizer": {"type": "Adafactor"}}
    refuse("`optimizer` must update each number by itself.*Adafactor", optim=adafactor, stage=2)
    with pytest.raises(RuntimeError, match="must be given an engine"):
        DeepSpeedOptimWrapper(torch.optim.SGD(model.parameters())).engine  # noqa: B018


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(1.0))


@ranks(2)
def test_a_parameter_without_dimensions_is_refused():
    refuse(r"`gate` must have at least one dimension.*torch.ones\(1\)", Gate())


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_is_taken_as_an_object_too(stage: int, wrapped: bool):
    def losses(model: nn.Module, optim: Any) -> list[float]:
        model, optim_wrapper = DeepSpeedStrategy(stage=stage).prepare(model, optim)
        assert isinstance(optim_wrapper, DeepSpeedOptimWrapper)
        return [model.train_step(batch, optim_wrapper)["loss"].item() for batch in own_batches()[:3]]

    expected = losses(seeded(), {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}})
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert losses(model, OptimWrapper(optimizer) if wrapped else optimizer) == expected


def test_deepspeeds_optimizers_have_names():
    assert {"DeepSpeedCPUAdam", "FusedAdam", "FusedLamb"} <= set(OPTIMIZERS)


def test_deepspeed_is_imported_by_who_prepares_a_model_alone():
    code = "import sys, lockstep.strategy as s; s.DeepSpeedStrategy(stage=3); sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
