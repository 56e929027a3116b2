"""`launch`: says at once what it starts, and starts it."""

from __future__ import annotations

import base64
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.errors import ConfigError, LaunchError, counted, require_count, require_number, require_one_of, wrong_type
from lockstep.launch.job import FUNCTION, NUMA_MODES, JobSpec, interface_towards, usable_cores, variable_faults
from lockstep.launch.notices import loading_torch, say
from lockstep.location import make_folder
from lockstep.output import tolerate_closed_output
from lockstep.topology import topology_if_known

_FILES, _FEWEST_FILES = 1024, 64  # that may be open at a time: what most systems allow, and what two ranks need


def launch(
    command: Sequence[str] | Callable[[], object],
    job: JobSpec,
    *,
    max_restarts: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
    payload: str | None = None,
    grace_seconds: int = 60,
    trains: bool = False,
    numa: str | None = None,
) -> None:
    """Run a script, a module or a function on several ranks, and return when all of them have succeeded.

    On one node, all sockets listen only on the loopback interface. Local rank 0 prints to the terminal. Ctrl-C and
    SIGTERM reach every rank, and on Linux no rank outlives this process.

    Args:
        command: what comes after ``python``: a script, or ``-m`` and a module, and its arguments. Or a function without
            arguments, also one of a notebook's cell: the package cloudpickle sends each rank a copy of it, and of what
            it refers to outside of modules. What it returns is dropped. Under `max_restarts`, a Runner or a Session in
            it goes on from the last checkpoint that this job has saved.
        job: the number of ranks on this node, and the nodes; `launch` must be called on each node.
        max_restarts: how often all ranks are restarted after one has failed.
        log_dir: folder in which the local ranks other than 0 write their output to ``rank_N.log``; without it they also
            print to the terminal.
        payload: a string for the ranks of a command; they read it from the file that the variable LOCKSTEP_PAYLOAD
            names.
        grace_seconds: how long ranks may take to end after a signal, before they are killed.
        trains: the ranks run a training by a Runner. A signal before its first iteration is complete then ends the job
            with exit code 75, as it does where the training was saved.
        numa: to which CPUs near its GPU each rank is bound, one of `NUMA_MODES`; None to none. `torch.numa.binding`
            does it, by the program numactl.

    Raises:
        TypeError: `job` is no JobSpec, or `command` is neither a list nor a function.
        ValueError: `command` is empty.
        ConfigError: `max_restarts` or `grace_seconds` is no number of at least 0, `numa` is not known, `log_dir` cannot
            be created, OMP_NUM_THREADS is no number of threads or GLOO_SOCKET_IFNAME no interface, or the system allows
            too few open files.
        LaunchError: cloudpickle is missing for a function, or can't pickle it; a rank failed (the message names it and
            shows its traceback, `exit_code` is its exit code), numactl or a GPU is missing for `numa`, not all nodes
            joined in time, or a signal stopped the ranks and this process ignores it; or a signal stopped the ranks
            and they saved a training, with `exit_code` 75.
    """
    require_count("max_restarts", max_restarts, least=0)
    require_number("grace_seconds", grace_seconds, 0)
    if not isinstance(job, JobSpec):
        raise wrong_type("job", "a JobSpec, such as JobSpec(2) for two ranks", job)
    if not callable(command) and (not isinstance(command, Sequence) or isinstance(command, str | bytes)):
        raise wrong_type("command", "a function, or a list such as ['train.py', '--fast']", command)
    if not callable(command) and not command:
        raise ValueError("`command` must name a script, or -m and a module, but is empty")
    if numa is not None:
        require_one_of("--numa", numa, NUMA_MODES)
        if shutil.which("numactl") is None:
            raise LaunchError(
                "`--numa` must find the program numactl, but there is none. Install it, or leave out --numa"
            )
    if faults := variable_faults(os.environ):
        raise ConfigError("; ".join(faults))
    _allow_files()
    if callable(command):
        payload, command = _packed(command), [FUNCTION]
    tolerate_closed_output()
    logs = None if log_dir is None else os.fspath(log_dir)
    if logs is not None:
        make_folder(Path(logs), "--log-dir")
    _warn_of_several(job)
    starting = f"starting {counted(job.nproc, 'rank')}"
    if job.nnodes > 1:
        most = "" if job.least_nnodes is None else "at most "
        starting += f" on node {job.node_rank} of {most}{job.nnodes}"
    additions = {}
    if not os.environ.get("OMP_NUM_THREADS"):
        # torch would start as many threads as there are cores, in every rank.
        cores = usable_cores()
        threads = max(1, int(cores) // job.nproc)
        additions["OMP_NUM_THREADS"] = str(threads)
        starting += f", OMP_NUM_THREADS={threads} each ({cores:g} cores)"
    say(starting if "torch" in sys.modules else f"{starting}; loading torch")
    interface = interface_towards(job.endpoint()[0])
    if interface is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        additions["GLOO_SOCKET_IFNAME"] = interface

    with loading_torch():
        from lockstep.launch.elastic import run_ranks  # imports torch

    run_ranks(
        command,
        job,
        additions=additions,
        max_restarts=max_restarts,
        logs=logs,
        payload=payload,
        grace_seconds=grace_seconds,
        trains=trains,
        numa=numa,
    )


def _warn_of_several(job: JobSpec) -> None:
    """Warn, once, where srun or mpirun has started this command several times, but as that of one node."""
    found = topology_if_known(os.environ)
    name = {"slurm": "srun", "mpi": "mpirun"}.get(found.launcher)
    if job.nnodes == 1 and name is not None and found.world_size > 1 and found.rank == 0:
        say(
            f"warning: {name} has started this command {found.world_size} times, and each starts a job of its own. For "
            "one job, start it once on each node, with --nnodes, --node-rank and --rdzv; or let "
            f"{name} start the ranks, without `lockstep launch`"
        )


def _allow_files() -> None:
    """Allow this process and its ranks the open files that they need; torch does not say that there are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        return
    allowed = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if allowed < _FEWEST_FILES:
        raise ConfigError(
            f"`ulimit -n`, the number of open files, must be at least {_FEWEST_FILES} for a job, but is {allowed}, and "
            f"can't be raised here. Allow {_FILES} or more: in the shell or service that starts this"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _packed(function: Callable[[], object]) -> str:
    """Return what a rank needs to call a function: where Python finds modules, and the function, as text."""
    try:
        import cloudpickle
    except ImportError as error:
        raise LaunchError(
            "`command` must be a script or a module where cloudpickle is missing, which sends functions to the ranks, "
            f"but is {function!r}. pip install cloudpickle"
        ) from error
    try:
        packed = pickle.dumps((sys.path, cloudpickle.dumps(function)))
    except Exception as error:  # of any kind: objects say themselves how they are pickled
        raise LaunchError(
            "`command` must be a function that can be pickled with the variables that it uses, but one can't be: "
            f"{type(error).__name__}: {error}. Make in the function what can't be sent to another process"
        ) from error
    return base64.b64encode(packed).decode()
