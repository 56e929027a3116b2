from __future__ import annotations

import json
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.launch.failures import describe, exit_code, first_failed


@pytest.fixture
def failure(tmp_path):
    """Return a function that makes the failure of a rank as torch's agent does."""

    def failure(rank, exitcode, kind=None, at=0.0, recorded=1):
        path = tmp_path / f"{rank}.json"
        if kind is not None:
            extra = {
                "py_callstack": f"Trace of {kind}\n",
                "timestamp": str(int(at)),
                "time": at,
                "type": kind,
                "exitcode": recorded,
            }
            path.write_text(json.dumps({"message": {"message": kind, "extraInfo": extra}}))
        return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(path))

    return failure


def test_the_earliest_error_comes_first(failure):
    text = describe({0: failure(0, 1, "RuntimeError", 10.7), 1: failure(1, 1, "ValueError", 10.2)})
    assert text == (
        "rank 1 raised ValueError (pid 101).\n\nTrace of ValueError\n\nAfter it: rank 0 raised RuntimeError."
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_was_killed_comes_before_those_that_missed_it(failure, number):
    text = describe({0: failure(0, 1, "RuntimeError", 10.0), 1: failure(1, -number)})
    assert text.startswith(f"rank 1 was ended by {number.name}")
    assert ("run out of memory" in text) == (number == signal.SIGKILL)


def test_an_abort_is_the_answer_to_an_error_elsewhere(failure):
    text = describe({0: failure(0, -signal.SIGABRT), 1: failure(1, 1, "ValueError", 10.0)})
    assert text.startswith("rank 1 raised ValueError")
    assert text.endswith("After it: rank 0 was ended by SIGABRT.")


def test_an_error_that_names_another_rank_comes_after_that_rank(failure):
    text = describe({0: failure(0, 1, "PeerError", 10.0), 1: failure(1, 1, "ValueError", 10.1)})
    assert text.startswith("rank 1 raised ValueError")


def test_an_error_counts_also_where_the_agent_had_to_stop_the_rank(failure):
    text = describe({0: failure(0, 1, "PeerError", 10.0), 1: failure(1, -signal.SIGTERM, "ValueError", 10.1)})
    assert text.startswith("rank 1 raised ValueError (pid 101).")
    assert text.endswith("After it: rank 0 raised PeerError.")


def test_ranks_that_the_agent_stopped_are_not_mentioned(failure):
    text = describe({0: failure(0, -signal.SIGTERM), 2: failure(2, 3)})
    assert text == "rank 2 exited with code 3 (pid 102)."


def test_a_rank_that_somebody_terminated_is(failure):
    assert describe({0: failure(0, -signal.SIGTERM)}).startswith("rank 0 was ended by SIGTERM")


def test_an_unknown_signal_has_its_number(failure):
    assert "signal 63" in describe({0: failure(0, -63)})


def test_the_log_is_named_where_there_is_one(failure):
    failures = {1: failure(1, 1, "ValueError", 1.0)}
    assert describe(failures, "logs").endswith("Its output is in logs/rank_1.log.")
    assert "output" not in describe({0: failure(0, 1, "ValueError", 1.0)}, "logs")


def test_the_exit_code_is_as_in_a_shell(failure):
    assert exit_code(failure(0, 3)) == 3
    assert exit_code(failure(0, -signal.SIGKILL)) == 137
    assert exit_code(failure(0, -signal.SIGTERM, "ValueError")) == 1
    assert exit_code(failure(0, -signal.SIGTERM, "SystemExit", recorded=4)) == 4


def test_the_rank_whose_exit_code_counts_is_the_one_that_is_named(failure):
    failures = {0: failure(0, 1, "PeerError", 10.0), 1: failure(1, 1, "SystemExit", 10.1, recorded=4)}
    assert first_failed(failures) == 1
    assert describe(failures).startswith("rank 1 exited with code 4 (pid 101).")
