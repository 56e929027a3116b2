"""Closed and full output, a reader that has gone, and a locale without the letters of a folder end no training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.jobs

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from lockstep import Runner, get_dist_info

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x, y):
            print("forward")
            return (self.layer(x) - y).square().mean()

    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    runner = Runner(Net(), {work_dir}, DataLoader(data, 4), train_cfg=dict(max_epochs=1), {options})
    runner.train()
    assert runner.iter * get_dist_info()[1] == 2
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}
# How a shell starts it, the work_dir in the script, and what is in the environment.
CASES = {
    "full": ("{} >/dev/full 2>/dev/full", "'runs'", {}),
    "closed": ("{} <&- >&- 2>&-", "'runs'", {}),
    "unbuffered and full": ("{} >/dev/full", "'runs'", {"PYTHONUNBUFFERED": "1"}),
    "the reader has gone": ("{} | true", "'runs'", {}),
    "ASCII": ("{} runs_\u00e9", "sys.argv[1]", ASCII),
    "ASCII, named in the script": ("{}", "'runs_\u00e9'", ASCII),
}


def job(folder: Path, case: str, launcher: str = "", options: str = "") -> subprocess.CompletedProcess[str]:
    line, work_dir, env = CASES[case]
    (folder / "script.py").write_text(dedent(SCRIPT).format(work_dir=work_dir, options=options), encoding="utf-8")
    command = line.format(f"{sys.executable} {launcher} script.py")
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, env=os.environ | env, capture_output=True, text=True
    )


@pytest.mark.parametrize("case", CASES)
def test_a_training_goes_on_to_its_end(tmp_path: Path, case: str) -> None:
    done = job(tmp_path, case)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("runs*/*/log.txt")
    assert "epoch 1/1" in log.read_text(encoding="utf-8")
    assert log.parts[-3] == ("runs_\u00e9" if "ASCII" in case else "runs")
    assert "ASCII" not in case or "trained in" in done.stdout


@pytest.mark.parametrize("case", ["full", "closed"])
def test_ranks_of_the_launcher_go_on_to_their_end(tmp_path: Path, case: str) -> None:
    done = job(tmp_path, case, "-m lockstep launch --nproc 2", "launcher='pytorch'")
    assert done.returncode == 0
    assert len(list(tmp_path.glob("runs/*/epoch_1"))) == 1


TOLERANT = "from lockstep.output import tolerate_closed_output; tolerate_closed_output()"


@pytest.mark.parametrize("unbuffered", [["-u"], []])
def test_nothing_is_lost_in_a_pipe_that_does_not_block(unbuffered: list[str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = f"{TOLERANT}; import sys; sys.stdout.write('12345678\\n' * 50_000)"  # more than a pipe holds
    with subprocess.Popen([sys.executable, *unbuffered, "-c", code], stdout=writer), open(reader, "rb") as read:
        os.close(writer)
        assert len(read.read()) == 9 * 50_000


def test_output_that_the_script_has_closed_is_dropped() -> None:
    script = "import sys; sys.stdout.close(); from lockstep.output import tolerate_closed_output as t; t(); print(1)"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout == b""


@pytest.mark.parametrize("closed", [1, 2])
def test_what_goes_to_a_file_goes_there_from_a_stream_that_was_closed_too(tmp_path: Path, closed: int) -> None:
    code = (
        "import os, subprocess; from lockstep.output import write_output_to; write_output_to('log.txt'); "
        f"os.write({closed}, b'own '); subprocess.run('echo child >&{closed}', shell=True)"
    )
    line = f'{sys.executable} -c "{code}" {closed}>&-'
    subprocess.run(line, shell=True, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    assert (tmp_path / "log.txt").read_text() == "own child\n"


def test_streams_have_the_names_and_modes_of_pythons_own() -> None:
    code = f"{TOLERANT}; import sys; print(*((one.name, one.mode) for one in (sys.stdout, sys.stderr)))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "('<stdout>', 'w') ('<stderr>', 'w')\n"


def test_letters_that_the_encoding_lacks_are_shown_as_the_user_has_chosen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{TOLERANT}; print('\u00e9')"],
        env=os.environ | {"PYTHONIOENCODING": "ascii:replace"}, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == b"?\n"


def test_a_report_is_written_for_a_name_that_the_locale_lacks(tmp_path: Path) -> None:
    run = tmp_path / "runs_\u00e9" / "1"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"mode": "train", "iter": 1, "loss": 1.0, "\\ud800": 2.0}\n')
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "report", str(run)], env=os.environ | ASCII, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").stat().st_size > 1000


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_command_whose_output_is_lost_fails(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "c.json").write_text('{"lr": 1}')
    command = f"{sys.executable} -m lockstep config print c.json >"
    done = subprocess.run(f"{command} /dev/full", shell=True, cwd=tmp_path, env=os.environ | env, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"must take what is printed, but does not: No space left on device" in done.stderr
    done = subprocess.run(f"{command} >(true)", shell=True, executable="bash", cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
