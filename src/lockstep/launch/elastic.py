"""The ranks of this machine under torch's elastic agent, on behalf of `launch`.

It is the agent of torchrun. lockstep adds its own rendezvous (`rendezvous`), what each rank does when it starts and
ends (`worker`), how they are watched and ended (`processes`), and the messages about failures (`ledger`).
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
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.numa.binding import AffinityMode, NumaOptions

from lockstep.errors import LaunchError, Preempted, counted, ranks_in_words
from lockstep.launch.job import SENT_SIGNALS, JobSpec
from lockstep.launch.ledger import USUAL_AT_A_SIGNAL, Ledger, RankRecord, Report, seconds_to_await_cause
from lockstep.launch.notices import say
from lockstep.launch.processes import RankProcesses, oom_kills
from lockstep.launch.rendezvous import JobEndedError, NodeFailedError, NodesRendezvous
from lockstep.launch.worker import FAILING_FILE, RESUME_SINCE, RUNS_FILE, TRAINED_FILE

_WORKER = ("-m", "lockstep.launch.worker")
_SIGNALS = (signal.SIGINT, *SENT_SIGNALS, signal.SIGQUIT)
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # of torch's agent; its default lacks SIGUSR1
_SECONDS_FOR_CAUSE = 3.0  # for another node to say that it failed first
_SECONDS_FOR_NODE_0 = 2.0  # to be the first of those that know no cause: it sees which node is lost
_SECONDS_TO_END = 3.0  # after SIGTERM, when another rank has failed
_SECONDS_TO_CLEAN_UP = 10.0  # after an error that the rank has reported
_SECONDS_OF_A_PRESS = 0.3
_SECONDS_TO_DIE = 30  # after SIGKILL: a process that waits for a device ends when the device answers


def run_ranks(
    command: Sequence[str],
    job: JobSpec,
    *,
    additions: dict[str, str],
    max_restarts: int,
    logs: str | None,
    payload: str | None,
    grace_seconds: int,
    trains: bool,
    numa: str | None,
) -> None:
    """Run what `launch` describes; `additions` are environment variables for the ranks."""
    if numa is not None and torch.cuda.device_count() < job.nproc:
        raise LaunchError(
            "`--numa` must have a CUDA GPU for each rank of this machine, to bind it near that, but there are "
            f"{torch.cuda.device_count()} GPUs for {counted(job.nproc, 'rank')}. Leave out --numa"
        )
    logger = logging.getLogger("torch.distributed.elastic")  # `say` prints what matters
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    rendezvous = NodesRendezvous(job, say)
    spec = WorkerSpec(
        role="rank",
        local_world_size=job.nproc,
        entrypoint=sys.executable,
        # The agent replaces $-macros in arguments; a $ in the user's must stay.
        args=tuple(word.replace("$", "$$") for word in (*_WORKER, str(os.getpid()), logs or "", *command)),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        numa_options=None if numa is None else NumaOptions(AffinityMode(numa)),
    )
    try:
        with _temporary_folder() as folder, _signals_handled(trains):
            setup = _RankSetup(folder, additions, payload, rendezvous)
            agent = _Agent(spec, setup, logs, grace_seconds, job.least_nproc)
            result = agent.run()
    except _PreemptedError:
        rendezvous.await_others()
        if agent.has_trained:
            done = (
                ": all ranks have saved what was trained, up to the same iteration, and ended. Start the job again "
                "with resume=True, or --resume"
            )
        else:
            again = " with --resume" if rendezvous.attempt > 0 else ""
            done = f" before the first iteration: nothing is saved. Start the same command again{again}"
        raise LaunchError(
            f"a signal asked the training to stop{done} (exit code {Preempted.EXIT_CODE})",
            exit_code=Preempted.EXIT_CODE,
        ) from None
    except JobEndedError as error:
        say(str(error))
    except NodeFailedError as error:
        here = f"{agent.describe()}\n\n" if agent.is_awaited else ""
        raise LaunchError(f"{here}{error}", exit_code=error.exit_code) from error
    except RendezvousError as error:
        raise LaunchError(str(error)) from error
    except SignalException as error:
        _end_by_signal(error.sigval, agent, rendezvous, trains=trains)
    else:
        if result.is_failed():
            ledger = agent.ledger
            wait = _SECONDS_FOR_CAUSE + _SECONDS_FOR_NODE_0 * (job.node_rank > 0)
            node, code = rendezvous.give_up(ledger.exit_code, 0.0 if ledger.is_cause_known else wait, ledger.awaited)
            first = "" if node == job.node_rank else f"node {node} failed before this one: look there first. Here:\n\n"
            if rendezvous.silent:
                nodes = ranks_in_words(rendezvous.silent, "node")
                first = (
                    f"{nodes} gave no sign of life in {_SECONDS_FOR_CAUSE:.0f} s, after ranks here had lost others: "
                    "the launcher there has ended, or the machine or network is lost. Look there first. Here:\n\n"
                )
            raise LaunchError(first + agent.describe(), exit_code=code)
    finally:
        rendezvous.shutdown()


def _end_by_signal(number: signal.Signals, agent: _Agent, rendezvous: NodesRendezvous, *, trains: bool) -> None:
    """Say what a signal has stopped that not all ranks have saved, and end with its exit code.

    Return if the ranks of a training had done their work.
    """
    if (trains or agent.has_trained) and agent.is_complete:
        rendezvous.await_others()
        return
    if trains and not (agent.has_trained or agent.has_failed) and number in (signal.SIGINT, *SENT_SIGNALS):
        rendezvous.give_up(Preempted.EXIT_CODE)
        again = "Start the job again" + (" with --resume" if rendezvous.attempt > 0 else "")
        raise LaunchError(
            f"{number.name} came before the first iteration was complete, so that there is nothing to save: all ranks "
            f"were stopped. {again} (exit code {Preempted.EXIT_CODE})",
            exit_code=Preempted.EXIT_CODE,
        ) from None
    if agent.has_raised:  # no usual end by the signal: whoever starts such a job again would meet it again
        rendezvous.give_up(agent.ledger.exit_code)
        raise LaunchError(
            f"{number.name} stopped the training, but it is not saved. {agent.describe()}",
            exit_code=agent.ledger.exit_code,
        ) from None
    killed_note = ""
    if agent.killed:
        why = "a second Ctrl-C" if agent.is_pressed else f"--grace-seconds {agent.grace_seconds}"
        killed_note = (
            f"; rank {', '.join(str(record.rank) for record in agent.killed)} had not ended and had to be killed "
            f"({why}), so that a training resumes from the checkpoint before"
        )
    if agent.has_failed:
        say(agent.describe())
    else:
        for record in agent.killed:
            if record.stack:
                say(f"rank {record.rank} did not stop. It was here (most recent call first):\n{record.stack}")
        for rank, report in agent.raised:
            say(f"rank {rank} raised {report.kind}{report.place and f' at {report.place}'} when it was to stop")
    say(f"{number.name}: all ranks were stopped{killed_note}")
    sys.stdout.flush()
    node, code = rendezvous.give_up(128 + number)
    if code not in (128 + number, Preempted.EXIT_CODE):  # else that node was stopped, too
        raise LaunchError(f"node {node} had failed before; what went wrong is written there", exit_code=code) from None
    signal.raise_signal(number)  # its usual effect on this process, now that the ranks have ended
    raise LaunchError(f"all ranks were stopped by {number.name}", exit_code=128 + number) from None  # if ignored


class _PreemptedError(Exception):
    """All ranks of this node have stopped at a signal, and saved."""


class _Agent(LocalElasticAgent):
    """torch's agent with a ledger of failures, lockstep's way to end ranks, and lockstep's exit barrier."""

    def __init__(
        self,
        spec: WorkerSpec,
        setup: _RankSetup,
        log_dir: str | None,
        grace_seconds: int,
        least_nproc: int | None,
    ) -> None:
        super().__init__(spec, setup)
        self.grace_seconds = grace_seconds
        self._least_nproc = least_nproc
        self._setup = setup
        self._log_dir = log_dir
        self._processes: RankProcesses | None = None
        self._since: dict[bool, float] = {}  # when a rank had first failed (True) or stopped at a signal
        self._oom_kills = 0  # of this machine, when the attempt began
        self.is_complete = False  # whether a signal found that all ranks had done their work
        self.has_trained = False  # whether a rank had trained when a signal stopped the job
        self.has_failed = False  # whether a rank had failed then
        self.has_raised = False  # whether a rank that had trained has raised an error of its own since, as when saving
        self.killed: list[RankRecord] = []  # those that did not end then
        self.raised: list[tuple[int, Report]] = []  # those that raised an error then, with it
        self.is_awaited = False  # whether another node gave up because it waited for ranks of this one
        self.is_pressed = False  # whether Ctrl-C was pressed a second time
        self.ledger: Ledger

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks; raise `_PreemptedError` if all have stopped at a signal and saved."""
        try:
            return super().run(role)  # type: ignore[no-any-return]
        except _PreemptedError:
            self.has_trained = self._setup.trained.exists()
            raise
        except SignalException:
            if self._processes is not None:
                self.has_trained = self._setup.trained.exists()
                self._processes.poll()
                self.killed = [record for record in self._processes.records if record.was_killed]
                reports = [(one.rank, one.report) for one in self._processes.records if not one.is_preempted]
                self.raised = [(rank, one) for rank, one in reports if one and one.kind not in USUAL_AT_A_SIGNAL]
                if all(record.is_preempted for record in self._processes.records):
                    raise _PreemptedError from None
                self.is_complete = all(record.status == 0 and not record.report for record in self._processes.records)
                raised = [record for record in self._processes.records if self.has_trained and record.has_raised_itself]
                for record in raised:
                    record.signalled = float("inf")  # the signal has not caused the error
                self.has_raised = bool(raised)
                is_failing = self._setup.failing.exists()
                if raised or (is_failing and any(record.has_failed for record in self._processes.records)):
                    self.has_failed = True
                    self._judge()
            raise

    def describe(self) -> str:
        """Return the message about the failures of the last attempt."""
        return self.ledger.describe(self._log_dir, self.get_worker_group().workers[0].global_rank)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for file in (self._setup.failing, self._setup.trained):
            file.unlink(missing_ok=True)
        self._since.clear()
        self._oom_kills = oom_kills()
        pids: dict[int, int] = super()._start_workers(worker_group)
        self._debounce_sigint()
        files = self._setup.error_files
        ranks = [(worker.global_rank, worker.local_rank) for worker in worker_group.workers]
        records = [RankRecord(rank, pids[local], error_file=files[local]) for rank, local in ranks]
        self._processes = RankProcesses(records)
        return pids

    def _debounce_sigint(self) -> None:
        """Pass over a SIGINT right after another: of one Ctrl-C, a program around this one may send a second."""
        handle = signal.getsignal(signal.SIGINT)  # torch's, set anew with each attempt
        if not callable(handle) or threading.current_thread() is not threading.main_thread():
            return
        pressed = float("-inf")

        def once(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            if (now := time.monotonic()) > pressed + _SECONDS_OF_A_PRESS:
                pressed = now
                handle(number, frame)

        signal.signal(signal.SIGINT, once)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._setup.failing.touch()  # a rank that would save first must not: others are gone
        records = [] if self._processes is None else self._processes.records
        if awaited := [record for record in records if record.rank in self._setup.rendezvous.awaited]:
            assert self._processes is not None
            self._processes.poll(states=True)
            self._processes.collect_stacks()
            self.ledger, self.is_awaited = Ledger(awaited), True
        super()._stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._processes is not None
        self._processes.poll()
        records = self._processes.records
        if all(record.has_left for record in records):
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
            )
        failed = any(record.has_failed for record in records)
        if not failed and not any(record.is_preempted for record in records):
            return RunResult(state=WorkerState.HEALTHY)
        now = time.monotonic()
        if failed:
            patience = seconds_to_await_cause(records)
        else:  # the ranks that still run are about to stop at the signal, as others have
            patience = self.grace_seconds if any(record.status is None for record in records) else 0.0
        if now - self._since.setdefault(failed, now) < patience:
            return RunResult(state=WorkerState.HEALTHY)
        if not failed and all(record.is_preempted or record.has_left for record in records):
            raise _PreemptedError
        self._end_failed(worker_group)
        return RunResult(state=WorkerState.FAILED)

    def _end_failed(self, worker_group: WorkerGroup) -> None:
        """End the ranks that run after others have failed, and note the failures."""
        assert self._processes is not None
        self._setup.failing.touch()
        began = time.monotonic()
        if not any(record.failed_itself for record in self._processes.records):
            self._processes.collect_stacks()
        self._processes.send(signal.SIGTERM, include_reported=False)
        if not self._processes.wait(_SECONDS_TO_END, include_reported=False):
            self._processes.send(signal.SIGKILL, include_reported=False)
            self._processes.wait(began + _SECONDS_TO_CLEAN_UP - time.monotonic())
        self._kill()
        self._judge()
        total = worker_group.spec.max_restarts
        count = total - self._remaining_restarts + 1
        if self._remaining_restarts > 0:
            spec = worker_group.spec
            again = "Starting all ranks again"
            if self._least_nproc is not None and self.ledger.lost:
                spec.local_world_size = max(self._least_nproc, spec.local_world_size - len(self.ledger.lost))
                again = f"Starting again with {counted(spec.local_world_size, 'rank')}, as many as are left"
            several = (worker_group.group_world_size or 1) > 1 and not self.ledger.is_cause_known
            first = (
                "a rank failed on another node first; what went wrong is written there. Here:\n\n" if several else ""
            )
            say(f"{first}{self.describe()}\n\n{again} (restart {count} of {total}).")
            self._processes = None  # a signal until they are started finds no rank: other nodes may be long in coming

    def _judge(self) -> None:
        """Find the cause of the failures of this attempt."""
        assert self._processes is not None
        whole_job = self.get_worker_group().group_world_size == 1
        self.ledger = Ledger(self._processes.records, whole_job=whole_job, oom_kills=oom_kills() - self._oom_kills)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:  # as torch calls it
        failed = self._setup.failing.exists()
        if not failed:
            _ignore(*SENT_SIGNALS)  # a second signal must not interrupt the saving, only Ctrl-C
        if self._processes is not None:
            try:
                if death_sig == signal.SIGINT:
                    say("stopping all ranks; a training saves first. Ctrl-C once more does not wait for them")
                self._processes.send(death_sig)
                has_ended = self._processes.wait(_SECONDS_TO_END if failed else self.grace_seconds)
                if not (failed or has_ended):
                    self._processes.collect_stacks()
                if not failed:
                    _ignore(signal.SIGINT)  # all have ended for good: nothing to interrupt
            except SignalException:  # Ctrl-C once more
                self.is_pressed = True
                say("killing all ranks")
                self._kill(seconds=0.0)
            else:
                self._kill()
        super()._shutdown(signal.SIGKILL)

    def _kill(self, seconds: float = 1.0) -> None:
        """Kill the ranks that still run, and what ranks have left behind; `seconds` is for the latter to end."""
        assert self._processes is not None
        self._processes.send(signal.SIGKILL)
        self._processes.wait(_SECONDS_TO_DIE)
        self._processes.poll()
        self._processes.close(seconds)

    def _exit_barrier(self) -> None:
        # torch's own barrier says nothing, and Ctrl-C does not interrupt it.
        self._setup.rendezvous.await_others()


class _RankSetup(DefaultLogsSpecs):
    """Adds variables to the environment of each rank, by the hook that torch's agent has for that.

    Args:
        folder: the job's own folder.
        additions: variables for every rank.
        payload: a text for the ranks; where there is one, those that are restarted resume what this job has saved.
        rendezvous: the nodes' rendezvous.

    Attributes:
        failing: a file that is there while the agent ends its ranks because one has failed, here or on another node.
        trained: a file that is there when a rank of this attempt has completed an iteration.
        error_files: by local rank, the file in which a rank of this attempt reports its error.
    """

    def __init__(
        self, folder: str, additions: Mapping[str, str], payload: str | None, rendezvous: NodesRendezvous
    ) -> None:
        super().__init__(log_dir=folder)
        self.rendezvous = rendezvous
        self.failing, self.trained = Path(folder, "failing"), Path(folder, "trained")
        self.error_files: Mapping[int, str] = {}
        self._additions = {**additions, FAILING_FILE: str(self.failing), TRAINED_FILE: str(self.trained)}
        self._again: dict[str, str] = {}
        if payload is not None:
            file = Path(folder, "payload")
            file.write_text(payload, encoding="utf-8")
            self._additions |= {"LOCKSTEP_PAYLOAD": str(file), RUNS_FILE: str(Path(folder, "runs"))}
            self._again[RESUME_SINCE] = str(time.time())

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        self.error_files = destinations.error_files
        for env in envs.values():
            # The agent counts only its own node's failures; the attempt number is the same on all nodes.
            env.update(self._additions, TORCHELASTIC_RESTART_COUNT=str(self.rendezvous.attempt))
            if self.rendezvous.attempt > 0:
                env.update(self._again)
        return destinations


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="lockstep-")
    except OSError as error:
        raise LaunchError(
            f"a folder for temporary files must be there, but none can be written to: {error.strerror}. Set TMPDIR to "
            "one; in a container whose file system is read-only, mount a volume there, such as an emptyDir at /tmp"
        ) from error


def _ignore(*numbers: signal.Signals) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def _signals_handled(trains: bool) -> Iterator[None]:
    """Let torch's agent pass on SIGUSR1, too, but not a SIGHUP that is ignored, as under nohup.

    At the end, restore the handlers that the agent has replaced. Those of `lockstep train` (`trains`), which call for a
    new start as long as nothing has failed, hold no more; and one in C, which Python does not know, can't be restored.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    given = os.environ.get(_SIGNALS_VARIABLE)
    passed_on = [number for number in _SIGNALS if number != signal.SIGHUP or before[number] != signal.SIG_IGN]
    os.environ[_SIGNALS_VARIABLE] = given or ",".join(number.name for number in passed_on)
    try:
        yield
    finally:
        if given is None:
            del os.environ[_SIGNALS_VARIABLE]
        with suppress(ValueError):  # not the main thread: the agent has replaced nothing
            for number, handler in before.items():
                is_stale = trains and number in SENT_SIGNALS and callable(handler)
                signal.signal(number, signal.SIG_DFL if is_stale or handler is None else handler)
