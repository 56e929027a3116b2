from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from lockstep.launch.ledger import Ledger, RankRecord, Report, seconds_to_await_cause


def raised(rank, kind, at, *, code=1, follows=None, names=(), **ended):
    report = Report(kind, at, code, f"Trace of {kind}", "train.py:3", follows, names)
    return RankRecord(rank, 100 + rank, report, **ended)


def ended(rank, status, at, **more):
    return RankRecord(rank, 100 + rank, status=status, ended=at, **more)


def ended_by_launcher(rank, at, *numbers):
    """Return a rank that the launcher has ended, with the last of these signals."""
    return ended(rank, -numbers[-1], at + 0.1, signals=list(numbers), signalled=at)


def culprit(ledger):
    """Return the rank that is named first."""
    return int(ledger.describe().split()[1])


def test_the_earliest_error_comes_first():
    ledger = Ledger([raised(0, "RuntimeError", 10.7), raised(1, "ValueError", 10.2)])
    assert culprit(ledger) == 1
    assert ledger.describe() == (
        "rank 1 raised ValueError (pid 101).\n\nTrace of ValueError\n\n"
        "After it: rank 0 raised RuntimeError at train.py:3."
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_was_killed_comes_before_those_that_missed_it(number):
    # the others may notice before the launcher does
    ledger = Ledger([raised(0, "RuntimeError", 10.0), ended(1, -number, 10.1)], oom_kills=2)
    assert ledger.describe().startswith(f"rank 1 was ended by {number.name} (pid 101).")
    assert ("the kernel has killed 2 of this machine's" in ledger.describe()) == (number == signal.SIGKILL)
    assert ledger.exit_code == 128 + number


def test_an_abort_by_itself_says_how_calls_that_differ_are_named():
    text = Ledger([ended(0, -signal.SIGABRT, 10.0), raised(1, "PeerError", 10.2, follows="gone")]).describe()
    assert text.startswith("rank 0 was ended by SIGABRT")
    assert "LOCKSTEP_CHECK=always compares each call" in text


def test_an_abort_is_the_answer_to_an_error_elsewhere():
    text = Ledger([ended(0, -signal.SIGABRT, 10.2), raised(1, "ValueError", 10.0)]).describe()
    assert text.startswith("rank 1 raised ValueError")
    assert text.endswith("After it: rank 0 was ended by SIGABRT.")


@pytest.mark.parametrize("follows", ["gone", "late"])
def test_an_error_that_only_tells_of_another_rank_is_no_cause(follows):
    ledger = Ledger([raised(0, "PeerError", 10.0, follows=follows), raised(1, "SystemExit", 10.1, code=4)])
    assert ledger.describe().startswith("rank 1 exited with code 4 (pid 101).")
    assert (culprit(ledger), ledger.exit_code, ledger.is_cause_known) == (1, 4, True)
    assert not Ledger([raised(0, "PeerError", 10.0, follows=follows)]).is_cause_known


def test_what_the_launcher_did_is_blamed_on_nobody():
    records = [
        ended_by_launcher(0, 11.0, signal.SIGTERM, signal.SIGKILL),
        ended(1, 3, 10.0),
        ended_by_launcher(2, 11.0, signal.SIGTERM),
    ]
    ledger = Ledger(records, oom_kills=2)
    told = "rank 0 was killed by the launcher, because it did not end by itself"
    assert ledger.describe() == f"rank 1 exited with code 3 (pid 101).\n\nAfter it: {told}."
    assert ledger.exit_code == 3


def test_a_rank_that_somebody_else_ended_is():
    assert Ledger([ended(0, -signal.SIGTERM, 10.0)]).describe() == "rank 0 was ended by SIGTERM (pid 100)."


def test_an_error_counts_also_where_the_launcher_had_to_kill_the_rank():
    killed = {"status": -signal.SIGKILL, "ended": 20.1, "signals": [signal.SIGKILL], "signalled": 20.0}
    ledger = Ledger([raised(0, "PeerError", 10.0, follows="gone"), raised(1, "ValueError", 9.0, **killed)])
    assert ledger.describe().startswith("rank 1 raised ValueError (pid 101).")
    assert "did not end by itself" not in ledger.describe().partition("After it")[0]
    assert ledger.exit_code == 1


def test_a_rank_that_left_with_0_is_blamed_only_by_those_that_missed_it():
    gone = raised(0, "PeerError", 10.0, follows="gone")
    ledger = Ledger([gone, ended(1, 0, 10.4)])
    assert ledger.describe().startswith("rank 1 exited with code 0 (pid 101) while other ranks went on.")
    assert ledger.exit_code == 1
    assert culprit(Ledger([raised(0, "ValueError", 10.0), ended(1, 0, 5.0)])) == 0
    assert culprit(Ledger([gone, ended(1, 0, 10.4), ended(2, 7, 10.2)])) == 2
    differs = raised(0, "CollectiveMismatchError", 10.0)
    left = raised(1, "CollectiveMismatchError", 10.1)
    left.report = replace(left.report, at_exit=True)
    assert Ledger([differs, left]).describe().startswith("rank 1 exited with code 0 (pid 101) while other ranks went")
    differs.report = replace(differs.report, at_exit=True)  # both have ended, after different calls
    assert Ledger([differs, left]).describe().startswith("rank 0 raised CollectiveMismatchError (pid 100).")


def test_of_ranks_that_all_follow_the_one_that_most_name_comes_first():
    late = [raised(rank, "CollectiveTimeoutError", 10.0 + rank, follows="late", names=[2]) for rank in (0, 1)]
    other = raised(2, "RuntimeError", 12.5, follows="late")
    assert Ledger([*late, other]).describe().startswith("rank 2 raised RuntimeError (pid 102).")
    running = [ended_by_launcher(rank, 13.0, signal.SIGTERM) for rank in (2, 3)]
    assert Ledger([*late, *running]).describe().startswith("rank 2 was still running (pid 102)")


def test_a_rank_that_is_stopped_is_named():
    late = [raised(rank, "CollectiveTimeoutError", 10.0 + rank, follows="late") for rank in (0, 2)]
    stopped = ended_by_launcher(1, 13.0, signal.SIGTERM)
    stopped.state, stopped.stack = "T", '  File "train.py", line 3 in step'
    text = Ledger([*late, stopped]).describe()
    assert text.startswith("rank 1 was stopped (SIGSTOP, pid 101) while the other ranks waited for it in a collective.")
    assert 'It was here (most recent call first):\n  File "train.py", line 3 in step' in text
    assert text.endswith("rank 0 raised CollectiveTimeoutError at train.py:3; rank 2 raised CollectiveTimeoutError at "
                         "train.py:3.")  # fmt: skip


def test_a_rank_that_still_runs_is_named_where_all_ranks_are_known():
    late = raised(0, "CollectiveTimeoutError", 10.0, follows="late")
    running = ended_by_launcher(1, 13.0, signal.SIGTERM, signal.SIGKILL)
    ledger = Ledger([late, running])
    assert ledger.describe().startswith("rank 1 was still running (pid 101) while the other ranks waited")
    assert "the launcher killed it" in ledger.describe()
    assert ledger.exit_code == 1
    assert culprit(Ledger([late, running], whole_job=False)) == 0
    also = ended_by_launcher(2, 13.0, signal.SIGTERM)
    assert Ledger([late, running, also]).describe().startswith("one of the ranks 1, 2 did not come to a collective")


def test_an_error_that_names_both_calls_comes_before_a_rank_that_ends_slowly():
    differs = raised(0, "CollectiveMismatchError", 10.0, follows="gone", names=[1])
    slow = ended_by_launcher(1, 13.0, signal.SIGTERM)
    ledger = Ledger([differs, slow])
    assert ledger.describe().startswith("rank 0 raised CollectiveMismatchError (pid 100).\n\nTrace of Collective")
    assert not ledger.is_cause_known
    slow.state = "T"
    assert Ledger([differs, slow]).describe().startswith("rank 1 was stopped (SIGSTOP, pid 101)")


def test_how_long_to_wait_for_the_cause():
    running = RankRecord(1, 101)
    gone, late = (raised(0, "PeerError", 10.0, follows=why) for why in ("gone", "late"))
    assert seconds_to_await_cause([raised(0, "ValueError", 10.0), running]) == 0
    assert seconds_to_await_cause([ended(0, -9, 10.0), running]) == 0
    assert (
        seconds_to_await_cause([gone, running])
        > seconds_to_await_cause([late, running])
        > seconds_to_await_cause([ended(0, -6, 1.0), running])
        > 0
    )
    assert seconds_to_await_cause([gone, ended(1, 0, 11.0)]) == 0
    assert seconds_to_await_cause([late, RankRecord(1, 101, state="T")]) == 0


def test_an_unknown_signal_has_its_number():
    assert "signal 63" in Ledger([ended(0, -63, 1.0)]).describe()


def test_the_log_is_named_where_there_is_one():
    ledger = Ledger([raised(1, "ValueError", 1.0)])
    assert ledger.describe("logs").endswith("Its output is in logs/rank_1.log.")
    assert "output" not in ledger.describe("logs", first_rank=1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": "words"}', '{"message": {"extraInfo": {}}}'])
def test_a_report_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "error.json").write_text(text)
    assert Report.read(tmp_path / "error.json") is None
    assert Report.read(tmp_path / "none") is None


def test_a_report_of_torch_is_read(tmp_path):
    extra = {"py_callstack": "Trace\n", "timestamp": "12"}
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": "m", "extraInfo": extra}}))
    assert Report.read(tmp_path / "error.json") == Report("an error", 12.0, 1, "Trace")
