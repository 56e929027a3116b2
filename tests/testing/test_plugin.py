"""The pytest plugin, as a user meets it: in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from lockstep.dist import get_rank
from lockstep.testing import ranks

HEAD = """
import os, signal, time
import pytest
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.testing import ranks, run_ranks
"""


def write(pytester: pytest.Pytester, code: str, head: str = HEAD) -> None:
    pytester.makepyfile(head + dedent(code))


@ranks(2)
def test_this_very_suite_uses_it(tmp_path: Path) -> None:
    (tmp_path / str(get_rank())).touch()


def test_sizes_parameters_and_fixtures_compose(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        @pytest.fixture
        def words():
            return ["a", "b"]

        @ranks(1, 2, 3)
        @pytest.mark.parametrize("extra", [5, 6])
        def test_it(words, tmp_path, extra, **others):
            everybody = all_gather_object((get_rank(), words, extra))
            assert everybody == [(r, ["a", "b"], extra) for r in range(get_world_size())]
            (tmp_path / f"{get_rank()} of {get_world_size()}").touch()

        @pytest.mark.parametrize("n", [2, 3])
        @ranks(2)
        def test_below(n):
            assert n > get_world_size() - 1
        """,
    )
    result = pytester.runpytest("-v")
    result.assert_outcomes(passed=8)
    for name in ("1rank-5", "2ranks-5", "3ranks-6"):
        assert any(set(name.split("-")) <= set(line.replace("[", "-").replace("]", "-").split("-"))
                   for line in result.outlines)  # fmt: skip
    result.stdout.fnmatch_lines(["rank tests: 8 passed on 16 ranks"])


def test_relative_imports_work_in_importlib_mode(pytester: pytest.Pytester) -> None:
    pytester.mkpydir("suite").joinpath("bodies.py").write_text("NUMBER = 7\n")
    pytester.path.joinpath("suite", "deep").mkdir()
    code = HEAD + "from ..bodies import NUMBER\n@ranks(2)\ndef test_it():\n    assert NUMBER == 7\n"
    pytester.path.joinpath("suite", "deep", "test_relative.py").write_text(code)
    result = pytester.runpytest("--import-mode=importlib")
    result.stdout.fnmatch_lines(["rank tests: 1 passed on 2 ranks"])


def test_a_failure_names_the_cause_first_and_spares_the_next_test(
    pytester: pytest.Pytester,
) -> None:
    write(
        pytester,
        """
        @ranks(2)
        def test_dies():
            if get_rank() == 1:
                os._exit(3)
            all_gather_object(1)

        @ranks(2)
        def test_fine():
            assert all_gather_object(1) == [1, 1]
        """,
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "E *RankFailure: test_dies on 2 ranks: rank 1 died: exit code 3 (and rank 0 raised)",
            "*--- rank 1 died: exit code 3",
            "*--- rank 0 raised: *",
            "rank tests: 1 passed on 2 ranks, 1 failed",
        ]
    )
    result.stdout.no_fnmatch_line("*def _collect*")


def test_a_time_limit_of_its_own(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        def the_place():
            time.sleep(100)

        @ranks(2, timeout=1.5)
        def test_hangs():
            the_place()
        """,
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 0 hung: not finished after 1.5 s*", "*in the_place*"])


def test_the_parent_may_skip_visibly_but_a_rank_may_not(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        @pytest.mark.skipif(True, reason="decided here")
        @ranks(2)
        def test_parent():
            pass

        @ranks(2)
        def test_rank():
            pytest.skip("decided there")
        """,
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*a rank may not skip*", "rank tests: 0 passed on 0 ranks, 1 failed, 1 skipped"])


def test_unpicklable_fixtures_are_named(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        @ranks(2)
        def test_it(request):
            pass
        """,
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*TypeError: argument request of test_it must be picklable*"])


def test_a_fixture_that_would_undo_nothing_is_refused(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        @ranks(2)
        def test_it(monkeypatch):
            pass
        """,
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*TypeError: argument monkeypatch of test_it must not be pytest's monkeypatch: *"])


def test_start_up_can_be_tested_with_fresh_ranks(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        from lockstep.dist import init_dist, is_distributed

        @ranks(2, fresh=True)
        def test_it():
            assert not is_distributed()
            init_dist("pytorch")
            assert all_gather_object(get_rank()) == [0, 1]
            os.environ["LEFT_OVER"] = "no matter"
        """,
    )
    pytester.runpytest().stdout.fnmatch_lines(["rank tests: 1 passed on 2 ranks"])


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("@ranks()\ndef test_it(): pass", "*ValueError: `sizes` must name at least one*"),
        ("@ranks(0)\ndef test_it(): pass", "*ConfigError: `sizes` must be an int of at least 1*"),
        ("@ranks(2)\ndef test_it(n_ranks): pass", "*TypeError: 'test_it' must not have a parameter 'n_ranks'*"),
        ("@ranks(2, warnings='off')\ndef test_it(): pass", "*invalid action: 'off'*"),
    ],
)
def test_misuse_is_an_error(pytester: pytest.Pytester, code: str, error: str) -> None:
    write(pytester, code)
    result = pytester.runpytest()
    assert result.ret != pytest.ExitCode.OK
    pytest.LineMatcher(result.outlines + result.errlines).fnmatch_lines([error])


@pytest.mark.parametrize("sizes", ["2", "1, 2"])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "class TestIt:\n    @ranks({})\n    def test_it(self, tmp_path): pass",
            "*TypeError: `body` must be a function at the top level*",
        ),
        ("test_it = ranks({})(lambda: None)", "*TypeError: `body` must be a function at the top level*"),
        (
            "from hypothesis import given, strategies\n@ranks({})\n@given(strategies.integers())\ndef test_it(n): pass",
            "*TypeError: @ranks must stand below @given*",
        ),
    ],
)
def test_a_body_that_ranks_cannot_import_fails_alone(
    pytester: pytest.Pytester, code: str, error: str, sizes: str
) -> None:
    write(pytester, f"{code.format(sizes)}\n\n\ndef test_another(): pass")
    result = pytester.runpytest()
    result.assert_outcomes(failed=1 + ("," in sizes), passed=1)
    result.stdout.fnmatch_lines([error])


def test_hypothesis_may_call_a_rank_test(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        from hypothesis import given, settings, strategies

        @settings(max_examples=3, deadline=None)
        @given(n=strategies.integers())
        @ranks(2)
        def test_it(n):
            assert all_gather_object(n) == [n, n]
        """,
    )
    pytester.runpytest().stdout.fnmatch_lines(["rank tests: 1 passed on 2 ranks"])


def test_a_marker_of_the_same_name_is_left_to_the_project_that_puts_it(pytester: pytest.Pytester) -> None:
    marks = ["@pytest.mark.ranks", '@pytest.mark.ranks("all")', '@pytest.mark.parametrize("n_ranks", [2])']
    write(pytester, f"{marks[0]}\ndef test_a(): pass\n{marks[1]}\n{marks[2]}\ndef test_b(n_ranks): pass")
    result = pytester.runpytest()
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("rank tests:*")


LOSING_ONE = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    return True if item.name == "test_lost" else None
"""


def test_a_rank_test_that_gets_lost_fails_the_session(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(LOSING_ONE)
    write(
        pytester,
        """
        @ranks(2)
        def test_lost(): pass

        @ranks(2)
        def test_run(): pass

        @ranks(2)
        def test_deselected(): pass
        """,
    )
    result = pytester.runpytest("-k", "not deselected")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "rank tests: 1 passed on 2 ranks",
            "rank tests: 1 selected, but not run: *::test_lost",
        ]
    )


@pytest.mark.parametrize(("least", "code"), [(2, pytest.ExitCode.OK), (3, pytest.ExitCode.TESTS_FAILED)])
def test_a_session_can_demand_a_number_of_rank_tests(
    pytester: pytest.Pytester, least: int, code: pytest.ExitCode
) -> None:
    write(
        pytester,
        """
        @ranks(1, 2)
        def test_it(): pass

        def test_other(): pass
        """,
    )
    result = pytester.runpytest(f"--min-rank-tests={least}")
    assert result.ret == code
    complaint = "rank tests: only 2 passed, but --min-rank-tests asks for 3"
    assert (complaint in result.outlines) == (least == 3)


@pytest.mark.parametrize("option", ["--collect-only", "--setup-only", "--setup-plan"])
def test_a_session_that_is_to_run_no_test_lacks_none(pytester: pytest.Pytester, option: str) -> None:
    write(pytester, "@ranks(2)\ndef test_it(): pass")
    result = pytester.runpytest_subprocess(option)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*rank tests*")


def test_what_other_plugins_note_of_a_test_is_theirs(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        def test_it(request, record_property):
            record_property("ranks", 4)
            request.node.user_properties.append(("a", "b", "c"))
        """,
    )
    result = pytester.runpytest_subprocess("--min-rank-tests=1")
    result.stdout.fnmatch_lines(["*only 0 passed, but --min-rank-tests asks for 1*", "*1 passed*"])


def test_a_session_without_tests_has_too_few_as_well(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--min-rank-tests=1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["rank tests: only 0 passed, but --min-rank-tests asks for 1"])


@pytest.mark.jobs
def test_ranks_of_tests_that_run_two_at_a_time_are_counted(pytester: pytest.Pytester) -> None:
    body = HEAD + "@ranks(2)\ndef test_it():\n    assert all_gather_object(get_rank()) == [0, 1]\n"
    pytester.makepyfile(test_one=body, test_two=body)
    result = pytester.runpytest_subprocess("--numprocesses=2", "--min-rank-tests=2")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["rank tests: 2 passed on 4 ranks"])


def test_a_session_without_rank_tests_is_left_alone(pytester: pytest.Pytester) -> None:
    write(pytester, "def test_it(): pass", head="")
    result = pytester.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*rank tests*")


def test_the_plugin_imports_no_torch_and_the_pool_no_pytest() -> None:
    code = "import sys, lockstep.testing.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, lockstep.testing.pool; assert not {'torch', 'pytest'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark that all descendants of a session bear in their environment."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("LOCKSTEP_TEST_TOKEN", value)
    return value


def bearers(token: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _bears(process, token)]


def _bears(process: psutil.Process, token: str) -> bool:
    try:
        bears = process.environ().get("LOCKSTEP_TEST_TOKEN") == token
        return bears and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def assert_all_gone(token: str) -> None:
    deadline = time.monotonic() + 30
    while (left := bearers(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_nothing_outlives_a_session(
    pytester: pytest.Pytester, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    write(
        pytester,
        """
        import subprocess

        @ranks(2, 3)
        def test_it(): pass

        @ranks(2)
        def test_child():
            subprocess.Popen(["sleep", "1000"])
            os._exit(1)
        """,
    )
    result = pytester.runpytest_subprocess("--basetemp=base")
    result.assert_outcomes(passed=2, failed=1)
    assert_all_gone(token)
    assert not list(tmp_path.glob("lockstep-*"))


SCRIPT = """
import time
from lockstep.testing import run_ranks

def hang():
    print("hanging", flush=True)
    open("hanging", "w").close()
    time.sleep(1000)

if __name__ == "__main__":
    run_ranks(2, hang)
"""


def test_ranks_die_with_a_parent_that_is_killed(
    pytester: pytest.Pytester, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = pytester.makepyfile(script=SCRIPT)
    with subprocess.Popen([sys.executable, str(script)]) as parent:
        deadline = time.monotonic() + 60
        while not Path("hanging").exists() and time.monotonic() < deadline:
            assert parent.poll() is None
            time.sleep(0.02)
        assert len(bearers(token)) >= 3
        os.kill(parent.pid, signal.SIGKILL)
    assert_all_gone(token)
    assert not list(tmp_path.glob("lockstep-*"))
