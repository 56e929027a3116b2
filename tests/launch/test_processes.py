"""The processes of ranks: which of them the kernel has killed for lack of memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

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
