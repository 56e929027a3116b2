"""Stopping a training at a signal: on all ranks after the same iteration, so that it can be saved and resumed.

A signal may reach any rank at any moment. The ranks agree on where to stop through the store at which they met, not by
a collective: an iteration costs a counter, and nothing is sent before a signal comes. Each rank counts the points that
it passes, which are iterations of the training and batches of validations, and announces a point before it begins it.
After a signal, each rank publishes the point that it announced last, and waits before the next one. All go on to the
highest of these points, and stop there. Since a rank announces a point before it asks, none goes beyond it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from lockstep.dist import get_dist_info
from lockstep.dist.world import side_store
from lockstep.errors import ConfigError, DistError, Preempted, did_you_mean
from lockstep.launch.worker import STOPPED_FILE

_FOR_EVER = timedelta(days=365)
_SECONDS_TO_AGREE = 60.0
_POLL_SECONDS = 0.01
_EVALUATION = 2**32  # more than an evaluation has batches
_NEVER = 2**62
_NO_FD = -1
_END = 0  # no signal has this number
_logger = logging.getLogger("lockstep.runner")
_T = TypeVar("_T")


class Preemption:
    """Ends a training at a signal, on all ranks at the same point."""

    def __init__(self) -> None:
        self._point = 0
        self._reason: str | None = None
        self._last = _NEVER
        self._is_agreed = threading.Event()

    def points(self, items: Iterable[_T], may_stop: Callable[[], bool] = lambda: True) -> Iterator[_T]:
        """Yield the items; the training may stop before each of them, and after the last.

        Args:
            items: as many on every rank.
            may_stop: returns whether the training may stop at this moment; the same on every rank.

        Raises:
            Preempted: the training stops here.
        """
        rest = iter(items)
        while True:
            if may_stop():
                self._announce(self._point + 1)
            try:
                item = next(rest)
            except StopIteration:
                return
            yield item

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Let the points inside differ in number between the ranks; what follows begins on all ranks or on none."""
        before = self._point
        yield
        self._announce(before + _EVALUATION)

    def _announce(self, point: int) -> None:
        self._point = point
        if self._reason is not None:
            self._is_agreed.wait()
            if point > self._last:
                raise Preempted(self._reason)

    @contextmanager
    def watching(self, signals: Sequence[str]) -> Iterator[None]:
        """Stop at these signals. Those for which the user's script has a handler are left to it.

        **Collective**: every rank. **Cost**: two threads that sleep, and a connection to the store.

        Raises:
            ConfigError: there is no such signal.
        """
        numbers = [_number(name) for name in signals]
        if not numbers or threading.current_thread() is not threading.main_thread():
            yield
            return
        rank, world_size = get_dist_info()
        with ExitStack() as opened:
            ask: Callable[[str], None] = self._stop_alone
            if world_size > 1:
                try:
                    ranks = _Ranks(rank, world_size, self)
                except DistError as error:
                    _logger.warning("%s end the ranks at once, without a checkpoint: %s", ", ".join(signals), error)
                    yield
                    return
                opened.callback(ranks.close)
                ask = ranks.ask
            own = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
            opened.enter_context(_calling(lambda name: _stop_or_end(ask, name, rank), own))
            try:
                yield
            finally:
                self._reason = None  # evaluations may follow

    def _stop_alone(self, reason: str) -> None:
        self.agree(self.begin_stop(reason))

    @property
    def point(self) -> int:
        """The point that this rank has announced last."""
        return self._point

    def begin_stop(self, reason: str) -> int:
        """Let this rank wait before its next point, and return the one that it has announced last."""
        self._reason = reason
        return self._point

    def agree(self, last: int) -> None:
        """Let this rank go on, up to the point `last`."""
        self._last = last
        self._is_agreed.set()


class _Ranks:
    """The agreement of several ranks on the point after which they stop, made by a thread that waits at the store.

    Args:
        rank: this rank.
        world_size: number of ranks.
        preemption: the training that stops.
    """

    _count = 0  # agreements that this process has prepared, the same on every rank

    def __init__(self, rank: int, world_size: int, preemption: Preemption) -> None:
        type(self)._count += 1
        self._prefix = f"preemption_{self._count}"
        self._rank, self._world_size = rank, world_size
        self._preemption = preemption
        self._is_closing = False
        self._store = side_store()
        self._thread = threading.Thread(target=self._listen, name="lockstep-preemption", daemon=True)
        self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop."""
        with suppress(Exception):  # the store is gone, and so is the job
            store = side_store()  # the other connection waits
            for rank in range(self._world_size):
                store.set(self._key("asked", rank), reason)

    def close(self) -> None:
        """End the thread; this rank announces no further point."""
        self._is_closing = True
        with suppress(Exception):
            store = side_store()
            store.set(self._key("point", self._rank), str(self._preemption.point))
            store.set(self._key("asked", self._rank), "")
        self._thread.join(1.0)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _listen(self) -> None:
        asked = self._key("asked", self._rank)
        with suppress(Exception):
            self._store.wait([asked], _FOR_EVER)
            if not self._is_closing:
                self._agree(self._store.get(asked).decode())

    def _agree(self, reason: str) -> None:
        """Wait until every rank has published its point, and stop after the highest."""
        own, last = self._preemption.begin_stop(reason), _NEVER
        points = [self._key("point", rank) for rank in range(self._world_size)]
        try:
            self._store.set(points[self._rank], str(own))
            deadline = time.monotonic() + _SECONDS_TO_AGREE
            while not self._store.check(points):
                if self._is_closing:  # the training has ended
                    return
                if time.monotonic() > deadline:
                    silent = [str(rank) for rank, point in enumerate(points) if not self._store.check([point])]
                    _logger.warning("%s: training goes on, because rank %s does not answer", reason, ", ".join(silent))
                    return
                time.sleep(_POLL_SECONDS)
            last = max(int(self._store.get(point)) for point in points)
            if self._rank == 0:
                _logger.warning("%s: training stops as soon as the present iteration is complete", reason)
        finally:
            self._preemption.agree(last)


def spare_workers(loader: Any) -> None:
    """Let the workers of a `DataLoader` outlive a signal that is sent to all processes of a job, as Slurm does."""
    if isinstance(loader, DataLoader) and getattr(loader.worker_init_fn, "func", None) is not _outlive:
        loader.worker_init_fn = partial(_outlive, loader.worker_init_fn)


def _outlive(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _outlive_one)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _outlive_one(number: int, frame: FrameType | None) -> None:
    """Let the next signal end the process: torch and Python end a worker that is slow to stop by SIGTERM."""
    signal.signal(number, signal.SIG_DFL)


def _stop_or_end(ask: Callable[[str], None], name: str, rank: int) -> None:
    """Ask all ranks to stop; end this process instead if the agent stops it because of a failure elsewhere."""
    if os.path.exists(os.environ.get(STOPPED_FILE, "")):
        os._exit(128 + signal.Signals[name])
    ask(f"{name} on rank {rank}")


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
