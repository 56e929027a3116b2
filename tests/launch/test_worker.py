from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from .conftest import as_rank


@pytest.fixture
def rank(tmp_path):
    """Return a function that runs a script as one rank, as the agent would."""
    return partial(as_rank, tmp_path)


def recorded(tmp_path):
    return json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]


@pytest.mark.parametrize("module", [False, True])
def test_a_script_finds_what_python_would_give_it(rank, tmp_path, module):
    done = rank(
        """
        import sys
        print(__name__, sys.argv, sys.path[0], "torch" in sys.modules, sys.modules["__main__"].__file__)
        """,
        *("--agent", "-m", "$x"),
        module=module,
    )
    script = str(tmp_path / "script.py")
    argv = [script, "--agent", "-m", "$x"]
    assert done.stdout == f"__main__ {argv} {tmp_path} False {script}\n"
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "error.json").exists()


@pytest.mark.parametrize("module", [False, True])
def test_a_safe_path_stays_as_it_is(rank, tmp_path, module):
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = rank(
        "import sys\nprint(sys.path[0])",
        module=module,
        env={"PYTHONSAFEPATH": "1", "PYTHONPATH": f"/first{os.pathsep}{path}"},
    )
    assert done.stdout == "/first\n"


def test_an_error_is_recorded_with_the_frames_of_the_script_alone(rank, tmp_path):
    done = rank("def f():\n    raise ValueError('boom')\nf()\n")
    assert (done.returncode, done.stderr) == (1, "")
    extra = recorded(tmp_path)
    trace = extra["py_callstack"]
    assert trace.startswith("Traceback (most recent call last):\n  File ")
    assert trace.count("File ") == 2
    assert trace.endswith("ValueError: boom\n")
    assert extra["type"] == "ValueError"
    assert abs(extra["time"] - time.time()) < 60


def test_a_disk_that_refuses_a_save_is_recorded_as_its_message_alone(rank, tmp_path):
    script = """
        from lockstep.errors import caused_by
        def save():
            try:
                raise OSError({number}, "No space")
            except OSError as error:
                raise caused_by(OSError(error.errno, "it could not be written: do this"), {ranks}) from error
        save()
    """
    rank(script.format(number=errno.ENOSPC, ranks=[0]))
    assert recorded(tmp_path)["py_callstack"] == f"OSError: [Errno {errno.ENOSPC}] it could not be written: do this\n"
    for other in ({"number": errno.ENOENT, "ranks": [0]}, {"number": errno.ENOSPC, "ranks": []}):  # of the user's
        rank(script.format(**other))
        assert "in save" in recorded(tmp_path)["py_callstack"]


def test_a_script_that_cannot_begin_is_recorded_without_frames(rank, tmp_path):
    rank("print('a'\n")
    trace = recorded(tmp_path)["py_callstack"]
    assert trace.startswith(f'  File "{tmp_path}/script.py", line 1\n')
    assert trace.endswith("SyntaxError: '(' was never closed\n")
    assert "runpy" not in trace


@pytest.mark.parametrize(("ranks", "follows"), [([1], "gone"), ([1, 3], None), ([], None)])
def test_an_error_of_all_ranks_is_the_fault_of_those_that_it_names(rank, tmp_path, ranks, follows):
    rank(f"""
        from lockstep.errors import CollectiveMismatchError
        raise CollectiveMismatchError("their call 2 differs", failed_ranks={ranks})
    """)
    assert recorded(tmp_path)["follows"] == follows
    rank(f"""
        from lockstep.errors import caused_by
        raise caused_by(OSError("the disk is full"), {ranks})
    """)
    assert recorded(tmp_path)["follows"] == follows


def test_an_error_at_the_end_of_the_process_is_recorded(rank, tmp_path):
    done = rank("import atexit, sys\natexit.register(lambda: sys.excepthook(OSError, OSError('late'), None))")
    assert done.stderr == ""
    assert recorded(tmp_path)["py_callstack"] == "OSError: late\n"


def test_an_error_of_input_is_recorded_without_frames(rank, tmp_path):
    rank("from lockstep.errors import ConfigError\nraise ConfigError('no such key')")
    assert recorded(tmp_path)["py_callstack"] == "lockstep.errors.ConfigError: no such key\n"


@pytest.mark.parametrize(("code", "expected"), [("3", 3), ("'words'", 1), ("", 0), ("0", 0)])
def test_exit_codes_pass(rank, tmp_path, code, expected):
    done = rank(f"import sys\nsys.exit({code})")
    assert done.returncode == expected
    assert (tmp_path / "error.json").exists() == (expected != 0)
    assert done.stderr == ("words\n" if code == "'words'" else "")


def test_an_interrupt_is_left_to_the_launcher_to_tell(rank, tmp_path):
    done = rank("raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (130, "")
    assert recorded(tmp_path)["type"] == "KeyboardInterrupt"


def test_ranks_other_than_the_first_write_to_their_log(rank, tmp_path):
    script = "import os, sys\nprint('out')\nos.system('echo from C')\nprint('err', file=sys.stderr)\n1 / 0"
    done = rank(script, log_dir=tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    text = (tmp_path / "rank_3.log").read_text()
    assert {"out", "from C", "err", "ZeroDivisionError: division by zero"} <= set(text.splitlines())
    done = rank(script, log_dir=tmp_path, local_rank=0)
    assert "out" in done.stdout
    assert (tmp_path / "rank_3.log").read_text() == text


def test_secrets_in_an_error_are_masked(rank, tmp_path):
    rank("raise ValueError('s3://me:sesame99@host/data is not there')", log_dir=tmp_path)
    for told in ((tmp_path / "rank_3.log").read_text(), (tmp_path / "error.json").read_text()):
        assert "s3://me:***@host/data is not there" in told
        assert "sesame99" not in told


def test_a_rank_that_was_stopped_ends_without_freeing_all_but_with_all_that_runs_at_exit(rank):
    script = """
        import atexit, threading, time
        from lockstep.errors import Preempted

        class Freed:
            def __del__(self):
                print("freed")

        freed = Freed()
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: time.sleep(0.3) or print("thread")).start()
        raise Preempted("SIGTERM on rank 0")
    """
    done = rank(script)
    assert (done.returncode, done.stdout) == (75, "thread\nat exit\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process when its parent is no more")
def test_a_rank_dies_with_its_agent(tmp_path):
    script = tmp_path / "script.py"
    pid_file = tmp_path / "pid"
    script.write_text(f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)")
    code = dedent(
        """
        import os, subprocess, sys
        words = [sys.executable, "-m", "lockstep.launch.worker", str(os.getpid()), "", sys.argv[1]]
        subprocess.run(words, start_new_session=True)
        """
    )
    agent = subprocess.Popen([sys.executable, "-c", code, str(script)])
    pid = int(_text_of(pid_file))
    rank = psutil.Process(pid)
    agent.kill()
    agent.wait()
    assert rank.wait(timeout=10) is None


def test_a_rank_whose_agent_is_gone_does_not_begin():
    words = [sys.executable, "-m", "lockstep.launch.worker", "1", "", "no_such_script.py"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def _text_of(path: Path) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_a_rank_survives_that_it_is_asked_for_its_stack_while_other_threads_run(rank):
    done = rank(
        """
        import pathlib, signal, subprocess, sys, threading
        over = threading.Event()
        def run():
            while not over.is_set():
                pathlib.Path("a/b").with_name("c").exists()
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        # Another process asks: this one would hold the interpreter's lock while it sends a signal.
        ask = "import os, sys, time\\nfor _ in range(1000): os.kill(os.getppid(), int(sys.argv[1])); time.sleep(0.0005)"
        with subprocess.Popen([sys.executable, "-c", ask, str(int(signal.SIGRTMAX))]) as asking:
            while asking.poll() is None:
                pass
        over.set()
        for thread in threads:
            thread.join()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
