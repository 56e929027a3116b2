"""Stopping a training when that is asked for at any moment: on all ranks after the same iteration.

A signal may reach any rank, and a save in the background may fail. The ranks agree on where to stop through the store
at which they met, not by a collective: an iteration costs a counter, and nothing is sent before something is asked.
Each rank counts the points that it passes, which are iterations of the training and batches of validations: it notes a
point, in its own memory, before it begins it. When a stop is asked for, each rank publishes the point that it noted
last, and waits before the next one. All go on to the highest of these points, and stop there. Since a rank notes a
point before it asks, none goes beyond it. Where a rank is silent for a minute, none stops, and the next round begins.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

from lockstep.checkpoint.together import on_all
from lockstep.dist import get_dist_info
from lockstep.errors import ConfigError, Preempted, did_you_mean
from lockstep.launch.worker import FAILING_FILE
from lockstep.watch.board import pauses
from lockstep.watch.watch import numbered, side_store

_FOR_EVER = timedelta(days=365)
_SECONDS_TO_AGREE = 60.0
_LONGEST_PAUSE = 0.25  # between two looks at the store
_SECONDS_TO_MEET = 5.0
_SECONDS_OF_A_PRESS = 0.3  # in which one Ctrl-C may reach a process twice: from the terminal, and from its parent
_NOT, _MET = "not", "met"  # verdicts: no rank stops, or not all have met; all have
_EVALUATION = 2**32  # more than an evaluation has batches
_NEVER = 2**62
_NO_FD = -1
_END = 0  # no signal has this number
_logger = logging.getLogger("lockstep.runner")


class Agreement:
    """Lets a training stop on all ranks at the same point.

    Several ranks agree through the store, at which a thread of each rank waits for requests.

    Attributes:
        point: the point that this rank has noted last.
        is_open: whether a stop can be asked for.
        has_stopped: whether the training has been stopped here.
    """

    def __init__(self) -> None:
        self.point = 0
        self.is_open = self.has_stopped = False
        self._reason: str | None = None  # of the stop that was asked for
        self._last = _NEVER  # the last point before the ranks stop
        self._is_agreed = threading.Event()
        self._store: Any = None  # torch's stubs lack `multi_set`

    @property
    def is_asked(self) -> bool:
        """Whether this rank knows that a stop has been asked for, and comes."""
        return self._reason is not None

    def stop_if_asked(self) -> None:
        """Stop here if that was asked for, on all ranks; they call this equally often, unless within `evaluation`.

        Raises:
            Preempted: the training stops here.
        """
        self.point += 1
        if self._reason is not None:
            self._stop()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Let the points inside differ in number between the ranks; what follows begins on all ranks or on none."""
        before = self.point
        yield
        self.point = before + _EVALUATION
        if self._reason is not None:
            self._stop()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the ranks agree while they train.

        **Collective**: every rank. **Cost**: a thread that sleeps, and a connection to the store.

        Raises:
            DistError: on every rank, if some rank has no store that it can share.
        """
        self._rank, self._world_size = get_dist_info()
        self._closing, self._round = threading.Event(), 0
        self.point = 0  # a training that was stopped in a validation has left the ranks at unlike points
        self.has_stopped = False
        if self._world_size > 1:
            self._store = on_all("the ranks can't agree on a stop", side_store)
            self._prefix = numbered("agreement", self._store)
            self._closed = f"{self._prefix}/closed"  # set once rank 0 has left, and answers no more requests
            self._thread = threading.Thread(target=self._listen, name="lockstep-agreement", daemon=True)
            self._thread.start()
        self.is_open = True
        try:
            yield
        finally:
            if self._store is not None:
                self._close()
            self.is_open, self._store, self._reason = False, None, None  # evaluations may follow

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop. Any thread of any rank may; what is asked besides, meanwhile, is the same."""
        if not self.is_open:
            return
        if self._store is None:
            if self._reason is None:
                self._agree(reason, None)
            return
        with suppress(Exception):  # the store is gone, and so is the job
            store: Any = side_store()  # the other connection waits
            number = self._round
            if store.add(f"{self._prefix}/{number}/claims", 1) == 1:
                asked = [self._key("asked", rank, number) for rank in range(self._world_size)]
                store.multi_set(asked, [reason] * self._world_size)

    def _stop(self) -> None:
        """Learn which point is the last one before the ranks stop; if it has passed, stop."""
        self._is_agreed.wait()
        if (reason := self._reason) is not None and self.point > self._last:
            self.has_stopped = True
            raise Preempted(reason)

    def _close(self) -> None:
        """End the thread; this rank notes no further point."""
        self._closing.set()
        with suppress(Exception):
            store = side_store()
            store.set(self._key("asked", self._rank, self._round), "")
            self._thread.join(_SECONDS_TO_MEET)
            if self._rank == 0:
                store.set(self._closed, "")

    def _key(self, name: str, rank: int, number: int) -> str:
        return f"{self._prefix}/{number}/{name}/{rank}"

    def _listen(self) -> None:
        store = self._store
        with suppress(Exception):
            while not self._closing.is_set():
                asked = self._key("asked", self._rank, self._round)
                store.wait([asked], _FOR_EVER)
                reason = store.get(asked).decode()
                if self._closing.is_set() or not reason:
                    self._last_point(store, self.point, "the training has ended")  # somebody may be asking just now
                    return
                if self._agree(reason, store):
                    return
                self._round += 1  # before it looks whether the training has ended: `_close` does so the other way round

    def _agree(self, reason: str, store: Any) -> bool:
        """Let this rank wait before its next point, learn after which one all ranks stop, and return whether they do.

        It goes on up to there.
        """
        self._last = _NEVER
        self._is_agreed.clear()
        self._reason = reason
        last: int | None = None
        try:
            last = self._last_point(store, self.point, reason)
            if last is not None and self._rank == 0:
                _tell(reason, last)
        finally:
            if last is None:
                self._reason = None
            else:
                self._last = last
            self._is_agreed.set()
        return last is not None

    def _last_point(self, store: Any, own: int, reason: str) -> int | None:
        """Publish this rank's point, and return the highest of all ranks; None if one is silent, and no rank stops.

        The last rank to publish one decides for all; rank 0 decides where one is silent for a minute.
        """
        if store is None:  # there are no other ranks
            return own
        verdict = self._key("verdict", 0, self._round)
        points = [self._key("point", rank, self._round) for rank in range(self._world_size)]
        store.set(points[self._rank], str(own))
        if store.add(f"{self._prefix}/{self._round}/points", 1) == self._world_size:
            store.compare_set(verdict, "", str(max(map(int, store.multi_get(points)))))
        for _ in pauses(_SECONDS_TO_AGREE if self._rank == 0 else math.inf, _LONGEST_PAUSE):
            if store.check([verdict]):
                break
            if self._closing.is_set() or store.check([self._closed]):
                if self._rank == 0:
                    store.compare_set(verdict, "", _NOT)
                return None
        else:
            silent = [str(rank) for rank, point in enumerate(points) if not store.check([point])]
            _logger.warning("%s: training goes on, because rank %s does not answer", reason, ", ".join(silent))
            store.compare_set(verdict, "", _NOT)
        found = store.get(verdict).decode()
        return None if found == _NOT else int(found)


def _tell(reason: str, last: int) -> None:
    stops = (
        "as soon as the present update is complete" if last else "before it begins, so that there is nothing to save"
    )
    again = ". Ctrl-C once more ends it at once, without saving" if reason.startswith("SIGINT") else ""
    _logger.warning("%s: training stops %s%s", reason, stops, again)


def ranks_meet() -> bool:
    """Return whether all ranks come here within some seconds, the same on every rank that comes, also too late.

    Unlike in a collective, none waits for one that fails.
    """
    _, world_size = get_dist_info()
    if world_size == 1:
        return True
    with suppress(Exception):  # there is no store, or it is gone
        store = side_store()
        key = numbered("meeting", store)
        verdict = f"{key}/verdict"
        if store.add(key, 1) == world_size:
            store.compare_set(verdict, "", _MET)
        if not any(store.check([verdict]) for _ in pauses(_SECONDS_TO_MEET, _LONGEST_PAUSE)):
            store.compare_set(verdict, "", _NOT)
        return bool(store.get(verdict).decode() == _MET)
    return False


@contextmanager
def stopping_at(signals: Sequence[str], agreement: Agreement) -> Iterator[None]:
    """Stop a training at these signals. Those for which the user's script has a handler are left to it.

    A second Ctrl-C interrupts as usual, and nothing is saved. Once the training has stopped, the others are ignored,
    until another one begins, also by programs that this process starts: they would change the exit code of a process
    that is about to end.

    **Cost**: a thread that sleeps.

    Raises:
        ConfigError: there is no such signal.
    """
    numbers = [signal_named("stop_signals", name) for name in signals]
    if threading.current_thread() is threading.main_thread():
        _heed_again()
    if not numbers or not agreement.is_open or threading.current_thread() is not threading.main_thread():
        yield
        return
    rank = get_dist_info()[0]
    own = [number for number in numbers if signal.getsignal(number) is _usual(number)]
    with _calling_at_signals(lambda name: _stop_or_end(agreement, name, rank), own, agreement) as handle:
        try:
            yield
        finally:
            if agreement.has_stopped:
                for number in own:
                    if number != signal.SIGINT and signal.getsignal(number) is handle:
                        signal.signal(number, signal.SIG_IGN)
                        _ignored.add(number)


def _stop_or_end(agreement: Agreement, name: str, rank: int) -> None:
    """Ask all ranks to stop; end this process instead if the agent stops it because of a failure elsewhere."""
    if os.path.exists(os.environ.get(FAILING_FILE, "")):
        os._exit(128 + signal.Signals[name])
    agreement.ask(f"{name} on rank {rank}")


@contextmanager
def _calling_at_signals(
    act: Callable[[str], None], numbers: Sequence[signal.Signals], agreement: Agreement
) -> Iterator[Any]:
    """Call `act` with the name of a signal as soon as it comes, in a thread, whatever the main thread is doing.

    Yields their handler.

    Python's own handlers wait until the main thread returns from C++, for instance from a collective.
    """
    pressed: list[float] = []  # when Ctrl-C was
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def read() -> None:
        while _END not in (received := reading.recv(64)):
            for number in numbers:
                if number in received and signal.getsignal(number) is handle:
                    act(number.name)

    def handle(number: int, frame: FrameType | None) -> None:
        if signal.Signals(number) not in _handled:  # somebody has put this handler back later
            signal.signal(number, _usual(number))
            signal.raise_signal(number)
            return
        if number == signal.SIGINT:
            if pressed and not agreement.is_asked and time.monotonic() - pressed[0] > _SECONDS_TO_AGREE:
                pressed.clear()  # the ranks did not agree on that stop, and trained on
            pressed.append(time.monotonic())
            if pressed[-1] - pressed[0] > _SECONDS_OF_A_PRESS:
                raise KeyboardInterrupt
        if before != _NO_FD:  # Python then wakes the user's event loop, and not the thread
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
        yield handle
    finally:
        for number in numbers:
            if signal.getsignal(number) is handle:
                signal.signal(number, _usual(number))
        _handled.difference_update(numbers)
        if before == _NO_FD:
            signal.set_wakeup_fd(_NO_FD)
        writing.send(bytes([_END]))
        thread.join()
        reading.close()
        writing.close()


_handled: set[signal.Signals] = set()
_ignored: set[signal.Signals] = set()  # since a training has stopped


def _usual(number: int) -> Any:
    """Return the handler that a signal has where nobody has set one."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _restore_signals_in_child() -> None:
    """Let a forked process end at these signals, as a process without handlers does."""
    if _handled:
        signal.set_wakeup_fd(_NO_FD)
    for number in _handled:
        signal.signal(number, _usual(number))
    _handled.clear()
    _heed_again()


def _heed_again() -> None:
    """Let signals that were ignored after a stop act as they usually do, unless somebody has set a handler since."""
    for number in _ignored:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _usual(number))
    _ignored.clear()


os.register_at_fork(after_in_child=_restore_signals_in_child)


def signal_named(option: str, name: str) -> signal.Signals:
    """Return the signal of a name, which an option gives.

    Raises:
        ConfigError: there is no such signal.
    """
    if name not in (known := signal.Signals.__members__):
        raise ConfigError(
            f"`{option}` must name signals, such as SIGTERM, but names {name!r}{did_you_mean(name, known)}"
        )
    return known[name]
