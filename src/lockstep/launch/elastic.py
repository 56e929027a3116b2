"""The ranks of this machine under torch's elastic agent, on behalf of `launch`.

It is the agent of torchrun. lockstep adds its own rendezvous (`rendezvous`), what each rank does when it starts and
ends (`worker`), and the messages about failures (`failures`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from lockstep.errors import LaunchError, Preempted
from lockstep.launch.failures import describe, exit_code, first_failed, is_follow_up, is_preempted
from lockstep.launch.job_spec import JobSpec
from lockstep.launch.notices import say
from lockstep.launch.rendezvous import NodeFailedError, NodesRendezvous
from lockstep.launch.worker import STOPPED_FILE

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # of torch's agent; its default lacks SIGUSR1
# How long to wait for the report of the rank that failed first, after other ranks have reported its failure.
_SECONDS_FOR_CAUSE = 3.0


def run_ranks(
    command: Sequence[str],
    job: JobSpec,
    additions: dict[str, str],
    max_restarts: int,
    logs: str | None,
    payload: str | None,
    rdzv_timeout_seconds: float,
    grace_seconds: int,
) -> None:
    """Run what `launch` describes; `additions` are environment variables for the ranks."""
    rendezvous = NodesRendezvous(job, rdzv_timeout_seconds, say)
    spec = WorkerSpec(
        role="rank",
        local_world_size=job.nproc,
        entrypoint=sys.executable,
        args=_worker_arguments(command, logs),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, _signals_handled(), _torch_quiet():
            if payload is not None:
                file = Path(folder, "payload")
                file.write_text(payload, encoding="utf-8")
                additions["LOCKSTEP_PAYLOAD"] = str(file)
            stopped = additions[STOPPED_FILE] = str(Path(folder, "stopped"))
            setup = _RankSetup(folder, additions, rendezvous)
            result = _Agent(spec, rendezvous, setup, logs, Path(stopped), grace_seconds).run()
    except _PreemptedError:
        rendezvous.await_others()
        raise LaunchError(
            "a signal asked the training to stop: all ranks have completed their iteration, saved it, and ended. Start "
            f"the job again with resume=True to go on (exit code {Preempted.EXIT_CODE})",
            exit_code=Preempted.EXIT_CODE,
        ) from None
    except NodeFailedError as error:
        raise LaunchError(str(error), exit_code=error.exit_code) from error
    except RendezvousError as error:
        raise LaunchError(str(error)) from error
    except SignalException as error:
        # The ranks have ended; now raise the signal again for its usual effect on this process.
        say(f"{error.sigval.name}: all ranks were stopped")
        sys.stdout.flush()
        code = 128 + error.sigval
        rendezvous.give_up(code)
        signal.raise_signal(error.sigval)
        raise LaunchError(f"all ranks were stopped by {error.sigval.name}", exit_code=code) from None  # if ignored
    else:
        if result.is_failed():
            failure = result.failures[first_failed(result.failures)]
            seconds = _SECONDS_FOR_CAUSE if is_follow_up(failure) else 0.0
            node, code = rendezvous.give_up(exit_code(failure), seconds)
            before = "" if node == job.node_rank else f"\n\nNode {node} failed before this one: look there first."
            raise LaunchError(describe(result.failures, logs) + before, exit_code=code)
    finally:
        rendezvous.shutdown()


def _worker_arguments(command: Sequence[str], log_dir: str | None) -> tuple[str, ...]:
    logs = () if log_dir is None else ("--log-dir", log_dir)
    arguments = ("-m", "lockstep.launch.worker", "--agent", str(os.getpid()), *logs, "--", *command)
    # The agent replaces $-macros in arguments; a $ in the user's arguments must stay.
    return tuple(argument.replace("$", "$$") for argument in arguments)


class _Agent(LocalElasticAgent):
    """torch's agent with messages for the user, a complete list of failed ranks, and lockstep's exit barrier."""

    _cause_awaited_since: float | None = None
    _preempted_since: float | None = None

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: NodesRendezvous,
        setup: _RankSetup,
        log_dir: str | None,
        stopped: Path,
        grace_seconds: int,
    ) -> None:
        super().__init__(spec, setup, shutdown_timeout=grace_seconds)
        self._nodes = rendezvous
        self._log_dir = log_dir
        self._stopped = stopped

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks; raise `_PreemptedError` if all have stopped at a signal and saved."""
        try:
            return super().run(role)  # type: ignore[no-any-return]
        except SignalException:
            recorded = self._recorded(self._worker_group)
            if len(recorded) == len(self._worker_group.workers) and all(map(is_preempted, recorded)):
                raise _PreemptedError from None
            raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stopped.unlink(missing_ok=True)
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._stopped.touch()  # a rank that would save first must not: others are gone
        super()._stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        reports = {failure.local_rank: failure for failure in self._recorded(worker_group)}
        statuses = {worker.local_rank: _exit_status(worker.id) for worker in worker_group.workers}
        if self._awaits_cause(reports, statuses) or self._awaits_preempted(reports, statuses):
            return RunResult(state=WorkerState.HEALTHY)
        preempted = {rank for rank, report in reports.items() if is_preempted(report)}
        if any(status for rank, status in statuses.items() if rank not in preempted):
            self._stopped.touch()  # torch now stops the others
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and all(map(is_preempted, result.failures.values())):
            raise _PreemptedError
        if result.is_failed():
            self._cause_awaited_since = None
            # torch reports the ranks that had ended when it checked; the rank that raised first may end later.
            for failure in self._recorded(worker_group):
                result.failures.setdefault(worker_group.workers[failure.local_rank].global_rank, failure)
            if self._remaining_restarts > 0:
                total = worker_group.spec.max_restarts
                count = total - self._remaining_restarts + 1
                say(f"{describe(result.failures, self._log_dir)}\n\nStarting all ranks again ({count} of {total}).")
        return result

    def _awaits_cause(self, reports: Mapping[int, ProcessFailure], statuses: Mapping[int, int | None]) -> bool:
        """Return whether all reports so far blame another rank, and that rank has not reported its cause yet."""
        if not reports or not all(map(is_follow_up, reports.values())):
            return False
        silent = [status for rank, status in statuses.items() if rank not in reports]
        if not silent or any(status is not None for status in silent):
            return False
        self._cause_awaited_since = self._cause_awaited_since or time.monotonic()
        return time.monotonic() - self._cause_awaited_since < _SECONDS_FOR_CAUSE

    def _awaits_preempted(self, reports: Mapping[int, ProcessFailure], statuses: Mapping[int, int | None]) -> bool:
        """Return whether some ranks have stopped at a signal, and the others are about to."""
        if not reports or not all(map(is_preempted, reports.values())):
            return False
        silent = [status for rank, status in statuses.items() if rank not in reports]
        if None not in statuses.values() or any(status is not None for status in silent):
            return False  # all have ended, or one has ended otherwise
        self._preempted_since = self._preempted_since or time.monotonic()
        return time.monotonic() - self._preempted_since < self._shutdown_timeout

    def _recorded(self, worker_group: WorkerGroup) -> list[ProcessFailure]:
        """Return the failures for which ranks of this node have written an error file."""
        files = {} if self._pcontext is None else self._pcontext.error_files
        return [
            ProcessFailure(worker.local_rank, worker.id, 1, files[worker.local_rank])
            for worker in worker_group.workers
            if worker.local_rank in files and os.path.exists(files[worker.local_rank])
        ]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if death_sig == signal.SIGINT:
            say("stopping all ranks; Ctrl-C once more does not wait for them to clean up")
        elif not self._stopped.exists() and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):  # once more must not keep the ranks from saving
                signal.signal(number, signal.SIG_IGN)
        super()._shutdown(death_sig, *args, **kwargs)

    def _exit_barrier(self) -> None:
        # torch's own barrier waits at most five minutes, and Ctrl-C does not interrupt it.
        self._nodes.await_others()


class _PreemptedError(Exception):
    """All ranks of this node have stopped at a signal, and saved."""


def _exit_status(pid: int) -> int | None:
    """Return the exit code of a child process, or its signal, without reaping it; None while it runs."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # reaped already, so that it did not fail
        return 0
    return None if ended is None else ended.si_status


class _RankSetup(DefaultLogsSpecs):
    """Adds variables to the environment of each rank; torch's agent has a hook for that here."""

    def __init__(self, folder: str, additions: Mapping[str, str], rendezvous: NodesRendezvous) -> None:
        super().__init__(log_dir=folder)
        self._additions = additions
        self._rendezvous = rendezvous

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        for env in envs.values():
            # The agent counts only its own node's failures; the attempt number is the same on all nodes.
            env.update(self._additions, TORCHELASTIC_RESTART_COUNT=str(self._rendezvous.attempt))
        return destinations


@contextmanager
def _signals_handled() -> Iterator[None]:
    """Let torch's agent pass on SIGUSR1, too; restore at the end the signal handlers that it replaces."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    given = os.environ.get(_SIGNALS_VARIABLE)
    os.environ[_SIGNALS_VARIABLE] = given or ",".join(number.name for number in _SIGNALS)
    try:
        yield
    finally:
        if given is None:
            del os.environ[_SIGNALS_VARIABLE]
        with suppress(ValueError):  # not the main thread: the agent has replaced nothing
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _torch_quiet() -> Iterator[None]:
    """Keep the agent's log messages off the terminal; `say` prints what matters."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(silence)
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate
