"""A Slurm of one's own: two nodes on this machine, on the loopback interface, for as long as it is needed."""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from .jobs import LOOPBACK, Ended, clean_environment, run

_CONFIG = """
ClusterName=lockstep
SlurmctldHost={host}({loopback})
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
NodeName=n1 NodeAddr={loopback} NodeHostname={host} Port={ports[1]} CPUs=8
NodeName=n2 NodeAddr={loopback} NodeHostname={host} Port={ports[2]} CPUs=8
PartitionName=main Nodes=n[1-2] Default=YES State=UP
"""
_SECONDS_TO_START = _SECONDS_TO_STOP = 30
_END_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class SlurmCluster:
    """Two running nodes, n1 and n2. Those are no host names: ranks on both need MASTER_ADDR."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "SBATCH_OUTPUT": str(folder / "%j.out")}

    def run(self, *command: str, **variables: str) -> Ended:
        """Run a command of Slurm, with variables added to its environment."""
        return run(command, env=self.env | variables)

    def run_batch(self, script: str, *options: str) -> Ended:
        """Run a shell script under sbatch; its output has the errors in it."""
        # sbatch --wait would look after its job every few seconds only.
        number = self.run("sbatch", "--parsable", *options, "--wrap", script).out.strip()
        state = ""
        while not state.startswith(_END_STATES):
            time.sleep(0.1)
            state = self.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T").out
        out = (self._folder / f"{number}.out").read_text()
        return Ended(0 if state.startswith("COMPLETED") else 1, out, out)

    def environments(self, count: int, *command: str) -> list[dict[str, str]]:
        """Return what each process finds in its environment that `command` starts, say srun and its options.

        Args:
            count: the number of those processes.
            command: what the name of a program can follow.
        """
        found = self._folder / f"environments-{time.monotonic_ns()}"
        found.mkdir()
        probe = found / "probe.sh"
        # An environment is complete when its file has its name.
        probe.write_text(f'#!/bin/sh\nenv -0 > "{found}/$$.part" && mv "{found}/$$.part" "{found}/$$.env"\n')
        probe.chmod(0o755)
        ended = self.run(*command, str(probe))
        assert ended.code == 0, ended.err
        _wait_for(f"{count} processes", lambda: len([*found.glob("*.env")]) == count)
        texts = [path.read_text() for path in found.glob("*.env")]
        return [dict(entry.split("=", 1) for entry in text.split("\0") if entry) for text in texts]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster that keeps everything in `folder`; end all of it with the context."""
    host = socket.gethostname().partition(".")[0]
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        _CONFIG.format(folder=folder, host=host, loopback=LOOPBACK, ports=_free_ports(3))
    )
    cluster = SlurmCluster(folder)
    munge_files = [f"--{what}-file={folder}/munged.{what}" for what in ("pid", "log", "seed")]
    # --force, because /tmp is writable for others.
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}", *munge_files]
    with ExitStack() as stack:
        stack.enter_context(_daemon(munged, cluster))
        _wait_for("munged", lambda: (folder / "munge.socket").exists())
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            stack.enter_context(_daemon(command, cluster))
        stack.callback(cluster.run, "scontrol", "shutdown")
        _wait_for("Slurm", lambda: cluster.run("sinfo", "-N", "-h", "-o", "%T").out.split() == ["idle", "idle"])
        yield cluster


@contextmanager
def _daemon(command: Sequence[str], cluster: SlurmCluster) -> Iterator[None]:
    process = subprocess.Popen(
        command, env=clean_environment() | cluster.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(_SECONDS_TO_STOP)
        finally:
            for left in started:  # the tasks of a job that a failed test did not wait for
                with suppress(psutil.NoSuchProcess):
                    left.kill()
            process.kill()
            process.wait()


def _wait_for(what: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not start within {_SECONDS_TO_START} s"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOOPBACK, 0))
        return [sock.getsockname()[1] for sock in sockets]
