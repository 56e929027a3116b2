"""Trainings that a signal stops: where the ranks agree to stop, what is saved, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = pytest.mark.jobs

TRAINING = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Runner
from lockstep.hooks import Hook

torch.manual_seed(0)
x = torch.randn(96, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
slow = float(os.environ.get("SLOW", "0"))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    def forward(self, x):
        time.sleep(slow if self.training else 4 * slow)
        return self.layers(x)

class Tell(Hook):
    def tell(self, runner, *what):
        print(json.dumps([runner.rank, os.getpid(), *what]), flush=True)
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.tell(runner, "train", runner.iter + 1, float(outputs["loss"]))
    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.tell(runner, "val", batch_idx, 0.0)
    def before_save_checkpoint(self, runner, checkpoint):
        self.tell(runner, "save", runner.iter, 0.0)
        time.sleep(2 * slow)

runner = Runner(
    Net(), "work_dir", loss=nn.MSELoss(), randomness=dict(seed=1), resume="--resume" in sys.argv, log_level="WARNING",
    train_dataloader=DataLoader(data, batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")), shuffle=True,
                                num_workers=int(os.environ.get("WORKERS", "0"))),
    val_dataloader=DataLoader(data, batch_size=7), custom_hooks=[Tell()],
    strategy=os.environ.get("STRATEGY"),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01), accumulative_counts=int(os.environ.get("WINDOW", "1"))),
    train_cfg=json.loads(os.environ.get("TRAIN_CFG", '{"max_epochs": 3}')),
    default_hooks=dict(checkpoint=dict(interval=1, save_optimizer="WEIGHTS" not in os.environ,
                                       by_epoch="max_iters" not in os.environ.get("TRAIN_CFG", ""))),
)
model = runner.train()
print(json.dumps([runner.rank, os.getpid(), "end", runner.iter, 0.0]), flush=True)
"""

SESSION = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Session

torch.manual_seed(0)
x = torch.randn(96, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
slow = float(os.environ.get("SLOW", "0"))
session = Session("work_dir", resume="--resume" in sys.argv, randomness=dict(seed=1), log_level="WARNING")
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
loader = DataLoader(data, batch_size=8 // session.world_size, shuffle=True)
model, optimizer, loader = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
held_out = session.prepare_evaluation(DataLoader(data, batch_size=7))
for epoch in session.epochs(3):
    for inputs, targets in loader:
        time.sleep(slow)
        loss = nn.functional.mse_loss(model(inputs), targets)
        session.step(loss)
        print(json.dumps([session.rank, os.getpid(), "train", session.iter + 1, float(loss)]), flush=True)
    with torch.no_grad():
        for index, (inputs, targets) in enumerate(held_out):
            print(json.dumps([session.rank, os.getpid(), "val", index, 0.0]), flush=True)
            time.sleep(4 * slow)
print(json.dumps([session.rank, os.getpid(), "end", session.iter, 0.0]), flush=True)
"""


SLOW_PARTS = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, slow):
        super().__init__()
        self.layer, self.slow = nn.Linear(2, 1), slow
        self.wait("build")
    def forward(self, x, y):
        self.wait("first")
        return (self.layer(x) - y).square().mean()
    def wait(self, where):
        if self.slow == where:
            print("slow", flush=True)
            time.sleep(1000)

data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
"""
SLOW_CONFIG = """
from parts import Net, data

model = dict(type=Net, slow={slow!r})
train_dataloader = dict(dataset=data, batch_size=2)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.01))
train_cfg = dict(max_epochs=1)
"""


class Job:
    """A training in processes of its own."""

    def __init__(self, folder: Path, ranks: int, script: str, *words: str, **environment: str) -> None:
        (folder / "train.py").write_text(script)
        command = [sys.executable, "train.py"]
        if ranks > 1:
            command = [sys.executable, "-m", "lockstep", "launch", "--nproc", str(ranks), "train.py"]
        self.errors = folder / "errors"
        self.told: list[list] = []
        self.shown = ""
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *words], cwd=folder, env=os.environ | environment, text=True,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def until(self, kind: str, number: int, rank: int = 0) -> None:
        """Read what the ranks tell until one tells this."""
        for told in self._listen():
            if told[0] == rank and told[2:4] == [kind, number]:
                return
        pytest.fail(f"no rank {rank} told {kind} {number}: {self.told[-5:]}\n{self.errors.read_text()}")

    def _listen(self):
        for line in self.process.stdout:
            if line.startswith("["):
                self.told.append(json.loads(line))
                yield self.told[-1]
            else:
                self.shown += line

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        for _ in self._listen():
            pass
        return self.process.wait(timeout=60)

    def losses(self, rank: int = 0) -> dict[int, float]:
        return {number: loss for of, _, kind, number, loss in self.told if (of, kind) == (rank, "train")}

    def pid(self, rank: int) -> int:
        return next(pid for of, pid, *_ in self.told if of == rank)


@cache
def whole(ranks, script, **environment):
    """Return the losses of a training that nothing stops."""
    with TemporaryDirectory() as folder, Job(Path(folder), ranks, script, **environment) as job:
        assert job.end() == 0
        return job.losses()


def check_stop_and_resume(folder, ranks, job, script=TRAINING, **environment):
    """Check that a job that has been asked to stop did so, with a checkpoint, and goes on as if it had not."""
    assert job.end() == 75, (folder / "errors").read_text()
    done = [max(job.losses(rank)) for rank in range(ranks)]
    assert len(set(done)) == 1
    with Job(folder, ranks, script, "--resume", **{**environment, "SLOW": "0"}) as resumed:
        assert resumed.end() == 0, (folder / "errors").read_text()
    assert min(resumed.losses()) == done[0] + 1
    assert {**job.losses(), **resumed.losses()} == whole(ranks, script, **{**environment, "SLOW": "0"})
    return done[0]


def check_a_signal_to_one_rank(folder, strategy):
    """Check that all ranks of a strategy stop with the one that gets a signal, and that the run goes on."""
    script = TRAINING.replace('strategy=os.environ.get("STRATEGY")', f"strategy={strategy!r}")
    with Job(folder, 2, script, SLOW="0.05") as job:
        job.until("train", 14)
        os.kill(job.pid(1), signal.SIGTERM)
        assert check_stop_and_resume(folder, 2, job, script) in (14, 15)


def test_a_signal_in_one_process_saves_the_iteration_and_ends_it(tmp_path):
    with Job(tmp_path, 1, TRAINING, SLOW="0.05") as job:
        job.until("train", 5)
        job.process.send_signal(signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 1, job) in (5, 6)
    assert "SIGTERM on rank 0: stopped after iteration" in job.shown


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("fsdp", 1)])
def test_a_signal_to_one_rank_stops_all_after_the_same_iteration(tmp_path, strategy, rank):
    with Job(tmp_path, 2, TRAINING, SLOW="0.05", STRATEGY=strategy) as job:
        job.until("train", 15, rank)
        os.kill(job.pid(rank), signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 2, job, STRATEGY=strategy) in (15, 16)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])  # a terminal that is closed sends the latter
def test_a_signal_to_the_launcher_reaches_the_ranks(tmp_path, number):
    with Job(tmp_path, 2, TRAINING, SLOW="0.05") as job:
        job.until("train", 5)
        job.process.send_signal(number)
        check_stop_and_resume(tmp_path, 2, job)


def test_several_signals_while_it_stops_change_nothing(tmp_path):
    with Job(tmp_path, 2, TRAINING, SLOW="0.1") as job:
        job.until("train", 5)
        for _ in range(10):
            job.process.send_signal(signal.SIGUSR1)
            time.sleep(0.02)
        check_stop_and_resume(tmp_path, 2, job)


@pytest.mark.parametrize("script", [TRAINING, SESSION], ids=["runner", "session"])
def test_a_signal_that_comes_when_it_has_stopped_does_not_change_the_exit_code(tmp_path, script):
    again = "import atexit, os\natexit.register(lambda: os.kill(os.getpid(), 15))\n"
    with Job(tmp_path, 1, again + script, SLOW="0.1") as job:
        job.until("train", 3)
        os.kill(job.pid(0), signal.SIGTERM)
        assert job.end() == 75, (tmp_path / "errors").read_text()


def test_the_first_iteration_can_be_stopped(tmp_path):
    with Job(tmp_path, 2, TRAINING, SLOW="0.5") as job:
        job.until("train", 1)
        os.kill(job.pid(0), signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 2, job) in (1, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_before_the_first_iteration_there_is_nothing_to_save(tmp_path, ranks):
    stopping = """def before_train(self, runner):
        if runner.rank == 0:
            os.kill(os.getpid(), 15)
        time.sleep(1)
    def tell("""
    with Job(tmp_path, ranks, TRAINING.replace("def tell(", stopping)) as job:
        assert job.end() == 75, (tmp_path / "errors").read_text()
    assert "training stops before it begins, so that there is nothing to save" in job.shown
    assert "stopped before the first iteration: nothing is saved. Start the same command again" in job.shown
    if ranks > 1:
        last = (tmp_path / "errors").read_text().rstrip().rpartition("error: ")[2]
        assert last.startswith("a signal asked the training to stop before the first iteration: nothing is saved.")
        assert last.endswith("Start the same command again (exit code 75)")
    assert job.told == []


def test_a_checkpoint_without_the_optimizers_state_does_not_do(tmp_path):
    with Job(tmp_path, 1, TRAINING, SLOW="0.1", WEIGHTS="1") as job:
        job.until("save", 12)
        job.process.send_signal(signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 1, job) == 12


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_validation_is_abandoned_and_made_up_for(tmp_path, ranks):
    with Job(tmp_path, ranks, TRAINING, SLOW="0.1") as job:
        job.until("val", 1)
        os.kill(job.pid(ranks - 1), signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, ranks, job) == 12
    batches = [number for _, _, kind, number, _ in job.told if kind == "val"]
    assert max(batches) < 4  # of 14 or 7


def test_a_save_is_completed(tmp_path):
    with Job(tmp_path, 2, TRAINING, SLOW="0.1") as job:
        job.until("save", 12)
        os.kill(job.pid(0), signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 2, job) == 12


def test_a_window_of_accumulation_is_completed(tmp_path):
    with Job(tmp_path, 2, TRAINING, SLOW="0.05", WINDOW="3") as job:
        job.until("train", 4)
        os.kill(job.pid(1), signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 2, job, WINDOW="3") == 6


def test_a_loop_by_iterations_stops_and_goes_on(tmp_path):
    by_iter = json.dumps({"by_epoch": False, "max_iters": 30, "val_interval": 20})
    with Job(tmp_path, 2, TRAINING, SLOW="0.05", TRAIN_CFG=by_iter) as job:
        job.until("train", 14)
        os.kill(job.pid(1), signal.SIGTERM)
        assert check_stop_and_resume(tmp_path, 2, job, TRAIN_CFG=by_iter) in (14, 15)


def test_after_the_last_iteration_the_training_ends_as_usual(tmp_path):
    with Job(
        tmp_path, 2, TRAINING, SLOW="0.05", TRAIN_CFG='{"max_epochs": 1, "val_interval": 5, "val_begin": 5}'
    ) as job:
        job.until("save", 12)
        os.kill(job.pid(0), signal.SIGTERM)
        assert job.end() in (0, 75)


@pytest.mark.parametrize(("ranks", "when"), [(1, ("val", 1)), (2, ("train", 5)), (2, ("val", 1))])
def test_a_session_stops_and_goes_on(tmp_path, ranks, when):
    with Job(tmp_path, ranks, SESSION, SLOW="0.05") as job:
        job.until(*when)
        os.kill(job.pid(ranks - 1), signal.SIGTERM)
        check_stop_and_resume(tmp_path, ranks, job, SESSION)


@pytest.mark.parametrize("is_passed_on", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_and_stops_and_the_last_line_says_how_to_go_on(tmp_path, ranks, is_passed_on):
    with Job(tmp_path, ranks, SESSION, SLOW="0.05") as job:
        job.until("train", 5)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal sends it
        if is_passed_on:  # as `timeout --foreground` does, which the terminal signals, too
            time.sleep(0.005)
            job.process.send_signal(signal.SIGINT)
        job.end()
        last = (job.errors.read_text() if ranks > 1 else job.shown).splitlines()[-1]
        check_stop_and_resume(tmp_path, ranks, job, SESSION)
    assert "again with resume=True, or --resume (exit code 75)" in last


@pytest.mark.parametrize(("ranks", "code"), [(1, -signal.SIGINT), (2, 130)])
def test_a_second_ctrl_c_ends_at_once(tmp_path, ranks, code):
    with Job(tmp_path, ranks, SESSION, SLOW="5") as job:
        job.until("train", 1)
        time.sleep(1.0)  # it is in the second iteration now, which takes long
        for _ in range(2):
            os.killpg(job.process.pid, signal.SIGINT)
            time.sleep(0.5)
        assert job.end() == code
    assert not list((tmp_path / "work_dir").glob("*/iter_*"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_all_processes_spares_the_workers_of_the_data(tmp_path, name):
    with Job(tmp_path, 1, TRAINING, SLOW="0.05", WORKERS="2") as job:
        job.until("train", 5)
        os.killpg(job.process.pid, signal.Signals[name])
        check_stop_and_resume(tmp_path, 1, job, WORKERS="2")


def test_an_empty_list_of_signals_leaves_them_alone(tmp_path):
    with Job(tmp_path, 1, TRAINING.replace("custom_hooks", "stop_signals=[], custom_hooks"), SLOW="0.05") as job:
        job.until("train", 5)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == -signal.SIGTERM


def test_a_handler_of_the_scripts_own_is_left_alone(tmp_path):
    own = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('[0, 0, \"mine\", 0, 0]', flush=True))\n"
    with Job(tmp_path, 1, own + TRAINING, SLOW="0.05") as job:
        job.until("train", 5)
        job.process.send_signal(signal.SIGTERM)
        job.until("mine", 0)
        assert job.end() == 0


def test_a_signal_that_does_not_exist_is_refused(tmp_path):
    script = TRAINING.replace("custom_hooks", "stop_signals=['SIGTREM'], custom_hooks")
    with Job(tmp_path, 1, script) as job:
        assert job.end() == 1
    assert (
        "`stop_signals` must name signals, such as SIGTERM, but names 'SIGTREM': did you mean `SIGTERM`?"
        in job.errors.read_text()
    )


def test_a_failing_rank_ends_the_others_although_they_would_save(tmp_path):
    script = TRAINING.replace(
        "def tell(",
        """def after_val(self, runner):
        if runner.rank == 1: raise ValueError("broken")
        time.sleep(60)
        open("slept", "w").close()
    def tell(""",
    )
    with Job(tmp_path, 2, script) as job:
        assert job.end() == 1
    assert "rank 1 raised ValueError" in job.errors.read_text()
    assert not (tmp_path / "slept").exists()


def test_a_handler_that_is_set_during_the_training_acts_instead_and_may_be_put_back(tmp_path):
    hook = """def before_train(self, runner):
        self.former = signal.signal(signal.SIGTERM, lambda *_: print('[0, 0, "mine", 0, 0]', flush=True))
    def close(self):
        signal.signal(signal.SIGTERM, self.former)
    def tell("""
    script = "import signal\n" + TRAINING.replace("def tell(", hook) + "\nsignal.raise_signal(signal.SIGTERM)\n"
    with Job(tmp_path, 1, script, SLOW="0.05") as job:
        job.until("train", 5)
        job.process.send_signal(signal.SIGTERM)
        job.until("mine", 0)
        assert job.end() == -signal.SIGTERM
    assert max(job.losses()) == 36


@pytest.mark.parametrize("slow", ["build", "first"])
def test_a_signal_to_the_command_before_the_first_iteration_is_complete(tmp_path, slow):
    (tmp_path / "parts.py").write_text(SLOW_PARTS)
    (tmp_path / "config.py").write_text(SLOW_CONFIG.format(slow=slow))
    job = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", "config.py", "--nproc", "2", "--grace-seconds", "1"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with job:
        assert "slow\n" in iter(job.stdout.readline, "")  # where rank 0 is
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=90)
    assert job.returncode == 75, errors
    assert "SIGTERM came before the first iteration was complete" in errors


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_to_the_command_when_all_is_trained_changes_nothing(tmp_path, ranks, number):
    ends_slowly = "import atexit\natexit.register(time.sleep, 3)\natexit.register(print, 'ending', flush=True)\n"
    (tmp_path / "parts.py").write_text(SLOW_PARTS + ends_slowly)
    (tmp_path / "config.py").write_text(SLOW_CONFIG.format(slow=""))
    job = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", "config.py", "--nproc", str(ranks)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with job:
        assert "ending\n" in iter(job.stdout.readline, "")
        job.send_signal(number)
        _, errors = job.communicate(timeout=90)
    assert job.returncode == 0, errors
    assert "were stopped" not in errors
