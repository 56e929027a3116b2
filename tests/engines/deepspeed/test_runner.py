"""A Runner whose strategy is DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import find_last_checkpoint, load_state
from lockstep.config import Config
from lockstep.dist import get_default_group, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.lint import check_config
from lockstep.model import BaseModel
from lockstep.runner import Runner
from lockstep.testing import ranks, run_ranks

from ...strategy.transformer import BATCH, INPUTS, STEPS, TARGETS, Losses, optim_config, seeded
from .training import STAGES, Training, config_of


def train(work_dir: Path, strategy: Any, **changes: Any) -> tuple[list[float], list[float]]:
    """Return the losses and the learning rates that they were trained with."""
    losses, rates = Losses(), Rates()
    arguments = {
        "train_dataloader": {
            "dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // get_world_size(), "shuffle": False,
        },
        "train_cfg": {"max_iters": STEPS},
        "optim_wrapper": optim_config(2, True),
        "param_scheduler": {"type": "LinearLR", "by_epoch": False, "end": 15},
        "default_hooks": {"checkpoint": {"by_epoch": False, "interval": 10}},
        "strategy": strategy,
        "randomness": {"seed": 7},
        **changes,
    }  # fmt: skip
    Runner(seeded(), work_dir, custom_hooks=[losses, rates], **arguments).train()
    return losses.seen, rates.seen


class Rates(Hook):
    """Remembers the learning rate of each step."""

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.seen.append(runner.optim_wrapper.get_lr()["lr"][0])


@ranks(2, fresh=True)
def begin(work_dir: Path, strategy: Any, changes: dict[str, Any]) -> None:
    """Train to the end, and leave behind what was seen."""
    seen = train(work_dir, strategy, launcher="pytorch", **changes)
    (work_dir / f"seen{get_rank()}.json").write_text(json.dumps(seen))


@ranks(2, fresh=True)
def go_on(work_dir: Path, strategy: Any, changes: dict[str, Any]) -> None:
    """Go on after iteration 10, in new processes, as the run before did."""
    checkpoint = next(path for path in work_dir.rglob("iter_10") if path.is_dir())
    losses, rates = train(
        work_dir / "again", strategy, launcher="pytorch", load_from=checkpoint, resume=True, **changes
    )
    whole_losses, whole_rates = json.loads((work_dir / f"seen{get_rank()}.json").read_text())
    assert losses == whole_losses[10:]
    assert rates == whole_rates[10:]
    assert len(losses) == STEPS - 10
    assert len(set(rates)) > 2


@pytest.mark.parametrize("stage", STAGES)
def test_new_processes_go_on_as_if_nothing_had_happened(stage: int, tmp_path: Path):
    begin(work_dir=tmp_path, strategy=config_of(f"zero{stage}"), changes={})
    go_on(work_dir=tmp_path, strategy=config_of(f"zero{stage}"), changes={})


def losses_by_json(work_dir: Path) -> list[float]:
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    file = work_dir / f"{get_rank()}.json"
    file.write_text(json.dumps({**config, "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}))
    optim = {"optimizer": optim_config(2, True)["optimizer"]}
    return train(work_dir, {"type": "deepspeed", "config": str(file)}, optim_wrapper=optim)[0]


def losses_by_ddp(work_dir: Path) -> list[float]:
    return train(work_dir, "ddp")[0]


def test_what_a_deepspeed_config_says_means_what_an_optim_wrapper_says(tmp_path: Path):
    by_json, by_ddp = run_ranks(2, losses_by_json, tmp_path), run_ranks(2, losses_by_ddp, tmp_path)
    for own, expected in zip(by_json, by_ddp, strict=True):
        assert own == pytest.approx(expected, abs=5e-6, rel=0)


class Digits(BaseModel):
    """Tells pictures of ten kinds apart, each of them a noisy copy of a pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        scores = self.layers(inputs)
        if mode == "loss":
            return {"loss_class": nn.functional.cross_entropy(scores, labels)}
        return scores.argmax(1) == labels


class Accuracy(BaseMetric):
    """Share of the pictures that were told right."""

    def process(self, data_batch: Any, data_samples: Tensor) -> None:
        self.results.extend(data_samples.tolist())

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results)}


def digits(count: int, seed: int) -> dict[str, Any]:
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    pictures = patterns[labels] + torch.randn(count, 64, generator=generator)
    return {"dataset": TensorDataset(pictures, labels), "batch_size": 16}


@ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_digits_are_learned_and_validated_from_end_to_end(stage: int, tmp_path: Path):
    torch.manual_seed(5)
    runner = Runner(
        Digits(),
        tmp_path,
        train_dataloader=digits(320, seed=1),
        val_dataloader=digits(33, seed=2),  # one rank has a batch more than the other
        val_evaluator=Accuracy(),
        train_cfg={"max_epochs": 2},
        optim_wrapper={"type": "DeepSpeedOptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-2}},
        strategy={"type": "DeepSpeedStrategy", "stage": stage, "gradient_clipping": 1.0},
    )
    model = runner.train()
    assert runner.last_evaluation.metrics["accuracy"] > 0.9
    assert model.module.training
    checkpoint = find_last_checkpoint(tmp_path)
    again = Runner(
        Digits(), tmp_path / "again", val_dataloader=digits(33, seed=2), val_evaluator=Accuracy(),
        strategy={"type": "deepspeed", "stage": stage}, load_from=checkpoint,
    )  # fmt: skip
    assert again.val() == runner.last_evaluation.metrics


@ranks(2)
def test_an_average_of_the_weights_is_kept_where_they_are_in_memory(tmp_path: Path):
    average = {"custom_hooks": [{"type": "EMAHook"}], "optim_wrapper": optim_config()}

    def checkpoint_of(strategy: Any, name: str) -> dict[str, Any]:
        runner = Runner(
            seeded(), tmp_path / name, strategy=strategy, train_cfg={"max_iters": 6},
            train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": 4, "shuffle": False}, **average,
        )  # fmt: skip
        runner.train()
        weights = {"model": {key: value.clone() for key, value in seeded().state_dict().items()}}
        return load_state(find_last_checkpoint(tmp_path / name), weights)["model"]

    expected, found = checkpoint_of("ddp", "ddp"), checkpoint_of(config_of("zero2"), "zero2")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"ZeRO stage 3 keeps them in pieces.*Use stage=2, or strategy 'fsdp'"):
        checkpoint_of(config_of("zero3"), "zero3")


def test_a_config_is_checked_before_anything_is_built():
    config = Config(
        {
            "model": {"type": "torch.nn.Linear", "in_features": 1, "out_features": 1},
            "strategy": {"type": "DeepSpeedStrategy", "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
            "optim_wrapper": {"type": "DeepSpeedOptimWrapper", "optimizer": {"type": "DeepSpeedCPUAdam", "lr": 1e-3}},
        }
    )
    check_config(config)
    config["optim_wrapper"]["accumulative_count"] = 2
    with pytest.raises(ConfigError, match="did you mean `accumulative_counts`"):
        check_config(config)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_batches_do_not_wait_for_the_device_and_calls_wait_as_long_as_those_of_lockstep(stage: int):
    training = Training(f"zero{stage}")
    accelerator = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"
    with patch(f"{accelerator}.synchronize") as wait:
        training.run(0, 5)
    assert not wait.called
    groups: Any = (get_default_group(), training.model.model.data_parallel_group)
    default, own = (group._get_backend(torch.device("cpu")).options._timeout for group in groups)
    assert own == default


@ranks(2)
def test_what_a_device_copies_to_the_host_is_complete_before_a_short_window_is_evened_out(tmp_path: Path):
    with (
        patch("lockstep.strategy.deepspeed.optim.get_device", return_value="cuda"),
        patch("torch.accelerator.synchronize") as wait,
    ):
        train(tmp_path, {"type": "deepspeed", "offload": True}, optim_wrapper=optim_config(3, True))
    assert STEPS % 3
    assert wait.call_count == 1
