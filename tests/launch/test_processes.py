from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch.ledger import RankRecord
from lockstep.launch.processes import RankProcesses

FAILS = "print(flush=True)\nraise SystemExit(3)"
COMPUTES = "print(flush=True)\nwhile True: pass"
# A look at a single moment finds that its first thread waits.
COMPUTES_IN_A_THREAD = (
    "import threading\nprint(flush=True)\nthreading.Thread(target=exec, args=('while True: pass',)).start()"
)
WAITS = "import time\nprint(flush=True)\ntime.sleep(1000)"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_rank_that_computes_is_told_from_one_that_waits():
    processes = [
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
        for code in (FAILS, COMPUTES, COMPUTES_IN_A_THREAD, WAITS)
    ]
    ranks = RankProcesses([RankRecord(rank, process.pid) for rank, process in enumerate(processes)])
    try:
        for process in processes:
            process.stdout.readline()  # it has started, for which it computes, too
        while ranks.records[0].status is None:
            time.sleep(0.01)
        ranks.look()  # begins to look at the others
        time.sleep(1)
        ranks.look()
        assert [record.state for record in ranks.records] == ["", "R", "R", "S"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        ranks.close(0.1)
