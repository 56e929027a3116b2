"""Jobs with restarts left that fail in the same iteration again, or in another one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.launch.worker import ITERATION_FILE, iteration_reporter, read_iteration

TRAINING = """
import os, torch
from lockstep import Runner
from lockstep.hooks import Hook

class Fault(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if runner.rank == 1 and runner.iter == {at}:
            {fault}

data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
runner = Runner(
    torch.nn.Linear(2, 1), "work_dir", loss=torch.nn.MSELoss(), train_cfg=dict(max_epochs=1), log_level="WARNING",
    train_dataloader=torch.utils.data.DataLoader(data, batch_size=1), custom_hooks=[Fault()],
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
)
runner.train()
"""


def run(folder, at, fault):
    (folder / "train.py").write_text(TRAINING.format(at=at, fault=fault))
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "launch", "train.py", "--nproc", "2", "--max-restarts", "3"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("raise ValueError('boom')", 1, "rank 1 raised ValueError"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL"),
    ],
)
def test_a_job_that_fails_in_the_same_iteration_twice_ends(tmp_path, fault, code, says):
    got, err = run(tmp_path, "3", fault)
    assert got == code
    assert err.count(says) == 2
    assert err.count("Starting all ranks again") == 1
    assert "Iteration 4 has failed in two attempts, one after the other" in err


def test_a_job_that_fails_in_another_iteration_goes_on(tmp_path):
    got, err = run(tmp_path, "3 + attempt", "if attempt < 2: raise ValueError('boom')")
    assert got == 0, err
    assert err.count("Starting all ranks again") == 2


def test_the_iteration_is_read_as_it_was_told(tmp_path, monkeypatch):
    path = tmp_path / "iteration"
    iteration_reporter()(7)  # nobody asks
    monkeypatch.setenv(ITERATION_FILE, str(path))
    assert read_iteration(path) is None
    for number in (12, 2**40):
        iteration_reporter()(number)
        assert read_iteration(path) == number
