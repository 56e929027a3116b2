"""Ray Train starts the ranks, keeps the checkpoints, and starts again when a worker is lost: `python on_ray.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import ray.train
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from small import by_runner

from lockstep.hooks import Hook


class ReportToRay(Hook):
    """Hands the mean of the last four losses and the last checkpoint to Ray, which copies that to its storage."""

    priority = "LOWEST"  # after the hook that saves

    def after_train_epoch(self, runner) -> None:
        metrics = {"epoch": runner.epoch + 1, "loss": runner.message_hub.get_scalar("train/loss").mean(4)}
        saved = Checkpoint.from_directory(runner.message_hub.get_info("last_ckpt"))
        ray.train.report(metrics, saved if runner.rank == 0 else None)  # which every rank calls


def on_each_worker(config: dict) -> None:
    """Train from Ray's checkpoint on, if there is one: after a failure, or in a run that goes on."""
    found = ray.train.get_checkpoint()
    with found.as_directory() if found else nullcontext() as checkpoint:
        config["train"](config["work_dir"], (ReportToRay(), *config["hooks"]), checkpoint)


def fit(train: Callable, work_dir: str, storage: str, workers: int, hooks: tuple = ()) -> Result:
    return TorchTrainer(
        on_each_worker,
        train_loop_config={"train": train, "work_dir": work_dir, "hooks": hooks},
        # With GPUs: ScalingConfig(num_workers=workers, use_gpu=True), and backend="cpu:gloo,cuda:nccl".
        scaling_config=ScalingConfig(num_workers=workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    ).fit()


if __name__ == "__main__":
    print(fit(by_runner, "/shared/work_dirs/small", "/shared/ray", workers=2))
