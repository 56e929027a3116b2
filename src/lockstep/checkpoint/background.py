"""Saving while the training goes on: each rank copies its part of a state, and a thread writes the copy.

The plan and the copy come before the thread begins. The threads tell one another what they have written through the
store at which the ranks met, so that they never come between the collectives of the training.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.checkpoint.layout import Piece
from lockstep.checkpoint.saving import Plan, Planner, write_and_publish
from lockstep.checkpoint.together import Failure, on_all
from lockstep.device import can_pin_memory
from lockstep.dist import get_dist_info
from lockstep.errors import CollectiveTimeoutError, DistError, LockstepError, error_in_words, listed
from lockstep.location import Location
from lockstep.watch.board import pauses
from lockstep.watch.watch import numbered, side_store

if TYPE_CHECKING:
    from torch.distributed import Store

_ALIGNED = 64  # bytes: each copy begins at a multiple of them
_BLOCK = 2**30  # bytes of memory taken at once: torch rounds what is pinned up to a power of two (2.13)
_MOST_WAITED = timedelta(hours=1)  # for ranks that still write, which takes much longer than a collective may
_LONGEST_PAUSE = 1.0  # between two looks for them
_SECONDS_TO_GIVE_UP = 10.0


class BackgroundSaver:
    """Saves states in a thread, one at a time.

    **Cost**: memory in the host for this rank's part of the largest state, which is kept for the next save; pinned
    if the state is on a GPU. A rank copies its part before training goes on.

    Args:
        planner: has the plan of the last save; by default, of the last one by this saver.

    Attributes:
        job: the save in progress, or one that has ended and that nobody has waited for; None if there is none.
    """

    def __init__(self, planner: Planner | None = None) -> None:
        self._planner = planner or Planner()
        self._memory: list[Tensor] = []
        self.job: Future[None] | None = None
        self._thread: threading.Thread
        self._exchange: StoreExchange

    def start(
        self, directory: Location, state: Mapping[str, Any], meta: Mapping[str, Any], last_of: Location | None = None
    ) -> Future[None]:
        """Copy a state, and begin to write it; return the job. See `save_state` for the arguments.

        Args:
            directory: the checkpoint's path.
            state: the state, which may change as soon as this returns.
            meta: metadata.
            last_of: the work_dir, or the folder in the bucket, whose last checkpoint it becomes.

        **Collective**: every rank.

        Raises:
            ConfigError: on every rank, if a value on some rank can't be saved; the message names it.
            OSError: on every rank, if no draft can be made, or the save before could not be written.
            DistError: the ranks have no store that they can share, or some rank could not copy its part.
        """
        self.wait()  # a save of which the wait was interrupted still reads the memory that is used again
        rank, world_size = get_dist_info()
        plan = self._planner.plan(directory, state, meta, last_of)
        try:
            plan, store = on_all(plan.failure, lambda: (self._copied(plan), side_store() if world_size > 1 else None))
            prefix = "save" if store is None else numbered("save", store)
            self._exchange = StoreExchange(store, prefix, rank, world_size)
        except BaseException:
            plan.discard()
            raise
        self.job = job = Future[None]()
        work = (plan, self._exchange, job)
        self._thread = threading.Thread(target=_save, args=work, name="lockstep-save", daemon=True)
        self._thread.start()
        return job

    def wait(self) -> None:
        """Wait until the save in progress has ended, if there is one; then another one can begin.

        Raises:
            OSError: some rank could not write. It is the same on every rank.
            DistError: something else failed.
        """
        if self.job is not None:
            # When the job is done, its thread still frees tensors. In an interpreter that shuts down, that aborts.
            self._thread.join()
            job, self.job = self.job, None
            job.result()

    def abandon(self) -> None:
        """Give the save in progress some seconds to end, and end it otherwise, because the training has failed."""
        if self.job is not None:
            self._thread.join(_SECONDS_TO_GIVE_UP)
            self._exchange.is_abandoned.set()
            self._thread.join(_SECONDS_TO_GIVE_UP)
            self.job = None

    def _copied(self, plan: Plan) -> Plan:
        """Return a plan with copies of this rank's pieces in the host's memory."""
        devices = {piece.part.device for piece in plan.pieces if piece.part.device.type != "cpu"}
        places = self._reserve([piece.part.nbytes for piece in plan.pieces], bool(devices) and can_pin_memory())
        copies: list[Piece] = []
        for piece, place in zip(plan.pieces, places, strict=True):
            copy = place.view(piece.part.dtype).view(piece.part.shape)
            copies.append(piece._replace(part=copy.copy_(piece.part, non_blocking=True)))
        for device in devices:
            torch.accelerator.synchronize(device)
        return plan._replace(pieces=copies)

    def _reserve(self, sizes: Sequence[int], is_pinned: bool) -> list[Tensor]:
        """Return memory of these sizes, in blocks of `_BLOCK` bytes; a larger size has one of its own."""
        places: list[tuple[int, int]] = []
        ends: list[int] = []
        for size in sizes:
            if not ends or ends[-1] + size > _BLOCK:
                ends.append(0)
            places.append((len(ends) - 1, ends[-1]))
            ends[-1] += -(-size // _ALIGNED) * _ALIGNED
        fits = [len(one) >= end and one.is_pinned() == is_pinned for one, end in zip(self._memory, ends, strict=False)]
        if len(fits) < len(ends) or not all(fits):
            self._memory = []  # freed before there is more
            self._memory = [torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=is_pinned) for end in ends]
        return [self._memory[block][begin : begin + size] for (block, begin), size in zip(places, sizes, strict=True)]


def _save(plan: Plan, exchange: StoreExchange, job: Future[None]) -> None:
    """Write what is planned, in a thread of its own; `job` is done when it is complete, or has failed on any rank."""
    try:
        write_and_publish(plan, exchange)
        job.set_result(None)
    except (LockstepError, OSError) as error:
        job.set_exception(error)
    except BaseException as error:  # the store is gone, and so is the job
        job.set_exception(Failure.of(error).raised(plan.failure))


class StoreExchange:
    """An exchange of small values of JSON through a store, without collectives: reading one runs no code.

    Args:
        store: a connection for this thread alone; None if there is only one rank.
        prefix: begins the keys, which no other exchange may have.
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        is_abandoned: set when the others need not be waited for.
    """

    def __init__(self, store: Store | None, prefix: str, rank: int, world_size: int) -> None:
        self._store: Any = store
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self.is_abandoned = threading.Event()

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None on the others.

        If rank 0 can't, it replies so, because a rank that comes later would wait in `scatter` for as long again.

        Raises:
            CollectiveTimeoutError: some ranks were not heard of for an hour, or the store's timeout if it is longer.
        """
        if self._rank != 0:
            self._put(f"{self._prefix}/result/{self._rank}", value)
            return None
        keys = {rank: f"{self._prefix}/result/{rank}" for rank in range(1, self._world_size)}
        try:
            self._await(keys)
            if self.is_abandoned.is_set():  # another training may have begun, and have saved later
                raise DistError("the training that has begun this save has failed, and did not wait for it")
            return [value, *map(self._take, keys.values())]
        except BaseException as error:
            with suppress(torch.distributed.DistError):  # the store is gone, and so are the ranks
                for rank in keys:
                    self._reply(rank, None, error_in_words(error))
            raise

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's entry of the values that rank 0 gives.

        Raises:
            CollectiveTimeoutError: rank 0 was not heard of for an hour, or the store's timeout if it is longer.
            DistError: rank 0 had no values of all ranks.
        """
        if values is None:
            key = f"{self._prefix}/reply/{self._rank}"
            self._await({0: key})
            value, failure = self._take(key)
            if failure is not None:
                raise DistError(f"rank 0 has given up: {failure} (rank {self._rank})")
            return value
        for rank in range(1, self._world_size):
            self._reply(rank, values[rank])
        return values[0]

    def _reply(self, rank: int, value: Any, failure: str | None = None) -> None:
        self._put(f"{self._prefix}/reply/{rank}", (value, failure))

    def _await(self, keys: Mapping[int, str]) -> None:
        if not keys:
            return
        store = self._store
        for _ in pauses(max(store.timeout, _MOST_WAITED).total_seconds(), _LONGEST_PAUSE):
            if store.check(list(keys.values())):
                return
            if self.is_abandoned.is_set():
                break
        ranks = listed(rank for rank, key in keys.items() if not store.check([key]))
        raise CollectiveTimeoutError(f"rank {ranks} did not say what it has written (rank {self._rank})")

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _take(self, key: str) -> Any:
        """Return a value, and remove it from the store."""
        value = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return value
