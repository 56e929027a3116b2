"""A hook that profiles training, operator by operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch.profiler import ProfilerActivity, profile, supported_activities, tensorboard_trace_handler
from torch.profiler import schedule as make_schedule

from lockstep.errors import ConfigError, require_count, require_one_of
from lockstep.hooks.arguments import require_epochs
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

TraceHandler: TypeAlias = Callable[[profile], object]


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
        json_trace_path: where traces go, relative to the run's folder; rank and iteration are inserted before the
            suffix, which may be `.json.gz`.
    """

    priority = "VERY_LOW"

    by_epoch: bool = True
    profile_times: int = 1
    activity_with_cpu: bool = True
    activity_with_cuda: bool | None = None
    schedule: Mapping[str, int] | None = None
    on_trace_ready: TraceHandler | Mapping[str, Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    json_trace_path: str = "profile/trace.json"

    def __post_init__(self) -> None:
        require_count("profile_times", self.profile_times)
        given = self.on_trace_ready
        if isinstance(given, Mapping):
            require_one_of("on_trace_ready['type']", given.get("type"), ("log_trace", "tb_trace"))
        self._activities = _activities(self.activity_with_cpu, self.activity_with_cuda)
        self._schedule = None if self.schedule is None else make_schedule(**self.schedule)
        self._profiler: profile | None = None
        self._done = 0
        self._iteration = 0

    def before_train(self, runner: TrainRun) -> None:
        """Start the profiler."""
        if self.by_epoch:
            require_epochs(runner, "ProfilerHook(by_epoch=False, profile_times=<iterations>)")
        self._profiler = profile(
            activities=self._activities,
            schedule=self._schedule,
            on_trace_ready=self._handler(runner),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        self._profiler.start()

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Mark the end of an iteration; stop after the last one to be profiled."""
        if self._profiler is None:
            return
        self._iteration = runner.iter + 1
        with warnings.catch_warnings():
            # A cycle drops the events of the previous one, as is right for one trace per cycle.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._profiler.step()
        if not self.by_epoch:
            self._count()

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Stop after the last epoch to be profiled."""
        if self.by_epoch and self._profiler is not None:
            self._count()

    def after_train(self, runner: TrainRun) -> None:
        """Stop if training was shorter than `profile_times`."""
        self.close()

    def close(self) -> None:
        """Stop; if the run failed, what was recorded until then also becomes a trace."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def _count(self) -> None:
        self._done += 1
        if self._done == self.profile_times:
            self.close()

    def _handler(self, runner: Run) -> TraceHandler:
        given = self.on_trace_ready
        if given is None:
            return lambda profiler: self._write(profiler, runner)
        if not isinstance(given, Mapping):
            return given
        if given["type"] == "tb_trace":
            folder = runner.run_dir / given.get("dir_name", "tensorboard_traces")
            handler: TraceHandler = tensorboard_trace_handler(str(folder), worker_name=f"rank{runner.rank}")
            return handler
        options = {"sort_by": "self_cpu_time_total", "row_limit": 20, **given}
        del options["type"]
        return lambda profiler: runner.logger.info("%s", profiler.key_averages().table(**options))

    def _write(self, profiler: profile, runner: Run) -> None:
        given = Path(self.json_trace_path)
        suffix = "".join(given.suffixes)
        stem = given.name.removesuffix(suffix)
        path = runner.run_dir / given.with_name(f"{stem}_rank{runner.rank}_iter{self._iteration}{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        runner.logger.info("a trace of all operators is at %s", path)


def _activities(with_cpu: bool, with_accelerator: bool | None) -> list[ProfilerActivity]:
    cpu = {ProfilerActivity.CPU} if with_cpu else set()
    accelerator = set() if with_accelerator is False else set(supported_activities()) - {ProfilerActivity.CPU}  # type: ignore[no-untyped-call]
    if with_accelerator and not accelerator:
        raise ConfigError("`activity_with_cuda` must be False or None where there is no accelerator, but is True")
    if not cpu | accelerator:
        raise ConfigError("`activity_with_cpu` must be True where no accelerator is profiled, but is False")
    return [*cpu, *accelerator]
