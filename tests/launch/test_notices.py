"""What surrounds the import of torch: a line before it, and Ctrl-C only after it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap


def run(script):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)


def test_the_line_comes_before_torch_and_once():
    ended = run(
        """
        from lockstep.launch.notices import loading_torch
        with loading_torch("loading torch to test"):
            import torch
        with loading_torch("not again"):
            import torch
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "lockstep: loading torch to test\n")


def test_an_interruption_waits_until_torch_is_loaded():
    ended = run(
        """
        import signal
        from lockstep.launch.notices import loading_torch
        try:
            with loading_torch():
                signal.raise_signal(signal.SIGINT)
                print("still loading")
        except KeyboardInterrupt:
            print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """
    )
    assert ended.stdout == "still loading\ninterrupted True\n"


def test_a_second_interruption_does_not_wait():
    ended = run(
        """
        import signal
        from lockstep.launch.notices import loading_torch
        with loading_torch():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            print("not reached")
        """
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "")


def test_a_handler_of_ones_own_is_left_alone():
    ended = run(
        """
        import signal
        from lockstep.launch.notices import loading_torch
        signal.signal(signal.SIGINT, lambda *_: print("mine"))
        with loading_torch():
            signal.raise_signal(signal.SIGINT)
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "mine\n")
