"""Hooks that show what a training does with its time and its memory: traces of operators, snapshots of CUDA memory."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities, tensorboard_trace_handler
from torch.profiler import schedule as make_schedule

from lockstep.device import get_device
from lockstep.errors import ConfigError, error_in_words, require_count, require_known, require_one_of, with_causes
from lockstep.registry import HOOKS
from lockstep.registry.signatures import construct
from lockstep.runner.hook import Hook, require_epochs
from lockstep.runner.preemption import signal_named
from lockstep.runner.run import Run, TrainRun

_logger = logging.getLogger(__name__)

# Kinds of `on_trace_ready`, each with its options.
_TRACES: Mapping[str, tuple[str, ...]] = {"log_trace": ("sort_by", "row_limit"), "tb_trace": ("dir_name",)}


@HOOKS.register_module()
@dataclass(kw_only=True, eq=False, repr=False)
class ProfilerHook(Hook):
    """Profile the beginning of training with `torch.profiler`, on every rank.

    Each rank writes its own trace to the run's folder, as `profile/trace_rank0_iter8.json` and so on, named after the
    iteration that ended it. Open them in a browser, at https://ui.perfetto.dev or `chrome://tracing`.

    A trace grows by about 1 MB with every iteration of a medium-sized model: if an epoch has many iterations, give a
    `schedule`, or count iterations.

    Args:
        by_epoch: count epochs, else iterations.
        profile_times: number of epochs, or iterations, after which profiling ends.
        activity_with_cpu: profile the CPU.
        activity_with_cuda: profile the accelerator, of any vendor; by default, if there is one.
        schedule: arguments of `torch.profiler.schedule` (`wait`, `warmup`, `active`, `repeat`, `skip_first`), in
            iterations; each cycle makes a trace. By default, there is one trace of everything.
        on_trace_ready: what to do with a trace instead of writing it: a function that takes the profiler;
            `dict(type="log_trace", sort_by=..., row_limit=...)` for a table in the log of rank 0;
            `dict(type="tb_trace", dir_name=...)` for TensorBoard's plugin.
        record_shapes: record the shapes of operators' inputs.
        profile_memory: record the memory that operators allocate.
        with_stack: record the lines of code; slow.
        with_flops: estimate the FLOPs of matrix products and convolutions.
        json_trace_path: where traces go, relative to the run's folder, by default `profile/trace.json`; rank and
            iteration are inserted before the suffix, which may be `.json.gz`.
    """

    priority = "VERY_LOW"

    by_epoch: bool = True
    profile_times: int = 1
    activity_with_cpu: bool = True
    activity_with_cuda: bool | None = None
    schedule: Mapping[str, int] | None = None
    on_trace_ready: Callable[[profile], object] | Mapping[str, Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    json_trace_path: str | None = None

    def __post_init__(self) -> None:
        require_count("profile_times", self.profile_times)
        given = self.on_trace_ready
        if isinstance(given, Mapping):
            require_one_of("on_trace_ready['type']", given.get("type"), tuple(_TRACES))
            require_known("on_trace_ready", given, ("type", *_TRACES[given["type"]]))
        elif given is not None and not callable(given):
            raise ConfigError(f"`on_trace_ready` must be a function or a dict with a 'type', but is {given!r}")
        self._activities = _activities(self.activity_with_cpu, self.activity_with_cuda)
        self._schedule = None if self.schedule is None else construct(make_schedule, self.schedule, "argument")
        self._profiler: profile | None = None
        self._filter: Any = None  # of the warnings that are not shown meanwhile
        self._done = self._iteration = 0
        self._traced: int | None = None
        self._is_recorded = False  # whether the last iteration was

    def before_train(self, runner: TrainRun) -> None:
        """Start the profiler."""
        if self.by_epoch:
            require_epochs(runner, "ProfilerHook(by_epoch=False, profile_times=<iterations>)")
        profiler = profile(
            activities=self._activities,
            schedule=self._schedule,
            on_trace_ready=lambda profiler: self._keep(profiler, runner),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        if self.schedule is not None:  # a cycle drops the events of the previous one, whose trace is written by then
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._filter = warnings.filters[0]
        profiler.start()
        self._profiler = profiler

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Mark the end of an iteration; stop after the last one to be profiled."""
        if self._profiler is None:
            return
        self._iteration = runner.iter + 1
        self._is_recorded = self._profiler.current_action.name.startswith("RECORD")
        self._profiler.step()
        if not self.by_epoch:
            self._count_towards_end()

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Stop after the last epoch to be profiled."""
        if self.by_epoch and self._profiler is not None:
            self._count_towards_end()

    def after_train(self, runner: TrainRun) -> None:
        """Stop if training was shorter than `profile_times`."""
        self.close()

    def close(self) -> None:
        """Stop; if the run failed, what was recorded until then also becomes a trace."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            with suppress(ValueError):  # somebody has reset the filters, or there was no schedule
                cast("list[Any]", warnings.filters).remove(self._filter)

    def _count_towards_end(self) -> None:
        self._done += 1
        if self._done == self.profile_times:
            self.close()

    def _keep(self, profiler: profile, runner: Run) -> None:
        """Do what was asked for with the trace of a cycle, unless no iteration of it was recorded."""
        if self._traced == self._iteration or not (self._is_recorded or sys.exception() is not None):
            return
        self._traced = self._iteration
        if callable(given := self.on_trace_ready):
            given(profiler)
            return
        try:
            self._write(profiler, runner, given or {})
        # A table's options raise some of them. A trace that fails neither ends a training, nor hides why that ended.
        except (AttributeError, OSError, RuntimeError, TypeError) as error:
            _logger.warning("the trace of operators can't be written: %s", error_in_words(error))

    def _write(self, profiler: profile, runner: Run, given: Mapping[str, Any]) -> None:
        options = dict(given)
        kind = options.pop("type", None)
        if kind == "tb_trace":
            folder = runner.run_dir / options.get("dir_name", "tensorboard_traces")
            tensorboard_trace_handler(str(folder), worker_name=f"rank{runner.rank}")(profiler)
        elif kind is None:
            form = Path(self.json_trace_path or "profile/trace.json")
            suffix = "".join(form.suffixes)
            stem = form.name.removesuffix(suffix)
            path = runner.run_dir / form.with_name(f"{stem}_rank{runner.rank}_iter{self._iteration}{suffix}")
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            runner.logger.info("a trace of all operators is at %s", path)
        elif runner.rank == 0:
            table = {"sort_by": "self_cpu_time_total", "row_limit": 20, **options}
            runner.logger.info("%s", profiler.key_averages().table(**table))


def _activities(with_cpu: bool, with_accelerator: bool | None) -> list[ProfilerActivity]:
    cpu = {ProfilerActivity.CPU} if with_cpu else set()
    accelerator = set() if with_accelerator is False else set(supported_activities()) - {ProfilerActivity.CPU}  # type: ignore[no-untyped-call]
    if with_accelerator and not accelerator:
        raise ConfigError("`activity_with_cuda` must be False or None where there is no accelerator, but is True")
    if not cpu | accelerator:
        raise ConfigError("`activity_with_cpu` must be True where no accelerator is profiled, but is False")
    return [*cpu, *accelerator]


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
        try:
            self.iterations = frozenset(map(index, iterations))
        except TypeError as error:
            raise ConfigError(f"`iterations` must be a list of numbers of iterations, but is {iterations!r}") from error
        require_count("max_entries", max_entries)
        self.max_entries = max_entries
        self._signal = None if on_signal is None else signal_named("on_signal", on_signal)
        self._former_handler: Any = None
        self._is_requested = False
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
        # Python sets signal handlers in the main thread only.
        if self._signal is not None and threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(self._signal, self._request_snapshot)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Write a snapshot if one is due."""
        if self._is_requested or runner.iter + 1 in self.iterations:
            self._is_requested = False
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
            if self._signal is not None and self._former_handler is not None:
                signal.signal(self._signal, self._former_handler)
                self._former_handler = None

    def _request_snapshot(self, number: int, frame: Any) -> None:
        self._is_requested = True

    def _write(self, runner: TrainRun, when: str) -> None:
        path: Path = runner.run_dir / "memory" / f"snapshot_rank{runner.rank}_{when}.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except OSError as error:  # a full disk must not end the training, nor hide why it failed
            _logger.warning("no memory snapshot can be written to %s: %s", path, error)
        else:
            _logger.info("a memory snapshot is at %s: open it at https://pytorch.org/memory_viz", path)
