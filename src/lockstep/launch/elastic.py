"""`launch`: ranks of this machine, under torch's elastic agent.

The agent is the one that torchrun runs. What is lockstep's own is where the ranks meet (`rendezvous`), what
each of them does at its beginning and end (`worker`), and what the user reads about failures (`failures`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from lockstep.errors import LaunchError
from lockstep.launch.failures import describe, is_follow_up
from lockstep.launch.job_spec import JobSpec
from lockstep.launch.network import interface_towards
from lockstep.launch.rendezvous import NodesRendezvous

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# How long a rank that failed first may take to say so, when others have already reported that it failed.
_SECONDS_FOR_CAUSE = 3.0


def launch(
    command: Sequence[str],
    job: JobSpec,
    *,
    max_restarts: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
    payload: str | None = None,
    rdzv_timeout_seconds: float = 900.0,
) -> None:
    """Run a script or module on several ranks, and return when all of them have ended well.

    On one node, everything that is opened listens on the loopback interface only. The first local rank keeps the
    terminal. Ctrl-C and SIGTERM reach every rank, and no rank outlives this process.

    Args:
        command: what comes after ``python``: a script, or ``-m`` and a module, and its arguments.
        job: the ranks on this node, and the nodes; `launch` is called on each.
        max_restarts: how often all ranks are started again after one has failed.
        log_dir: folder to whose ``rank_N.log`` the local ranks after the first write what they print; without it
            they print to the terminal too.
        payload: a string for the ranks, which they find in the file that the variable LOCKSTEP_PAYLOAD names.
        rdzv_timeout_seconds: how long to wait for all nodes.

    Raises:
        ValueError: `max_restarts` is negative, or `command` is empty.
        LaunchError: a rank failed (names it, and shows its traceback), or the nodes did not meet.
    """
    if max_restarts < 0:
        raise ValueError(f"`max_restarts` must be at least 0, but is {max_restarts}")
    if not command:
        raise ValueError("`command` must name a script, or -m and a module, but is empty")
    logs = None if log_dir is None else os.fspath(log_dir)
    rendezvous = NodesRendezvous(job, rdzv_timeout_seconds, _say)
    spec = WorkerSpec(
        role="rank",
        local_world_size=job.nproc,
        entrypoint=sys.executable,
        args=_worker_arguments(command, logs),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
    )
    additions = _environment_additions(job)
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, _signals_restored(), _torch_quiet():
            if payload is not None:
                file = Path(folder, "payload")
                file.write_text(payload, encoding="utf-8")
                additions["LOCKSTEP_PAYLOAD"] = str(file)
            result = _Agent(spec, rendezvous, _RankSetup(folder, additions, rendezvous), logs).run()
    except RendezvousError as error:
        raise LaunchError(str(error)) from error
    except SignalException as error:
        # The ranks are gone; now the signal does to this process what it would have done without them.
        _say(f"{error.sigval.name}: all ranks were stopped")
        sys.stdout.flush()
        signal.raise_signal(error.sigval)
        raise LaunchError(f"all ranks were stopped by {error.sigval.name}") from None  # where the signal is ignored
    else:
        if result.is_failed():
            first = rendezvous.give_up()
            before = "" if first is None else f"\n\nNode {first} failed before this one: look there first."
            raise LaunchError(describe(result.failures, logs) + before)
    finally:
        rendezvous.shutdown()


def _worker_arguments(command: Sequence[str], log_dir: str | None) -> tuple[str, ...]:
    logs = () if log_dir is None else ("--log-dir", log_dir)
    arguments = ("-m", "lockstep.launch.worker", "--agent", str(os.getpid()), *logs, "--", *command)
    # The agent replaces $-macros in arguments; the user's are not meant for it.
    return tuple(argument.replace("$", "$$") for argument in arguments)


class _Agent(LocalElasticAgent):
    """torch's agent, which also prints what it does."""

    _cause_awaited_since: float | None = None

    def __init__(self, spec: WorkerSpec, rendezvous: NodesRendezvous, setup: _RankSetup, log_dir: str | None) -> None:
        super().__init__(spec, setup)
        self._nodes = rendezvous
        self._log_dir = log_dir

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._awaits_cause(worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._cause_awaited_since = None
            # torch names the ranks that had ended when it looked; one that raised first may take longer to end.
            for failure in self._recorded(worker_group):
                result.failures.setdefault(worker_group.workers[failure.local_rank].global_rank, failure)
            if self._remaining_restarts > 0:
                total = worker_group.spec.max_restarts
                count = total - self._remaining_restarts + 1
                _say(f"{describe(result.failures, self._log_dir)}\n\nStarting all ranks again ({count} of {total}).")
        return result

    def _awaits_cause(self, worker_group: WorkerGroup) -> bool:
        """Return whether ranks report only that another one failed, and that other one has yet to report why."""
        recorded = self._recorded(worker_group)
        if not recorded or not all(is_follow_up(failure) for failure in recorded):
            return False
        reported = {failure.local_rank for failure in recorded}
        silent = [worker for worker in worker_group.workers if worker.local_rank not in reported]
        if not silent or any(_has_ended(worker.id) for worker in silent):
            return False
        self._cause_awaited_since = self._cause_awaited_since or time.monotonic()
        return time.monotonic() - self._cause_awaited_since < _SECONDS_FOR_CAUSE

    def _recorded(self, worker_group: WorkerGroup) -> list[ProcessFailure]:
        """Return what ranks of this node have written of the errors that end them."""
        files = {} if self._pcontext is None else self._pcontext.error_files
        return [
            ProcessFailure(worker.local_rank, worker.id, 1, files[worker.local_rank])
            for worker in worker_group.workers
            if worker.local_rank in files and os.path.exists(files[worker.local_rank])
        ]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if death_sig == signal.SIGINT:
            _say("stopping all ranks; Ctrl-C once more does not wait for them to clean up")
        super()._shutdown(death_sig, *args, **kwargs)

    def _exit_barrier(self) -> None:
        # torch's own waits in one piece, deaf to Ctrl-C, and no longer than five minutes.
        self._nodes.await_others()


def _has_ended(pid: int) -> bool:
    """Return whether a child process has ended, and leave it to its owner to collect it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # collected already
        return True


class _RankSetup(DefaultLogsSpecs):
    """Where torch's agent lets us add to what each rank finds in its environment."""

    def __init__(self, folder: str, additions: Mapping[str, str], rendezvous: NodesRendezvous) -> None:
        super().__init__(log_dir=folder)
        self._additions = additions
        self._rendezvous = rendezvous

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        for env in envs.values():
            # The agent counts its own failures only; attempts are what all nodes have in common.
            env.update(self._additions, TORCHELASTIC_RESTART_COUNT=str(self._rendezvous.attempt))
        return destinations


def _environment_additions(job: JobSpec) -> dict[str, str]:
    additions = {}
    starting = f"starting {job.nproc} rank{'s'[: job.nproc > 1]}"
    if job.nnodes > 1:
        starting += f" on node {job.node_rank} of {job.nnodes}"
    if "OMP_NUM_THREADS" not in os.environ:
        # torch would start as many threads as there are cores, in every rank.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // job.nproc)
        additions["OMP_NUM_THREADS"] = str(threads)
        starting += f", OMP_NUM_THREADS={threads} each ({cores} cores)"
    _say(starting)
    interface = interface_towards(job.endpoint()[0])
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        additions["GLOO_SOCKET_IFNAME"] = interface
    return additions


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Put back the signal handlers that torch's agent replaces for good."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        with suppress(ValueError):  # not in the main thread, where the agent has replaced nothing either
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _torch_quiet() -> Iterator[None]:
    """Keep what the agent logs about its work from the terminal; `_say` prints what matters."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(silence)
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
