"""Every example, shortened, on two real ranks and from the command line, as its reader starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lockstep.config import Config
from lockstep.lint import find_faults

EXAMPLES = Path(__file__).parents[2] / "examples"


class Run(NamedTuple):
    """What a training has left behind."""

    folder: Path
    records: list[dict[str, Any]]

    def of(self, mode: str, name: str) -> list[float]:
        """Return a quantity from its first to its last value."""
        return [record[name] for record in self.records if record["mode"] == mode]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., list[Run]]:
    """Return a function that starts an example on two ranks and returns its runs, each of which has to end well."""

    def start(command: str, example: str, *words: str) -> list[Run]:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", command, str(EXAMPLES / example), "--nproc", "2", *words],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        folders = [tmp_path / name for name in re.findall(r"^run +(.+)$", done.stdout, re.MULTILINE)]
        assert done.stdout.count("2 ranks on") == len(folders)
        return [Run(folder, records_in(folder)) for folder in folders]

    return start


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("config", sorted(EXAMPLES.glob("*/config.py")), ids=lambda path: path.parent.name)
def test_configs_have_no_faults(config: Path):
    assert find_faults(Config.fromfile(config)) == []


def test_the_language_model_learns_alike_under_ddp_and_fsdp(start):
    short = (
        "model.width=64", "model.layers=2", "train_dataloader.batch_size=8", "val_dataloader.dataset.windows=64",
        "train_cfg.max_iters=60", "train_cfg.val_interval=30", "param_scheduler.0.end=10", "param_scheduler.1.begin=10",
    )  # fmt: skip
    runs = [
        start("train", "language_model/config.py", "--cfg-options", *short, *more)[0]
        for more in ((), ("strategy=fsdp",))
    ]
    ddp, fsdp = (run.of("val", "nats_per_byte") for run in runs)
    assert 3.4 > ddp[0] > ddp[1]
    assert ddp[1] < 3.0
    assert fsdp == pytest.approx(ddp, rel=1e-3)
    assert runs[0].of("train", "loss")[0] > runs[0].of("train", "loss")[-1]


def test_the_gan_draws_ever_more_like_the_real_ones(start):
    short = ("train_cfg.max_iters=400", "train_cfg.val_interval=100", "train_dataloader.batch_size=16")
    (run,) = start("train", "gan/config.py", "--cfg-options", *short)
    distances = run.of("val", "frechet_distance")
    assert distances[-1] < 0.8 * distances[0]
    assert run.of("train", "generator.lr")[-1] == 5e-4
    assert run.of("train", "discriminator.lr")[-1] == 1e-3
    drawings = {path.name: path.read_bytes() for path in (run.folder / "images").iterdir()}
    assert drawings.keys() == {f"drawings_{iteration}.png" for iteration in (100, 200, 300, 400)}
    assert all(content.startswith(b"\x89PNG") for content in drawings.values())
    assert len(set(drawings.values())) == 4


def test_models_that_know_nothing_of_lockstep_are_fine_tuned(start):
    pretraining, fine_tuning = start("launch", "huggingface_style/fine_tune.py", "--pretraining-iters", "60")
    assert pretraining.of("train", "loss")[-1] < 0.8 * pretraining.of("train", "loss")[0]
    assert fine_tuning.of("val", "accuracy")[-1] > 65


def test_a_hook_and_a_metric_of_ones_own(start):
    (run,) = start("train", "custom/config.py", "--cfg-options", "custom_hooks.0.seconds=1")
    assert 1 <= len(run.of("val", "accuracy")) < 100
    assert run.of("val", "accuracy")[-1] > 85
    assert 20 < run.of("val", "worst_class_accuracy")[-1] <= run.of("val", "accuracy")[-1]
    assert "the time of 1 s is over after epoch" in (run.folder / "log.txt").read_text()
    assert len(list(run.folder.glob("best_worst_class_accuracy_epoch_*"))) == 1


@pytest.mark.parametrize(
    ("example", "strategy", "metric", "between"),
    [
        ("gan", "ddp", "radius", (0.5, 1.6)),
        ("gan", "fsdp", "radius", (0.5, 1.6)),
        ("gradient_penalty", "ddp", "accuracy", (0.85, 1.0)),
        ("teacher", "fsdp", "accuracy", (0.85, 1.0)),
        ("rollouts", "ddp", "distance", (0.0, 1.5)),
    ],
)
def test_loops_by_hand_learn(start, example, strategy, metric, between):
    (run,) = start("launch", f"own_loop/{example}.py", strategy)
    low, high = between
    assert low <= run.of("val", metric)[-1] <= high


def test_examples_of_own_loops_have_at_most_forty_lines():
    for file in (EXAMPLES / "own_loop").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 40, file
