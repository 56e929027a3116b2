"""Saving while the training goes on: each rank copies its part of a state, and a thread writes the copy.

Only the plan needs collectives, and is made before the thread begins. The threads tell one another what they have
written through the store at which the ranks met, so that they never come between the collectives of the training.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.checkpoint.saving import Save, Share, Written, data_of, size_of
from lockstep.checkpoint.together import Failure, on_all_then_main
from lockstep.device import pins_memory
from lockstep.dist import get_dist_info
from lockstep.errors import CollectiveTimeoutError
from lockstep.location import Location
from lockstep.watch.watch import side_store

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.checkpoint.planner import WriteItem

_ALIGNED = 64  # bytes: each copy begins at a multiple of them
_PIECE = 4 << 20  # bytes of a value in the store, whose limit is 8 MiB (torch 2.13)
_POLL_SECONDS = 0.02
_SECONDS_TO_GIVE_UP = 10.0
_numbers = itertools.count()  # of the saves of this process, the same on every rank


class BackgroundSaver:
    """Saves states in a thread, one at a time.

    **Cost**: memory in the host for this rank's part of the largest state, which is kept for the next save; pinned
    if the state is on a GPU. A rank copies its part before training goes on.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is a save whose outcome nobody has asked for."""
        return self._job is not None

    @property
    def has_ended(self) -> bool:
        """Whether that save has ended."""
        return self._job is not None and self._job.has_ended.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether that save has ended, and could not be written."""
        return self._job is not None and self._job.has_ended.is_set() and self._job.failure is not None

    def start(
        self,
        directory: Location,
        state: Mapping[str, Any],
        meta: Mapping[str, Any],
        last_of: Location | None = None,
        when_failed: Callable[[], None] | None = None,
    ) -> None:
        """Copy a state, and begin to write it; see `save_state` for the arguments.

        Args:
            directory: the checkpoint's path.
            state: the state, which may change as soon as this returns.
            meta: metadata.
            last_of: the work_dir, or the folder in the bucket, whose last checkpoint it becomes.
            when_failed: called in the thread if the checkpoint could not be written.

        **Collective**: every rank, after `wait`.

        Raises:
            ConfigError: on every rank, if a value on some rank can't be saved; the message names it.
            OSError: on every rank, if no draft can be made.
            DistError: the ranks have no store that they can share.
        """
        assert self._job is None, "wait() comes first"
        rank, world_size = get_dist_info()
        store = side_store() if world_size > 1 else None
        save = Save(directory, state, meta, last_of)
        try:
            share = on_all_then_main(save.failure, save.plan, save.share_out, save.clean)
        except BaseException:
            save.clean()
            raise
        self._job = _Job(save, share, when_failed)
        self._job.copy(self._reserve)
        exchange = None if store is None else _Exchange(store, f"save_{next(_numbers)}", rank, world_size)
        self._job.start(exchange)

    def wait(self) -> None:
        """Wait until the save in progress has ended, if there is one; then another one can begin.

        Raises:
            OSError: some rank could not write, or something else failed. It is the same on every rank.
        """
        job, self._job = self._job, None
        if job is not None:
            job.has_ended.wait()
            if job.failure is not None:
                raise job.failure.raised(job.save.failure)

    def abandon(self) -> None:
        """Give the save in progress some seconds to end, and end it otherwise, because the training has failed."""
        job, self._job = self._job, None
        if job is not None:
            job.has_ended.wait(_SECONDS_TO_GIVE_UP)
            job.is_abandoned.set()
            job.has_ended.wait(_SECONDS_TO_GIVE_UP)

    def _reserve(self, size: int, is_pinned: bool) -> Tensor:
        if len(self._memory) < size or self._memory.is_pinned() != is_pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before there is more
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._memory


class _Job:
    """One save in the background, as one rank sees it.

    Attributes:
        save: its steps.
        failure: why it failed, on any rank.
        has_ended: set when it is complete, or has failed.
        is_abandoned: set when the others need not be waited for.
    """

    def __init__(self, save: Save, share: Share, when_failed: Callable[[], None] | None) -> None:
        self.save, self._share, self._when_failed = save, share, when_failed
        self.failure: Failure | None = None
        self.has_ended = threading.Event()
        self.is_abandoned = threading.Event()
        self._copies: dict[Any, Tensor] = {}

    def copy(self, reserve: Callable[[int, bool], Tensor]) -> None:
        """Copy this rank's part; an error is told to the other ranks later."""
        try:
            self._copies = _copied(self._share.items, self.save.tensor_of, reserve)
        except Exception as error:
            self.failure = Failure.of(error)
        self.save.release()

    def start(self, exchange: _Exchange | None) -> None:
        """Begin the thread."""
        threading.Thread(target=self._run, args=(exchange,), name="lockstep-save", daemon=True).start()

    def _run(self, exchange: _Exchange | None) -> None:
        try:
            written = None
            if self.failure is None:
                try:
                    written = self.save.write(self._share, lambda item: self._copies[item.index])
                except Exception as error:
                    self.failure = Failure.of(error)
            if exchange is None:
                if self.failure is None:
                    self.save.complete([written])
            else:
                said = _said(self.failure) if written is None else {"written": written.to_json()}
                self.failure = _failure_in(exchange.conclude(said, self._complete, self.is_abandoned))
        except Exception as error:  # also: the store is gone, and so is the job
            self.failure = Failure.of(error)
        finally:
            if self.failure is not None:
                self.save.clean()
            self.has_ended.set()
            if self.failure is not None and self._when_failed is not None:
                self._when_failed()

    def _complete(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: publish what all have written."""
        failure = next((failed for failed in map(_failure_in, results) if failed is not None), None)
        if failure is None:
            try:
                parts = (said.get("written") for said in results)
                self.save.complete([None if part is None else Written.from_json(part) for part in parts])
            except Exception as error:
                failure = Failure.of(error)
        return _said(failure)


class _Exchange:
    """Results of all ranks to rank 0, and its verdict back, through a store and without collectives.

    They are values of JSON: reading one runs no code, whoever has written it.

    Args:
        store: a connection for this thread alone.
        prefix: begins the keys, which no other exchange may have.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int) -> None:
        self._store, self._prefix, self._rank, self._world_size = store, prefix, rank, world_size

    def conclude(self, result: Any, on_main: Callable[[Sequence[Any]], Any], is_abandoned: threading.Event) -> Any:
        """Return what `on_main` returns on rank 0 for the results of all ranks.

        Raises:
            CollectiveTimeoutError: some ranks were not heard of within the timeout of the store.
        """
        if self._rank != 0:
            self._put(f"result/{self._rank}", result)
            self._await({0: "verdict/0"}, is_abandoned)
            return self._take("verdict/0")
        others = range(1, self._world_size)
        self._await({rank: f"result/{rank}" for rank in others}, is_abandoned)
        verdict = on_main([result, *(self._take(f"result/{rank}", forget=True) for rank in others)])
        self._put("verdict/0", verdict)
        return verdict

    def _await(self, keys: Mapping[int, str], is_abandoned: threading.Event) -> None:
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        deadline = time.monotonic() + timeout.total_seconds()
        missing = {rank: f"{self._prefix}/{key}" for rank, key in keys.items()}
        while missing := {rank: key for rank, key in missing.items() if not self._store.check([key])}:
            if is_abandoned.is_set() or time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise CollectiveTimeoutError(f"rank {ranks} did not say what it has written (rank {self._rank})")
            time.sleep(_POLL_SECONDS)

    def _put(self, key: str, value: Any) -> None:
        """Store a value, in pieces: the last key to be there says how many."""
        data = json.dumps(value).encode()
        pieces = [data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE)]
        for i, piece in enumerate(pieces):
            self._store.set(f"{self._prefix}/{key}/{i}", piece)  # type: ignore[arg-type]  # torch's stubs lack bytes
        self._store.set(f"{self._prefix}/{key}", str(len(pieces)))

    def _take(self, key: str, *, forget: bool = False) -> Any:
        names = [f"{self._prefix}/{key}/{i}" for i in range(int(self._store.get(f"{self._prefix}/{key}")))]
        value = json.loads(b"".join(self._store.get(name) for name in names))
        if forget:
            for name in names:
                self._store.delete_key(name)
        return value


def _said(failure: Failure | None) -> dict[str, Any]:
    return {} if failure is None else {"failure": failure.to_json()}


def _failure_in(said: dict[str, Any]) -> Failure | None:
    return Failure.from_json(said["failure"]) if "failure" in said else None


def _copied(
    items: Sequence[WriteItem], tensor_of: Callable[[WriteItem], Tensor], reserve: Callable[[int, bool], Tensor]
) -> dict[Any, Tensor]:
    """Return copies of tensors in one piece of host memory, by their index in the plan."""
    sources = [tensor_of(item).detach() for item in items]
    devices = {tensor.device for tensor in sources if tensor.device.type != "cpu"}
    places, end = [], 0
    for item in items:
        places.append(end)
        end += -(-size_of(item) // _ALIGNED) * _ALIGNED
    memory = reserve(end, bool(devices) and pins_memory())
    copies = {}
    for item, source, place in zip(items, sources, places, strict=True):
        copy = memory[place : place + size_of(item)].view(source.dtype).view(tuple(data_of(item).chunk.sizes))
        copies[item.index] = copy.copy_(source, non_blocking=True)
    for device in devices:
        torch.accelerator.synchronize(device)
    return copies
