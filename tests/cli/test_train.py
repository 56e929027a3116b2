from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lockstep.cli.jobs import default_work_dir

RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def set_ranks(monkeypatch, rank):
    """Make the environment say that this is one of two ranks."""
    for name, value in {"RANK": str(rank), "LOCAL_RANK": str(rank), **RANKS}.items():
        monkeypatch.setenv(name, value)


def test_the_work_dir_is_named_after_the_config():
    assert default_work_dir(Path("configs/line.py")) == Path("work_dirs/line")
    assert default_work_dir(Path("examples/digits/config.yaml")) == Path("work_dirs/digits")


def test_one_process_trains_where_it_is(here, folder):
    code, out, err = here("train", "line.py")
    assert (code, err) == (0, "")
    assert "1 rank on" in out
    assert len(list((folder / "work_dirs/line").glob("*/metrics.jsonl"))) == 1


def test_two_ranks_are_started_and_train(lockstep, tmp_path):
    code, out, err = lockstep("train", "line.py", "--nproc", "2", "--work-dir", "runs")
    loading = "lockstep: loading torch to check line.py"
    assert (code, err) == (0, f"{loading}\nlockstep: starting 2 ranks\n")
    assert "2 ranks on" in out
    assert len(list((tmp_path / "runs").glob("*/metrics.jsonl"))) == 1
    assert (tmp_path / "runs/ranks/rank_1.log").read_text() == ""


def test_ranks_that_are_found_are_joined(lockstep):
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "-m", "lockstep")
    code, out, err = lockstep("train", "line.py", before=torchrun)
    assert code == 0
    assert "2 ranks on" in out
    assert err.count("lockstep: joining the ranks found (pytorch): 2\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "line.py"], "lockstep: loading torch\n"),
        (["train", "line.py", "--nproc", "2"], "lockstep: loading torch to check line.py\n"),
        (["train", "line.py", "--max-restarts", "1", "--no-check"], "lockstep: loading torch to read line.py"),
        (["test", "line.py", "--checkpoint", "toy.py"], "lockstep: loading torch\n"),
    ],
)
def test_the_first_line_comes_before_torch(folder, words, says):
    (folder / "torch.py").write_text("import time\ntime.sleep(60)")  # `python -m` looks in the current folder first
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stderr.readline().startswith(says)
        finally:
            job.kill()


@pytest.mark.parametrize(("more", "number"), [(["--nproc", "2"], signal.SIGTERM), ([], signal.SIGUSR1)])
def test_a_signal_before_the_training_begins_asks_to_start_again(folder, more, number):
    (folder / "torch.py").write_text("import time\ntime.sleep(60)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", "line.py", *more],
        cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        try:
            job.stderr.readline()
            job.send_signal(number)
            assert "while no training was under way" in job.stderr.readline()
            assert job.wait(30) == 75
        finally:
            job.kill()


def test_a_signal_while_a_failed_job_ends_does_not_ask_to_start_it_again(folder):
    (folder / "failing.py").write_text(
        "import atexit, time\nfrom lockstep.hooks import Hook\n"
        "class Fail(Hook):\n"
        "    def before_train(self, runner):\n"
        "        if runner.rank == 1:\n"
        "            atexit.register(time.sleep, 60)\n"
        "            open('failed', 'w').close()\n"
        "            raise ValueError('boom')\n"
    )
    words = ("train", "line.py", "--nproc", "2", "custom_hooks=[{'type':'failing.Fail'}]")
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            while not (folder / "failed").exists() and job.poll() is None:
                time.sleep(0.05)
            time.sleep(2)  # of the ten that the launcher gives the rank to end
            job.send_signal(signal.SIGTERM)
            assert "rank 1 raised ValueError" in job.stderr.read()
            assert job.wait(30) == -signal.SIGTERM
        finally:
            job.kill()


def test_a_stop_that_cannot_be_saved_tells_why(folder):
    (folder / "stopping.py").write_text(
        "import os, signal\nfrom lockstep.hooks import Hook\n"
        "class Stop(Hook):\n"
        "    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):\n"
        "        if runner.iter == 1 and runner.rank == 0:\n"
        "            os.kill(os.getppid(), signal.SIGTERM)\n"
        "    def before_save_checkpoint(self, runner, checkpoint):\n"
        "        raise OSError(28, 'the disk is full')\n"
    )
    hook = "custom_hooks=[{'type':'stopping.Stop'}]"
    words = ("train", "line.py", "--nproc", "2", hook, "train_dataloader.batch_size=1")
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as job:
        err = job.stderr.read()
        assert job.wait(30) == 1
    assert re.search(r"error: SIGTERM stopped the training, but it is not saved\. rank [01] raised OSError", err)
    assert "the disk is full" in err


def test_a_job_without_a_temporary_folder_says_so(here, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/none")
    code, _, err = here("launch", "toy.py", "--nproc", "1")
    assert code == 1
    assert "error: a folder for temporary files must be there, but none can be written to" in err


def test_ranks_that_are_found_are_told_before_torch_is_loaded(folder, lockstep):
    (folder / "torch.py").write_text("raise SystemExit(7)")
    code, _, err = lockstep("train", "line.py", env={"RANK": "0", "WORLD_SIZE": "1"})
    assert (code, err) == (7, "lockstep: joining the ranks found (pytorch): 1\n")


def test_options_that_only_a_start_of_ranks_has_are_told_to_have_no_effect(folder, lockstep):
    (folder / "torch.py").write_text("raise SystemExit(7)")
    words = ["--nnodes", "2", "--rdzv", "here:29500", "--node-rank", "1", "--grace-seconds", "9"]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    code, _, err = lockstep("train", "line.py", *words, env=ranks)
    assert code == 7
    assert "lockstep: no effect of --node-rank, --rdzv, --grace-seconds on ranks that are started already" in err


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(lockstep, folder, nproc):
    (folder / "leaving.py").write_text(
        "import sys\nfrom lockstep.hooks import Hook\n"
        "class Leave(Hook):\n"
        "    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):\n"
        f"        if runner.rank == {int(nproc) - 1}:\n"
        "            sys.exit(5)\n"
    )
    assert lockstep("train", "line.py", "--nproc", nproc, "custom_hooks=[{'type':'leaving.Leave'}]")[0] == 5


def test_bad_input_is_told_once_by_ranks_that_are_found(lockstep):
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "-m", "lockstep")
    code, _, err = lockstep("train", "none.py", before=torchrun)
    assert code == 1
    assert err.count("there is no config file") == 1


def test_a_rank_that_is_alone_with_its_error_tells_it_too(here, monkeypatch):
    set_ranks(monkeypatch, rank=1)
    code, _, err = here("train", "none.py")
    assert (code, err.count("there is no config file")) == (1, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.py"], "there is no config file"),
        (["configs/none.py"], "configs/none.py`, nor a folder `"),
        (["."], "must be a config file, but is a folder"),
        (["line.py", "--strategy", "fdsp"], "an option: `strategy.type` = 'fdsp' is no strategy"),
        (["line.py", "--cfg-options", "optm_wrapper.x=1"], "no key `optm_wrapper` for the option"),
        (["line.py", "--cfg-options", "train_cfg.by_epoch.x=1"], "leads through `train_cfg.by_epoch`"),
        (["nomodel.yaml"], "`model` must be given"),
        (
            ["line.py", "optim_wrapper.optimizer.lerning_rate=1"],
            "not an argument of the optimizer `SGD`: did you mean `lr`?",
        ),
    ],
)
def test_bad_input_is_told_once_before_ranks_are_started(here, folder, words, says):
    (folder / "nomodel.yaml").write_text("lr: 1\n")
    code, out, err = here("train", *words, "--nproc", "2")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("error") == 1
    assert says in err
    assert "starting" not in err


def test_bad_input_that_only_ranks_can_find_is_told_once(lockstep):
    code, _, err = lockstep("train", "line.py", "--no-check", "--nproc", "2", "optim_wrapper.optimizer.lerning_rate=1")
    assert code == 1
    assert err.count("unknown argument `lerning_rate`: did you mean `lr`?") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--nnodes", "2"], 2, "`--rdzv` must be HOST:PORT"),
        (["--nproc", "0"], 2, "--nproc"),
        (["--node-rank", "1"], 2, "Give --nnodes and --rdzv"),
        (["--cfg-options", "lr", "0.1"], 2, "--cfg-options must be followed by KEY=VALUE"),
        (["--cfg-options"], 2, "--cfg-options must be followed by KEY=VALUE"),
        (["--launcher", "torch"], 2, "'torch' is not one of"),
    ],
)
def test_options_that_do_not_fit(here, words, code, says):
    got, _, err = here("train", "line.py", *words)
    assert got == code
    assert says in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nproc", "3"], "`--nproc` must be 2, as of the ranks found in the environment (pytorch), but is 3"),
        (["--nnodes", "2", "--rdzv", "a:1"], "`--nnodes` must be 1, as of"),
        (["--max-restarts", "1"], "`--max-restarts` must be 0, as of the ranks found in the environment (pytorch)"),
        (["--numa", "node"], "`--numa` must not be given, as of the ranks found"),
    ],
)
def test_options_that_contradict_the_ranks_found(here, monkeypatch, words, says):
    set_ranks(monkeypatch, rank=0)
    code, _, err = here("train", "line.py", *words)
    assert code == 1
    assert err.startswith("error: ")
    assert says in err


def test_launcher_none_trains_here_whatever_is_found(here, monkeypatch):
    set_ranks(monkeypatch, rank=0)
    code, out, err = here("train", "line.py", "--launcher", "none")
    assert (code, err) == (0, "")
    assert "1 rank on" in out


def test_ranks_read_what_was_typed(lockstep, folder):
    (folder / "registering.py").write_text(
        "from lockstep.registry import MODELS\nfrom toy import Line\nMODELS.register_module(name='Ln', module=Line)\n"
    )
    (folder / "own.py").write_text("_base_ = 'line.py'\nimport registering\nmodel = dict(type='Ln')\n")
    code, _, err = lockstep("train", "own.py", "--nproc", "2", "train_cfg.max_epochs=2", "--work-dir", "runs")
    loading = "lockstep: loading torch to check own.py"
    assert (code, err) == (0, f"{loading}\nlockstep: starting 2 ranks\n")
    (run,) = folder.glob("runs/*/environment.json")
    command = shlex.split(json.loads(run.read_text())["command"])
    assert command == ["lockstep", *shlex.split("train own.py --nproc 2 train_cfg.max_epochs=2 --work-dir runs")]
    assert "max_epochs=2" in (run.parent / "config.py").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "{}"],
        ["train", "{}", "--no-check"],
        ["train", "{}", "--no-check", "--nproc", "2"],
        ["test", "{}", "--no-check", "--checkpoint", "line.py"],
        ["config", "print", "{}"],
        ["config", "check", "{}"],
    ],
)
def test_a_yaml_that_leads_to_code_is_refused_before_anything_is_imported(here, folder, words):
    (folder / "evil.yaml").write_text("model:\n  type: os.system\n  command: touch trace\ncustom_imports: toy\n")
    code, out, err = here(*(word.format("evil.yaml") for word in words))
    assert code in (1, 2)
    assert "starting" not in out
    assert f"{folder}/evil.yaml:2: `model.type` = 'os.system' is an import path" in err
    assert f"{folder}/evil.yaml:4: `custom_imports` imports modules" in err
    assert "toy" not in sys.modules
    assert sorted(path.name for path in folder.iterdir()) == ["evil.yaml", "line.py", "toy.py"]


YAML = """\
custom_imports: toy
model: {type: toy.Line}
train_dataloader: {dataset: {type: toy.Points}, batch_size: 2}
optim_wrapper: {optimizer: {type: SGD, lr: 1.0e-3}}
train_cfg: {max_epochs: 1}
"""


def test_a_trusted_yaml_trains_on_ranks_that_are_started(lockstep, folder):
    (folder / "line.yaml").write_text(YAML)
    code, _, err = lockstep("train", "line.yaml", "--trust-config", "--nproc", "2")
    assert code == 0, err


def test_names_that_the_user_types_are_imported(here, folder):
    (folder / "line.yaml").write_text("train_cfg: {max_epochs: 1}\nmodel: {width: 1}\n")
    words = ["custom_imports=toy", "model.type=toy.Line", "train_dataloader.dataset.type=toy.Points"]
    code, out, err = here("config", "check", "line.yaml", *words)
    assert (code, out, err) == (0, "line.yaml: no faults\n", "")
    assert "toy" in sys.modules
