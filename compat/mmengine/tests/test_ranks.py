"""Users' code on two ranks: evaluations of several sets in one loop, and the variables of Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from documented.toys import Accuracy, Net, Points, training_only

from lockstep.dist import get_rank
from lockstep.errors import CollectiveMismatchError
from lockstep.testing import ranks
from mmengine.hooks import Hook
from mmengine.registry import LOOPS
from mmengine.runner import Runner, ValLoop


class Counted(Accuracy):
    """How many samples there were, of which each is counted once."""

    def compute_metrics(self, results):
        return {"samples": sum(one["size"] for one in results)}


@LOOPS.register_module(force=True)
class SeveralSets(ValLoop):
    """Validates on further sets after the first one, as packages do."""

    def __init__(self, runner, dataloader, evaluator, more, fp16=False):
        super().__init__(runner, dataloader, evaluator, fp16)
        self.more = [(runner.build_dataloader(data), runner.build_evaluator(metric)) for data, metric in more]

    def run(self):
        self.runner.call_hook("before_val")
        self.runner.call_hook("before_val_epoch")
        self.runner.model.eval()
        metrics = {}
        for data, evaluator in [(self.dataloader, self.evaluator), *self.more]:
            for batch in data:
                with torch.no_grad():
                    outputs = self.runner.model.val_step(batch)
                evaluator.process(data_samples=outputs, data_batch=batch)
            metrics.update(evaluator.evaluate(len(data.dataset)))
        self.runner.call_hook("after_val_epoch", metrics=metrics)
        self.runner.call_hook("after_val")
        return metrics


def data(size, batch_size=2):
    return {
        "dataset": Points(size), "batch_size": batch_size, "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": {"type": "default_collate"},
    }  # fmt: skip


@ranks(2)
def test_a_call_on_one_rank_alone_is_told_by_the_lines_of_the_user(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    runner = Runner(**training_only(tmp_path, model=Net(), train_dataloader=data(8), launcher="pytorch", visualizer=[]))
    with pytest.raises(CollectiveMismatchError) as caught:
        _ = runner.train_dataloader if get_rank() == 0 else runner.train()
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  rank ")]
    assert len(lines) == 2
    assert all("test_ranks.py:" in line for line in lines)


@ranks(2)
def test_a_validation_of_several_sets(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # of torch, when it imports its optimizers
    torch.manual_seed(0)
    more = [(data(6), {"type": Counted, "prefix": "second"}), (data(4), {"type": Accuracy, "prefix": "third"})]
    runner = Runner(
        **training_only(
            tmp_path,
            model=Net(),
            train_dataloader=data(12),
            val_dataloader=data(8),
            val_evaluator={"type": Counted, "prefix": "first"},
            val_cfg={"type": "SeveralSets", "more": more},
            launcher="pytorch",
            visualizer=[],  # OpenCV, which draws, changes the environment
            default_hooks={"checkpoint": {"type": "CheckpointHook", "save_best": "third/accuracy", "rule": "greater"}},
        )
    )
    runner.train()
    metrics = dict(runner.val_loop.metrics)
    assert (metrics["first/samples"], metrics["second/samples"]) == (8, 6)
    assert 0 <= metrics["third/accuracy"] <= 1
    assert runner.message_hub.get_scalar("val/second/samples").current() == 6
    if get_rank() == 0:
        assert list(tmp_path.glob("*/best_third_accuracy*"))


class Noted(Hook):
    """Notes what hooks get when a run resumes."""

    keys = frozenset[str]()

    def after_load_checkpoint(self, runner, checkpoint):
        self.keys = frozenset(checkpoint)


@ranks(2)
def test_two_ranks_write_a_file_and_resume(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    hook = {"type": "CheckpointHook", "interval": 1, "as_files": True}
    options = {
        "train_dataloader": data(8),
        "launcher": "pytorch",
        "visualizer": [],
        "default_hooks": {"checkpoint": hook},
    }
    Runner(**training_only(tmp_path, model=Net(), **options)).train()
    if get_rank() == 0:
        content = torch.load(next(tmp_path.glob("epoch_*.pth")), weights_only=False)
        assert {"state_dict", "optimizer", "meta", "message_hub"} <= content.keys()
    runner = Runner(**training_only(tmp_path, model=Net(), resume=True, custom_hooks=[noted := Noted()], **options))
    runner.train()
    assert {"state_dict", "message_hub", "param_schedulers"} <= noted.keys


_TASK = """
import os
import stubs
from mmengine.dist import get_rank, init_dist
init_dist("slurm")
print("local", os.environ["LOCAL_RANK"], "rank", get_rank())
"""


def test_slurm_says_the_local_rank(tmp_path: Path) -> None:
    tasks = []
    for task in range(2):
        slurm = {
            "PROCID": task,
            "LOCALID": task,
            "NTASKS": 2,
            "NNODES": 1,
            "NODEID": 0,
            "STEP_ID": 0,
            "JOB_ID": os.getpid(),
        }
        environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environ |= {f"SLURM_{key}": str(value) for key, value in slurm.items()}
        environ |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "localhost"}
        environ["LOCAL_RANK"] = "0"  # which the scripts of packages set
        paths = [str(Path(__file__).parent), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-c", _TASK]
        tasks.append(subprocess.Popen(command, env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE))
    try:
        said = [task.communicate(timeout=200)[0].split() for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert said == [["local", str(task), "rank", str(task)] for task in range(2)]
