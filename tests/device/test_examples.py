"""Each example that needs torch alone trains on the simulated accelerator; what it reaches is tested on the CPU.

An example that makes a tensor on the host fails here as on a GPU, and so does what it calls.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import Start, finish

EXAMPLES = Path(__file__).parents[2] / "examples"
SITE = Path(__file__).parent / "site"
CONFIGS = {
    "custom": ("custom_hooks.0.seconds=1",),
    "digits": ("train_cfg.max_epochs=1",),
    "gan": ("train_cfg.max_iters=20", "train_cfg.val_interval=10"),
    "language_model": (
        "model.width=64", "model.layers=2", "train_dataloader.batch_size=8", "val_dataloader.dataset.windows=64",
        "train_cfg.max_iters=4", "train_cfg.val_interval=4",
    ),
    "local_sgd": ("train_cfg.max_epochs=1",),
}  # fmt: skip


@pytest.mark.parametrize("example", CONFIGS)
def test_a_config_is_trained(example: str, start: Start, tmp_path: Path):
    told = run(start, tmp_path, "train", EXAMPLES / example / "config.py", "--cfg-options", *CONFIGS[example])
    assert "trained in" in told


@pytest.mark.parametrize(
    "command",
    [
        "digits/train.py",
        "huggingface_style/fine_tune.py --pretraining-iters 10",
        "own_loop/gan.py ddp",
        "own_loop/gan.py fsdp",
        "own_loop/gradient_penalty.py ddp",
        "own_loop/rollouts.py ddp",
        "own_loop/teacher.py fsdp",
    ],
)
def test_a_script_trains(command: str, start: Start, tmp_path: Path):
    script, *words = command.split()
    assert "trained in" in run(start, tmp_path, "launch", EXAMPLES / script, *words)


def run(start: Start, folder: Path, command: str, file: Path, *words: object) -> str:
    """Start an example on two ranks, and return what it wrote."""
    paths = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
    words = ("-m", "lockstep", command, file, "--nproc", 2, *words)
    told = finish(start(*words, folder=folder, PYTHONPATH=paths, OMP_NUM_THREADS="1"))
    assert "2 ranks on sim over simccl" in told
    return told
