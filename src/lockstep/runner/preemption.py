"""Stopping a training at a signal: on all ranks after the same iteration, so that it can be saved and resumed.

A signal may reach any rank at any moment.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from lockstep.dist import get_dist_info
from lockstep.errors import ConfigError, DistError, did_you_mean
from lockstep.launch.worker import STOPPED_FILE
from lockstep.runner.agreement import Agreement, Request

if TYPE_CHECKING:
    from lockstep.runner.run import TrainRun

_NO_FD = -1
_END = 0  # no signal has this number
_logger = logging.getLogger("lockstep.runner")


@contextmanager
def answering(run: TrainRun) -> Iterator[None]:
    """Let signals stop a training, and a file in the work_dir ask for a checkpoint.

    **Collective**: every rank. **Cost**: three threads that sleep, and a connection to the store.

    Raises:
        ConfigError: `stop_signals` names a signal that does not exist.
    """
    with ExitStack() as opened:
        try:
            opened.enter_context(run.agreement.opened(run.saving.save_now))
        except DistError as error:
            run.logger.debug("the ranks can't agree on where to stop or to save: %s", error)
        opened.enter_context(stopping_at(run.args.stop_signals, run.agreement))
        opened.enter_context(run.saving.watching(run.agreement))
        yield


@contextmanager
def stopping_at(signals: Sequence[str], agreement: Agreement) -> Iterator[None]:
    """Stop a training at these signals. Those for which the user's script has a handler are left to it.

    **Cost**: a thread that sleeps.

    Raises:
        ConfigError: there is no such signal.
    """
    numbers = [_number(name) for name in signals]
    if not numbers or threading.current_thread() is not threading.main_thread():
        yield
        return
    if not agreement.is_open:
        _logger.warning(
            "%s end the ranks at once, without a checkpoint: they have no store that they can share", ", ".join(signals)
        )
        yield
        return
    rank = get_dist_info()[0]
    own = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    with _calling(lambda name: _stop_or_end(agreement, name, rank), own):
        yield


def _stop_or_end(agreement: Agreement, name: str, rank: int) -> None:
    """Ask all ranks to stop; end this process instead if the agent stops it because of a failure elsewhere."""
    if os.path.exists(os.environ.get(STOPPED_FILE, "")):
        os._exit(128 + signal.Signals[name])
    agreement.ask(Request("stop", f"{name} on rank {rank}"))


@contextmanager
def _calling(act: Callable[[str], None], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Call `act` with the name of a signal as soon as it comes, in a thread, whatever the main thread is doing.

    Python's own handlers wait until the main thread returns from C++, for instance from a collective.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def read() -> None:
        while _END not in (received := reading.recv(64)):
            for number in numbers:
                if number in received and signal.getsignal(number) is handle:
                    act(number.name)

    def handle(number: int, frame: FrameType | None) -> None:
        if signal.Signals(number) not in _handled:  # somebody has put this handler back later
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif before != _NO_FD:  # the user's own event loop is woken, and not the thread
            writing.send(bytes([number]))

    thread = threading.Thread(target=read, name="lockstep-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    if before != _NO_FD:
        signal.set_wakeup_fd(before)
    for number in numbers:
        signal.signal(number, handle)
    _handled.update(numbers)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)
        _handled.difference_update(numbers)
        if before == _NO_FD:
            signal.set_wakeup_fd(_NO_FD)
        writing.send(bytes([_END]))
        thread.join()
        reading.close()
        writing.close()


_handled: set[signal.Signals] = set()


def _leave_to_parent() -> None:
    """Let a forked process end at these signals, as other processes do."""
    if _handled:
        signal.set_wakeup_fd(_NO_FD)
        for number in _handled:
            signal.signal(number, signal.SIG_DFL)
        _handled.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _number(name: str) -> signal.Signals:
    known = [one.name for one in signal.Signals]
    if name not in known:
        raise ConfigError(
            f"`stop_signals` must name signals, such as SIGTERM, but names {name!r}{did_you_mean(name, known)}"
        )
    return signal.Signals[name]
