"""The watch: a thread of each rank that can say what this rank does, also while its main thread waits or hangs.

So an error can name the ranks that did not arrive, with their last calls and their stacks, and a mismatch can show what
each rank called. The thread sleeps; about four times a second (`Board.tick`) it looks whether another rank asks, and
how long the last call of each group has been unfinished, on the host or on a device.

Keys of a group in the store: `same/g` (digest of its first rank's calls, at every fourth look), `failure/g` (why it
can't be used further), `look/g` (which rank was the last to look at a call that does not end, and which call that was),
`differs/g/n` (after n mismatches, which rank has found another), `absent/g/n/c` (after n mismatches, who was not in
call c, which has failed, or, if c is `device`, whom a device has lost; until that is known, which rank asks).
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import threading
import time
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any, cast
from weakref import ref

import torch.distributed as torch_dist
from torch.distributed import GroupMember, ProcessGroup, Store

from lockstep.calls import Calls
from lockstep.errors import DistError, message_of, ranks_in_words
from lockstep.groups import Comm, recorded_groups
from lockstep.watch.absent import AbsentSearch, WatchOfRank
from lockstep.watch.diagnosis import absence, lines_of
from lockstep.watch.interrupt import end_process, groups_in_error, let_graphs_be_captured
from lockstep.watch.main_thread import Frame, frames_of_main_thread, is_in_own_code, stack_of_main_thread

_SECONDS_TO_LOOK = 1.0  # after which a call is looked at for the first time, then at doubling intervals
_TICKS_TO_COMPARE = 4
_SECONDS_TO_GO_ON = 2.0  # for a main thread whose group has been aborted
_SECONDS_TO_TELL = 45.0  # for a main thread whose device has lost a rank; torch ends the process after a minute
_SECONDS_OF_STORE = 10.0  # for one answer; torch would look for five minutes for the file of a FileStore that is gone
_HEARTBEAT = "LOCKSTEP_HEARTBEAT"

_logger = logging.getLogger("lockstep.dist")
_watch: Watch | None = None


def side_store() -> Store:
    """Return a new connection to the store at which the ranks met.

    A thread may wait at it without stopping the others. Keys are those of the default group.

    Raises:
        DistError: the store can't be shared, or there is none.
    """
    try:
        default = GroupMember.WORLD
        assert default is not None, "there is no default group"
        met: Any = default.get_group_store()
        if _watch is not None and _watch.is_cut_off:
            raise DistError("the store does not answer")
        met.check(["who/0"])  # fails at once if the store is gone, to which `clone` would try to connect for minutes
        return cast("Store", met.clone())  # torch's stubs lack it
    except Exception as error:
        raise DistError(f"the ranks have no store that can be shared: {message_of(error)}") from error


def numbered(kind: str, store: Store) -> str:
    """Return what keys begin with that no rank has used yet; the same on all ranks that come here equally often.

    The store counts, since it is as old as its keys: a process may have been a rank of other jobs before.
    """
    return f"{kind}_{store.add(f'{kind}/{torch_dist.get_rank()}', 1)}"


def start_watch() -> None:
    """Start the thread for the default group, unless it runs."""
    global _watch
    default = GroupMember.WORLD
    if default is None or default.size() < 2 or torch_dist.get_backend(default) == "fake":
        return
    if _watch is not None and _watch.default() is default:
        return
    if (former := take_watch()) is not None:  # of a group that torch's own function has ended
        former.stop()
    with suppress(DistError):
        _watch = Watch(default)


def current_watch() -> Watch | None:
    """Return the watch of the default group, if it runs."""
    return _watch


def take_watch() -> Watch | None:
    """Return the watch of the default group, if it runs; from now on there is none."""
    global _watch
    watch, _watch = _watch, None
    return watch


class Watch(WatchOfRank):
    """The thread of a rank, which looks at the store, at devices and at the last call of each group.

    Attributes:
        default: weak reference to the default group.
    """

    def __init__(self, default: ProcessGroup) -> None:
        self.default = ref(default)
        self._beat = heartbeat_seconds()
        # For each group: when a call began, and after how many seconds of it to look and to warn.
        self._waits: dict[str, tuple[float, float, float]] = {}
        self._compared = time.monotonic()
        # For each group that differed at the last look, how often its record had begun anew.
        self._differed: dict[str, int] = {}
        self._position: list[Frame] = []  # where the main thread is
        # The record of a group whose device has lost a rank, and since when.
        self._lost: tuple[Calls | None, float] = (None, math.inf)
        self._heard = -1
        store = side_store()
        store.set_timeout(timedelta(seconds=_SECONDS_OF_STORE))
        super().__init__(default.rank(), default.size(), store)
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, after what it does at present."""
        atexit.unregister(self.stop)
        self.stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self.stopping.wait(self.board.tick):
            self._look_at_main_thread()
            try:
                self.interrupt_failed()
                indices = [calls.device_index for _, calls in recorded_groups()]
                let_graphs_be_captured(next((index for index in indices if index is not None), None))
                if not self.is_cut_off:
                    self._look_at_store()
                self.look_at_devices()
                for comm, calls in recorded_groups():
                    self._look_at_call(comm, calls)
            except Exception:  # the store is gone, and soon the job; or its host was stopped for a while
                _logger.debug("the store does not answer", exc_info=True)
                self.cut_off()

    def _look_at_main_thread(self) -> None:
        """Note since when the main thread is where it is; end the process if it can't raise the failure of a group.

        It raises one in its next collective, or in the one that waits for a device, whose call the watch has aborted.
        It may never come to that: the device may hang; or the main thread computes until torch ends the process, which
        would name nobody.
        """
        position, now = frames_of_main_thread(), time.monotonic()
        if position != self._position:
            self._position, self._still_since = position, now
        for calls, since, seconds, what in (
            (self._aborted, self._still_since, _SECONDS_TO_GO_ON, "does not go on"),
            (*self._lost, _SECONDS_TO_TELL, "has not come to a collective, and torch is about to end the process"),
        ):
            # It has failed once the main thread has raised the failure.
            if calls is not None and calls.failure and not calls.has_failed and now - since >= seconds:
                error = copy(calls.failure)
                error.add_note("\n".join([f"The main thread {what}:", *stack_of_main_thread()]))
                end_process(error)

    def _look_at_store(self) -> None:
        self.board.gone([0])  # learn where it is: the store may end with it
        self.board.answer()
        if self.board.answered != self._heard:
            self._heard = self.board.answered
            self.hear()
        if time.monotonic() - self._compared > _TICKS_TO_COMPARE * self.board.tick:
            self._compared = time.monotonic()
            for comm, calls in recorded_groups():
                if calls.failure is None:
                    self._compare(comm, calls)

    def look_at_devices(self) -> None:
        """Let each group fail in which a device's backend has met an error, and name the rank that is gone.

        An error in a group that torch alone uses, as of a mesh, is one of the default group.
        """
        errors = groups_in_error()
        if not errors:
            return
        recorded = recorded_groups()
        failing = [one for one in recorded if one[0].pg in errors]
        error: DistError | None = None
        for comm, calls in failing or [one for one in recorded if one[0].pg is GroupMember.WORLD]:
            if calls.failure is None:
                error = error or self._lost_on_device(comm, calls, next(iter(errors.values())))
                calls.failure = calls.failure or error
                self._lost = (calls, time.monotonic())
                self.interrupt(comm, calls)
        if error is not None:  # the main thread raises it in its next call
            _logger.warning("%s", message_of(error))

    def _lost_on_device(self, comm: Comm, calls: Calls, word: str) -> DistError:
        """Return the error of a group whose device has lost a rank."""
        number = calls.number  # the main thread may go on
        lost = [one._replace(has_ended=True) for one in AbsentSearch(self, comm, calls, number, is_lost=True).find()]
        detail = f"The backend of the device has met an error ({word})."
        is_gone = word != "TIMEOUT"
        return absence(comm, lost, detail, number=number, is_gone=is_gone, is_cut_off=self.is_cut_off)

    def _look_at_call(self, comm: Comm, calls: Calls) -> None:
        """If the last call is unfinished for long, find out why, and say who is late."""
        number, since = calls.unfinished()
        if not number or calls.failure is not None:
            return
        if calls.waiting and is_in_own_code(self._position):
            return  # as in a backward pass: it is this rank for which others wait
        name, seconds = comm.group_name, time.monotonic() - since
        if self._is_overdue(comm, seconds):
            absent = AbsentSearch(self, comm, calls, number, in_call=True).find()
            detail = f"It has not ended for {seconds:.0f} s."
            error = absence(comm, absent, detail, number=number, is_cut_off=self.is_cut_off)
            if calls.unfinished()[0] == number:  # the main thread may have raised the backend's error meanwhile
                self.fail(comm, calls, error)
        if self.is_cut_off:
            return
        begun, look, beat = self._waits.get(name, (0.0, 0.0, 0.0))
        if begun != since:
            look, beat = _SECONDS_TO_LOOK, self._beat
        due, warns = min(look, beat), seconds >= beat
        if seconds < due:
            return
        self._waits[name] = (since, 2 * look if seconds >= look else look, 2 * beat if warns else beat)
        if self._is_first_to_look(name, [calls.resets, number, due]):
            absent = AbsentSearch(self, comm, calls, number, in_call=True).ask()
            if warns and absent and calls.failure is None and calls.unfinished()[0] == number:
                who = ranks_in_words([one.rank for one in absent])
                text = f"{who} of {comm.name} in {calls.call(number) or 'a call'}\n{lines_of(absent)}"
                _logger.warning("waiting %.0f s for %s", seconds, text)

    def _is_first_to_look(self, group: str, what: list[float]) -> bool:
        """Return whether no other rank looks at a call of a group, or has looked at it later, or at a later call.

        The place of a rank that is gone is taken by another one.

        Args:
            group: name of the group.
            what: how often its record has begun anew, the call's number, and after how many seconds this is due.
        """
        key, own, last = f"look/{group}", json.dumps([*what, self.rank]), ""
        for _ in range(3):  # the first time may only tell what others have looked at
            found = self.store.compare_set(key, last, own).decode()
            *looked_at, rank = json.loads(found)
            if found == own or (looked_at >= what and not self.board.gone([rank])):
                break
            last = found
        return found == own

    def _is_overdue(self, comm: Comm, seconds: float) -> bool:
        """Return whether a call fails by now; backends of devices would end the process, and name nobody."""
        since = self.cut_off_since
        is_store_gone = since is not None and time.monotonic() - since >= _SECONDS_OF_STORE
        if is_store_gone and any(self.board.process(rank) == "gone" for rank in comm.ranks):
            return True
        return comm.timeout is not None and seconds >= comm.timeout.total_seconds()

    def _compare(self, comm: Comm, calls: Calls) -> None:
        """Compare the calls so far with those of a group's first rank; fail where they differ at two looks in a row."""
        key = f"same/{comm.group_name}"
        if comm.rank == 0:
            number, resets = calls.number, calls.resets
            if number:
                self.store.set(key, json.dumps([number, calls.digest_after(number), resets]))
        elif self.store.check([key]):
            number, digest, resets = json.loads(self.store.get(key))
            own = calls.digest_after(number)
            if own is None or digest is None or resets != calls.resets or own == digest:
                self._differed.pop(key, None)
            elif self._differed.get(key) != resets:
                self._differed[key] = resets  # the main threads may be about to raise an error themselves
            else:
                asking = int(self.store.compare_set(f"differs/{comm.group_name}/{resets}", "", str(self.rank)))
                if asking == self.rank or self.board.gone([asking]):  # where the first rank differs, all others see it
                    self.fail_all(comm, calls, self.board.ask(comm.ranks))


def heartbeat_seconds() -> float:
    """Return after how many seconds to say first for whom a rank waits; ValueError if the variable is wrong."""
    text = os.environ.get(_HEARTBEAT) or "30"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{_HEARTBEAT} must be a positive number of seconds, but is {text!r}")
    return seconds
