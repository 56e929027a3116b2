"""The processes of ranks: which the kernel has killed for lack of memory, and where a stopped one was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.launch.processes import _signal_main_thread

GROUPS = Path("/sys/fs/cgroup")
MEBIBYTES = 700  # enough for the launcher, which loads torch


@pytest.fixture
def little_memory():
    """Return a control group with little memory (version 1 or 2)."""
    parent = GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS
    group = parent / f"lockstep-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.max" if (GROUPS / "cgroup.controllers").exists() else "memory.limit_in_bytes")
        limit.write_text(str(MEBIBYTES * 2**20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"needs to be allowed to make a control group with a limit of memory: {error}")
    yield group
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_lack_of_memory_is_named_with_the_reason(scripts, little_memory):
    script = scripts.write(
        """
        import os, time
        held = []
        while os.environ["RANK"] == "1":
            held.append(b"x" * 2**24)
        time.sleep(60)
        """
    )
    enter = ("sh", "-c", f'echo $$ > {little_memory}/cgroup.procs && exec "$@"', "sh")
    code, _, err = scripts.run(script, "--nproc", "2", before=enter)
    assert code == 137
    assert "error: rank 1 was ended by SIGKILL" in err
    assert "A lack of memory may be the cause: the kernel has killed 1 of this machine's processes for it" in err


SEVERAL_THREADS = """
import faulthandler, signal, sys, threading, time
def here():
    print("ready", flush=True)
    while True:
        time.sleep(0.001)
def elsewhere():
    while True:
        time.sleep(0.001)
for _ in range(4):
    threading.Thread(target=elsewhere, daemon=True).start()
faulthandler.register(signal.SIGRTMAX, open(sys.argv[1], "w"), all_threads=False)
here()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="signals for one thread are Linux's")
def test_a_stopped_process_shows_where_its_main_thread_was(tmp_path):
    stacks = tmp_path / "stacks"
    command = [sys.executable, "-c", SEVERAL_THREADS, str(stacks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline()
            for count in range(1, 21):
                process.send_signal(signal.SIGSTOP)
                while "T" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2][:3]:
                    time.sleep(0.001)
                _signal_main_thread(process.pid, signal.SIGRTMAX)
                process.send_signal(signal.SIGCONT)
                while stacks.read_text().count("most recent call first") < count:
                    time.sleep(0.001)
        finally:
            process.kill()
    assert stacks.read_text().count("in here") == 20
    assert "in elsewhere" not in stacks.read_text()
