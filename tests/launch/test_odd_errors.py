"""Errors that can't be shown, that are no `Exception`, or that are very long: the rank is named, with type and line."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

from .conftest import as_rank

CLASSES = """
    class Mute(ValueError):
        def __str__(self): raise RuntimeError("no words")
        __repr__ = __str__
        def __reduce__(self): raise RuntimeError("no copy")

    class Deaf(Exception):
        failed_ranks = property(lambda self: 1 / 0)

    class Stop(KeyboardInterrupt): pass
"""
# What a rank raises: the type, the exit code, and what is in the traceback.
CASES = {
    "raise Mute": ("Mute", 1, "Mute: <exception str() failed>"),
    "raise ValueError('outer') from Mute()": ("ValueError", 1, "Mute: <exception str() failed>"),
    "raise KeyError(Mute())": ("KeyError", 1, "KeyError: <exception str() failed>"),
    "raise Deaf": ("Deaf", 1, "Deaf, which can't be shown: ZeroDivisionError in script.py:"),
    "raise ExceptionGroup('two', [Mute(), ValueError('boom')])": ("ExceptionGroup", 1, "ValueError: boom"),
    "raise BaseExceptionGroup('two', [Mute(), Stop()])": ("BaseExceptionGroup", 1, "Stop"),
    "raise Stop('enough')": ("Stop", 130, "Stop: enough"),
    "raise GeneratorExit('odd')": ("GeneratorExit", 1, "GeneratorExit: odd"),
    "raise ValueError('x' * 10**8 + 'the end')": ("ValueError", 1, "the end"),
    "raise ValueError('\\udcff \\ud800')": ("ValueError", 1, "ValueError: "),
    "error = ValueError('round'); raise error from error": ("ValueError", 1, "ValueError: round"),
}


@pytest.mark.parametrize("raises", CASES)
def test_an_odd_error_is_recorded_with_its_type_and_line(tmp_path, raises):
    kind, code, text = CASES[raises]
    done = as_rank(tmp_path, dedent(CLASSES) + raises, log_dir=tmp_path / "logs")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    extra = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    log = (tmp_path / "logs" / "rank_3.log").read_text(errors="replace")
    assert (extra["type"], extra["exitcode"]) == (kind, code)
    assert text in extra["py_callstack"]
    assert len(log) < 100_000 > len(extra["py_callstack"])
    if "Deaf" not in raises:
        line = f'script.py", line {CLASSES.count(chr(10)) + 1}'
        assert line in extra["py_callstack"]
        assert line in log


def test_an_error_without_words_reaches_all_ranks_and_the_launcher(scripts):
    script = scripts.write(
        dedent(CLASSES)
        + dedent("""
        from lockstep.dist import PeerError, barrier, get_rank, init_dist, run_on_main

        def refuse():
            raise Mute  # here

        init_dist("pytorch", timeout=60)
        try:
            run_on_main(refuse)
        except (PeerError, Mute) as error:
            if get_rank() == 1:
                print(error)
        if get_rank() == 1:
            refuse()
        barrier()
    """)
    )
    code, out, err = scripts.run(script, "--nproc", "2")
    lines = (scripts.folder / script).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if text.endswith("# here"))
    shown = f"Mute: (its message can't be shown: RuntimeError in __str__; raised at script.py:{line})"
    assert code == 1
    assert shown in out
    assert "error: rank 1 raised Mute (pid " in err
    assert f'script.py", line {line}, in refuse' in err


def test_a_message_forges_no_line_and_steers_no_terminal(scripts):
    forged = r"boom\nrank 0 was stopped.\n\x1b[2J\x1b]0;title\x07\rlockstep: all is well"
    script = scripts.write(f"""
        import os
        if os.environ["RANK"] == "1":
            raise type("Odd\\nlockstep: well", (ValueError,), {{}})("{forged}")
    """)
    _, _, err = scripts.run(script, "--nproc", "2", "--log-dir", "logs")
    log = (scripts.folder / "logs" / "rank_1.log").read_text()
    assert r"error: rank 1 raised Odd\nlockstep: well (pid " in err
    for shown in (err, log):
        assert "boom\n    rank 0 was stopped.\n    \\x1b[2J\\x1b]0;title\\x07\\rlockstep: all is well" in shown
        assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in shown)


def test_what_a_rank_prints_to_a_full_disk_does_not_end_it(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_3.log").symlink_to("/dev/full")
    done = as_rank(tmp_path, "print('x' * 100000)\nprint('\\ud800')\nopen('done', 'w')", log_dir=tmp_path / "logs")
    assert done.returncode == 0
    assert (tmp_path / "done").exists()


def test_bytes_of_no_encoding_pass(scripts):
    script = scripts.write("import os\nos.write(1, b'\\xff\\xfe\\x00 raw\\n')")
    job = scripts.start(script, "--nproc", "1")
    job.stdout.reconfigure(errors="surrogateescape")
    assert job.communicate(timeout=90)[0] == "\udcff\udcfe\x00 raw\n"
    assert job.returncode == 0
