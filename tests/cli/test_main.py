from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.version import __version__


def without_torch(words, folder):
    """Run `lockstep` where torch cannot be imported; return its exit code, output and errors."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from lockstep.cli.main import main\n"
        f"sys.argv = ['lockstep', *{words!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "-h"], ["launch", "--help"], ["config", "print", "--help"], ["doctor", "-h"]]
)
def test_help_does_not_import_torch(words, tmp_path):
    code, out, err = without_torch(words, tmp_path)
    assert (code, err) == (0, "")
    assert "Usage: lockstep" in out
    assert "<bool>" not in out  # the type of an option without a value


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--version"], 0, __version__),
        (["config", "print", "line.py", "model.width=3"], 0, "width=3"),
        (["report", "."], 0, "report.html"),
        (["doctor"], 1, "lockstep      │"),
        (["train", "none.py", "--nproc", "2"], 1, "there is no config file"),
        (["train", "none.py", "--launcher", "torch"], 2, "'torch' is not one of"),
        (["train", "line.py", "--nnodes", "2"], 2, "`--rdzv` must be HOST:PORT"),
        (
            ["launch", "line.py", "--numa", "nodes"],
            1,
            "`--numa` must be 'node', 'socket', 'exclusive' or 'core-complex'",
        ),
        (["launch", "none.py", "--nproc", "2"], 1, "the script `none.py` does not exist"),
        (["launch", "lien.py", "--nproc", "2"], 1, "the script `lien.py` does not exist: did you mean `line.py`?"),
        (["launch", ".", "--nproc", "2"], 1, "SCRIPT must be a file, but `.` is a folder"),
        (["launch", "line.py", "--log-dir", "toy.py"], 1, "`--log-dir` must be a folder that can be created"),
    ],
)
def test_what_does_not_compute_does_not_import_torch(folder, words, code, says):
    (folder / "metrics.jsonl").write_text('{"mode": "train", "epoch": 1, "iter": 10, "loss": 1.5}\n')
    got, out, err = without_torch(words, folder)
    assert (got, "Traceback" in err) == (code, False)
    assert says in out + err


def test_the_installed_command_and_the_module_are_the_same(lockstep):
    installed = (str(Path(sys.executable).with_name("lockstep")),)
    assert lockstep("--version") == (0, f"{__version__}\n", "")
    assert lockstep("--version", before=installed) == (0, f"{__version__}\n", "")
    assert lockstep("launch", "no_script.py") == (
        1,
        "",
        "error: the script `no_script.py` does not exist. To run a module, use -m\n",
    )


def test_the_doctor_finds_that_ranks_can_meet(lockstep):
    code, out, _ = lockstep("doctor")
    assert code == 0
    assert f"lockstep      │ {__version__}" in out
    assert "gloo" in out
    assert "none: lockstep starts its own ranks" in out


@pytest.mark.parametrize(
    ("variables", "says", "faults"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "2"},
            "RANK must be below WORLD_SIZE, 2, but is 3",
            "1 fault, see above: launcher",
        ),
        ({"WORLD_SIZE": "2"}, "RANK must be set for launcher 'pytorch'", "1 fault, see above: launcher"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "x"}, "MASTER_PORT must be a", "1 fault, see above: launcher"),
        (
            {"LOCKSTEP_CHECK": "some"},
            "LOCKSTEP_CHECK must be one of off, sample, always",
            "1 fault, see above: variables",
        ),
        ({"LOCKSTEP_HEARTBEAT": "x"}, "LOCKSTEP_HEARTBEAT must be a number of", "1 fault, see above: variables"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be a port from 1 to 65535", "1 fault, see above: variables"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a port from 1 to 65535", "1 fault, see above: variables"),
        (
            {"OMP_NUM_THREADS": "0", "GLOO_SOCKET_IFNAME": "lo,no0"},
            "GLOO_SOCKET_IFNAME must be one of",
            "1 fault, see above: variables",
        ),
        ({"CUDA_VISIBLE_DEVICES": ",".join("0" * 99)}, "names 99 devices", "1 fault, see above: accelerators"),
        (
            {"CUDA_VISIBLE_DEVICES": ",".join("0" * 99), "OMP_NUM_THREADS": "many"},
            "OMP_NUM_THREADS must be a number of threads",
            "2 faults, see above: variables, accelerators",
        ),
    ],
)
def test_the_doctor_ends_with_1_on_a_contradiction(here, monkeypatch, variables, says, faults):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": "300", **variables}.items():
        monkeypatch.setenv(name, value)
    code, out, err = here("doctor")
    assert (code, err) == (1, f"error: {faults}\n")
    assert says in out


@pytest.mark.parametrize("devices", ["", "-1", "NoDevFiles"])
def test_no_visible_devices_are_no_contradiction(here, monkeypatch, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert (here("doctor")[0], here("doctor")[2]) == (0, "")


@pytest.mark.parametrize(
    ("function", "says"), [("is_gloo_available", "needs gloo"), ("is_available", "without torch.d")]
)
def test_the_doctor_misses_gloo(here, monkeypatch, function, says):
    monkeypatch.setattr(torch.distributed, function, lambda: False)
    monkeypatch.setenv("COLUMNS", "300")
    code, out, err = here("doctor")
    assert (code, err) == (1, "error: 1 fault, see above: backends\n")
    assert says in out


def test_ranks_that_cannot_meet_are_told(lockstep):
    without_network = ("unshare", "--net", sys.executable, "-m", "lockstep")
    if sys.platform != "linux" or os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("network namespaces need root on Linux")
    code, _, err = lockstep("launch", "toy.py", "--nproc", "2", before=without_network)
    assert (code, "error: node 0 cannot listen at 127.0.0.1" in err) == (1, True)
    assert "Bring up the loopback interface" in err


@pytest.mark.parametrize("command", ["launch", "train"])
def test_ranks_are_bound_only_where_there_are_numactl_and_gpus(lockstep, tmp_path, command):
    words = [command, "line.py" if command == "train" else "toy.py", "--nproc", "2", "--numa", "node"]
    env = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    code, _, err = lockstep(*words, env=env)
    assert code == 1
    assert "error: `--numa` must find the program numactl, but there is none. Install it" in err
    numactl = tmp_path / "numactl"
    numactl.write_text("#!/bin/sh\n")
    numactl.chmod(0o755)
    code, _, err = lockstep(*words, env=env)
    assert code == 1
    assert "error: `--numa` must have a CUDA GPU for each rank of this machine, to bind it near that, but there" in err
