"""A hook that writes snapshots of CUDA memory."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import Any

import torch

from lockstep.device import get_device
from lockstep.errors import ConfigError, require_count, with_causes
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun

_logger = logging.getLogger(__name__)


@HOOKS.register_module()
class MemorySnapshotHook(Hook):
    """Write what is in CUDA memory, and which line of code allocated it: on demand, and when memory runs out.

    Each rank writes its own file to the run's folder, as `memory/snapshot_rank0_iter8.pickle`, after 8 iterations. Drop
    it on https://pytorch.org/memory_viz, which keeps it in your browser. A snapshot is written

    - at the end of the iteration in which the process gets the signal: `kill -USR2 PID`, or, for all ranks of a Slurm
      job, `scancel --signal=USR2 JOB`;
    - after each of `iterations`;
    - when training fails because memory has run out. In the loop of a session, this needs `with Session(...)`.

    Args:
        iterations: numbers of complete iterations after which a snapshot is written.
        on_signal: the signal that asks for a snapshot; None for none. A process without this hook would be ended by it.
        max_entries: how many allocations and releases are remembered, the latest ones.

    **Cost**: some microseconds for each allocation, and up to some KB of host memory and of a file for each entry.

    Raises:
        ConfigError: the device is not a CUDA (or ROCm) one, or there is no such signal.

    **Source**: `torch.cuda.memory._record_memory_history` and `_dump_snapshot` (2.13).
    """

    priority = "VERY_LOW"

    def __init__(
        self, iterations: Iterable[int] = (), on_signal: str | None = "SIGUSR2", max_entries: int = 100_000
    ) -> None:
        if on_signal is not None and not isinstance(getattr(signal, str(on_signal), None), signal.Signals):
            raise ConfigError(f"`on_signal` must be the name of a signal, such as 'SIGUSR2', but is {on_signal!r}")
        try:
            self.iterations = frozenset(map(index, iterations))
        except TypeError as error:
            raise ConfigError(f"`iterations` must be a list of numbers of iterations, but is {iterations!r}") from error
        require_count("max_entries", max_entries)
        self.max_entries = max_entries
        self._signal: signal.Signals | None = None if on_signal is None else signal.Signals[on_signal]
        self._former: Any = None
        self._is_asked = False
        self._runner: TrainRun | None = None

    def before_train(self, runner: TrainRun) -> None:
        """Begin to record allocations, and to listen for the signal."""
        if get_device() != "cuda":
            raise ConfigError(
                f"MemorySnapshotHook must run on a CUDA device, but the device is {get_device()!r}, whose allocations "
                "torch does not record. Use ProfilerHook(profile_memory=True, with_stack=True, profile_times=1), whose "
                "trace shows what each operator allocates"
            )
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
        self._runner = runner
        # Elsewhere Python allows no handlers.
        if self._signal is not None and threading.current_thread() is threading.main_thread():
            self._former = signal.signal(self._signal, self._ask)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Write a snapshot if one is due."""
        if self._is_asked or runner.iter + 1 in self.iterations:
            self._is_asked = False
            self._write(runner, f"iter{runner.iter + 1}")

    def close(self) -> None:
        """Write a snapshot if memory has run out; stop recording."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        try:
            if any(isinstance(error, torch.OutOfMemoryError) for error in with_causes(sys.exception())):
                self._write(runner, f"iter{runner.iter}_out_of_memory")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
            if self._signal is not None and self._former is not None:
                signal.signal(self._signal, self._former)
                self._former = None

    def _ask(self, number: int, frame: Any) -> None:
        self._is_asked = True

    def _write(self, runner: TrainRun, when: str) -> None:
        path: Path = runner.run_dir / "memory" / f"snapshot_rank{runner.rank}_{when}.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except OSError as error:  # a full disk must not end the training, nor hide why it failed
            _logger.warning("no memory snapshot can be written to %s: %s", path, error)
        else:
            _logger.info("a memory snapshot is at %s: open it at https://pytorch.org/memory_viz", path)
