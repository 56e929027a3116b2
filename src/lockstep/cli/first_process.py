"""The first process of a container.

The kernel gives that process no signal for which it has no handler: while torch is loaded, or a model is built, SIGTERM
would be lost. And processes whose parents have ended are its children, which somebody must wait for.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

_SI_KERNEL = 0x80  # the code of a signal that a terminal has sent: to all in front of it, and so to the child, too


def leave_first_process() -> None:
    """In the first process of a container, go on in a child; the first one passes on signals, and ends as it does."""
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none is lost
    child = os.fork()
    if child:
        _stand_before(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stand_before(child: int) -> NoReturn:
    while True:
        came = signal.sigwaitinfo(signal.valid_signals())
        if came.si_signo == signal.SIGCHLD:
            _wait_for_the_dead(child)
        # Of a terminal that is gone, SIGHUP tells the leader of the session alone, as the first process may be.
        elif came.si_code != _SI_KERNEL or came.si_signo == signal.SIGHUP:
            os.kill(child, came.si_signo)


def _wait_for_the_dead(child: int) -> None:
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)  # as a shell reports it: no signal ends this process
        if pid == 0:
            return
