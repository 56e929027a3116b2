"""What `runner/preemption.py` leaves behind where a stop is asked for while a training ends."""

from __future__ import annotations

import threading
import time

from lockstep.dist import barrier, get_rank
from lockstep.runner.preemption import Agreement
from lockstep.testing import run_ranks


def ask_at_the_end() -> bool:
    """Rank 1 asks for a stop, and its training ends before the others have answered; return whether a thread stays."""
    agreement = Agreement()
    if get_rank() == 1:
        with agreement.opened():
            agreement.ask("a save has failed")
            while agreement._reason is None:
                time.sleep(0.001)
    barrier()
    if get_rank() == 0:
        with agreement.opened():
            pass
    barrier()
    return any(thread.name == "lockstep-agreement" for thread in threading.enumerate())


def test_a_rank_that_asks_while_its_training_ends_leaves_no_thread():
    assert run_ranks(2, ask_at_the_end) == [False, False]
