"""The rank and job of this process: a pure function from environment variables to a frozen `Topology`.

Each launcher is a row of variable names in one table. A number that a launcher does not set is derived if there is only
one answer. Missing or contradictory variables raise `TopologyError` before anything waits for other ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple, TypeAlias, TypeVar, cast

from lockstep.errors import TopologyError, did_you_mean
from lockstep.topology.placement import Stated, Statement, derive_placement

Environment: TypeAlias = Mapping[str, str]
LauncherName: TypeAlias = Literal["pytorch", "slurm", "mpi", "none"]
"""The launchers that are known; `"none"` is a process that no launcher started as a rank."""
_Parsed = TypeVar("_Parsed")
LEFT_FILE = "left"
"""A file beside that of a rank's error, TORCHELASTIC_ERROR_FILE: the rank's script has ended without an error."""
_NUMBER = re.compile("[0-9]{1,18}")  # Python refuses to read thousands of digits
# Slurm's shorthand for host names and for tasks per node, which is read without `scontrol`.
_NUMBERS = re.compile(r"\[(\d+)[\d,-]*\]")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")


@dataclass(frozen=True, slots=True)
class Topology:
    """The position of one process among the ranks and nodes of its job.

    Attributes:
        launcher: the launcher that started the ranks.
        rank: the number of this process in the job, below `world_size`.
        world_size: number of processes in the job.
        local_rank: the number of this process among those of its node.
        local_size: number of the job's processes on this node.
        node_rank: the number of this node, below `num_nodes`.
        num_nodes: number of nodes that have ranks.
        master_addr: host of rank 0; None if the environment does not have it.
        master_port: port of the store on that host; None if the environment does not have it.
        restart_count: how often the launcher has restarted this job.
        agent_store: the launcher already serves a store at `master_addr`, so rank 0 must not serve one.
        job_key: a string that is the same on all ranks of this job and differs from other jobs; empty if nothing
            identifies the job.
    """

    launcher: LauncherName
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    agent_store: bool = False
    job_key: str = ""


class _Names(NamedTuple):
    """The variables in which a launcher sets each number; the first that is set counts."""

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ("LOCAL_RANK",)
    local_size: tuple[str, ...] = ("LOCAL_WORLD_SIZE",)
    node_rank: tuple[str, ...] = ("GROUP_RANK",)
    num_nodes: tuple[str, ...] = ("GROUP_WORLD_SIZE",)
    restart_count: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # all that are set, in this order, identify the job


_TORCH = _Names(("RANK",), ("WORLD_SIZE",), restart_count=("TORCHELASTIC_RESTART_COUNT",))
_SLURM = _Names(
    rank=("SLURM_PROCID",),
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    local_size=(),  # from the list of tasks per node
    node_rank=("SLURM_NODEID",),
    num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    restart_count=("SLURM_RESTART_COUNT",),
    job=("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
# OMPI_COMM_WORLD_NODE_RANK is left out on purpose: it numbers the processes on this node, not the nodes.
_OPEN_MPI = _Names(
    rank=("OMPI_COMM_WORLD_RANK",),
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    job=("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"),
)
# The mpiexec of MPICH and of Intel MPI gives its ranks nothing that identifies the job.
_PMI = _Names(
    rank=("PMI_RANK",),
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"),
    job=("PMI_JOBID",),
)
# PMIx provides the size only through its library, so the user must export WORLD_SIZE.
_PMIX = _Names(("PMIX_RANK",), ("WORLD_SIZE",), job=("PMIX_NAMESPACE",))

# Within a launcher, the first dialect whose rank is set counts: Open MPI sets PMIX_RANK, too.
_DIALECTS: Mapping[LauncherName, tuple[_Names, ...]] = {
    "pytorch": (_TORCH,),
    "slurm": (_SLURM,),
    "mpi": (_OPEN_MPI, _PMI, _PMIX),
    "none": (),
}
_REMEDIES: Mapping[LauncherName, str] = {
    "pytorch": "Start the ranks with torchrun or `lockstep launch`, or set RANK, WORLD_SIZE, LOCAL_RANK and "
    "LOCAL_WORLD_SIZE by hand on every rank",
    "slurm": "Start the ranks with srun, e.g. `srun -N 2 -n 4 python train.py`",
    "mpi": "Start the ranks with mpirun, e.g. `mpirun -n 4 python train.py`",
}


def infer_launcher(env: Environment | None = None) -> LauncherName:
    """Return what started this process, by its environment: ``"pytorch"``, ``"slurm"``, ``"mpi"``, else ``"none"``.

    Launchers nest, and variables are inherited: torchrun under srun is ``"pytorch"``, mpirun inside a Slurm allocation
    is ``"mpi"``. A process that was not started as a rank is ``"none"``, also in the shell of `salloc` or ``srun
    --pty`` and in the body of an sbatch script, where other tasks would never join.
    """
    env = os.environ if env is None else env
    if "RANK" in env and "LOCAL_RANK" in env:
        return "pytorch"
    if _is_mpi_rank(env):
        return "mpi"
    if _is_slurm_task(env) and "SLURM_PTY_PORT" not in env:
        return "slurm"
    # Set by the user. If only one of them is set, read_topology raises an error that names the other.
    return "pytorch" if "RANK" in env or "WORLD_SIZE" in env else "none"


def read_topology(env: Environment, launcher: str) -> Topology:
    """Return the position of this process among the ranks and nodes of its job.

    If no variable numbers the nodes (MPI, variables set by the user), ranks are assumed to fill one node after the
    other, with equally many on each, as mpirun numbers them by default. If no variable counts the ranks of a node, all
    are assumed to run on this node if the address of rank 0 is missing or a loopback address.

    Args:
        env: the variables, normally ``os.environ``.
        launcher: ``"pytorch"``, ``"slurm"``, ``"mpi"`` or ``"none"``.

    **Raises**: TopologyError if a variable is missing, is not a number, or contradicts another.

    **Example**::

        >>> env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        >>> topology = read_topology(env, "pytorch")
        >>> topology.node_rank, topology.num_nodes
        (1, 2)
    """
    if launcher not in _DIALECTS:
        known = ", ".join(map(repr, _DIALECTS))
        hint = did_you_mean(launcher, _DIALECTS)
        raise TopologyError(f"`launcher` must be one of {known}, but is {launcher!r}{hint}")
    if launcher == "none":
        return Topology("none")
    by = cast(LauncherName, launcher)
    names = _dialect(env, by)
    master_addr = env.get("MASTER_ADDR") or (_first_slurm_host(env) if by == "slurm" else None)
    statement = _read_statement(env, by, names, one_host=master_addr is None or is_loopback(master_addr))
    placement = derive_placement(statement)
    if by == "slurm" and statement.world_size.value > 1 and not _is_slurm_task(env):
        raise statement.contradiction(
            f"{statement.world_size.name} must be 1 outside of a step of srun, but is {statement.world_size.value}: in "
            "the shell of an salloc or the body of an sbatch script the other tasks never come"
        )
    if by != "pytorch":
        _refuse_other_torch_numbers(env, by, statement)
    restart_count = _number(env, names.restart_count)
    return Topology(
        by,
        statement.rank.value,
        statement.world_size.value,
        *placement,
        master_addr=master_addr,
        master_port=_master_port(env),
        restart_count=restart_count.value if restart_count else 0,
        agent_store=by == "pytorch" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job_key=_job_key(env, names),
    )


def topology_if_known(env: Environment) -> Topology:
    """Return the topology of this process; that of a single process if variables are missing or contradict."""
    with suppress(TopologyError):
        return read_topology(env, infer_launcher(env))
    return Topology("none")


def _is_mpi_rank(env: Environment) -> bool:
    if "OMPI_COMM_WORLD_RANK" in env:
        return True
    # srun also sets PMI and PMIx variables for its tasks. Under mpiexec in an allocation, srun starts its proxies,
    # and Slurm's numbers are those of the proxies: different from the ranks', unless each proxy starts one rank.
    if "PMI_RANK" in env:
        numbers = (env["PMI_RANK"], env.get("PMI_SIZE"))
        return not (_is_slurm_task(env) and numbers == (env["SLURM_PROCID"], env.get("SLURM_STEP_NUM_TASKS")))
    return "PMIX_RANK" in env and not env.get("PMIX_NAMESPACE", "").startswith("slurm.pmix")


def _is_slurm_task(env: Environment) -> bool:
    # The body of an sbatch script also has SLURM_PROCID=0 and SLURM_NTASKS, but belongs to no step. It may inherit
    # the variables of a step that called sbatch, and the shell of salloc may be a step of one task. In both cases the
    # two lists of tasks differ; srun sets them to the same value (Slurm 22.05).
    return (
        "SLURM_PROCID" in env
        and "SLURM_STEP_ID" in env
        and env.get("SLURM_TASKS_PER_NODE") == env.get("SLURM_STEP_TASKS_PER_NODE")
    )


def _dialect(env: Environment, launcher: LauncherName) -> _Names:
    dialects = _DIALECTS[launcher]
    for names in dialects:
        if any(variable in env for variable in names.rank):
            return names
    ranks = " or ".join(variable for names in dialects for variable in names.rank)
    why = f", since WORLD_SIZE is, to {env['WORLD_SIZE']!r}" if launcher == "pytorch" and "WORLD_SIZE" in env else ""
    raise TopologyError(f"{ranks} must be set for launcher {launcher!r}{why}, but is missing. {_REMEDIES[launcher]}")


def _read_statement(env: Environment, launcher: LauncherName, names: _Names, *, one_host: bool) -> Statement:
    rank, world_size = _number(env, names.rank), _number(env, names.world_size)
    assert rank is not None  # `names` was chosen by the variable of the rank
    if world_size is None:
        raise TopologyError(
            f"{names.world_size[0]} must be set where {rank.name} is, {rank.value}, but is missing. "
            f"{_REMEDIES[launcher]}"
        )
    local_rank, local_size = _number(env, names.local_rank), _number(env, names.local_size)
    node_rank, num_nodes = _number(env, names.node_rank), _number(env, names.num_nodes)
    if launcher == "slurm":
        local_size, num_nodes = _slurm_counts(env, world_size, node_rank, num_nodes)
    return Statement(
        rank, world_size, local_rank, local_size, node_rank, num_nodes, one_host, remedy=_REMEDIES[launcher]
    )


def _slurm_counts(
    env: Environment, world_size: Stated, node_rank: Stated | None, num_nodes: Stated | None
) -> tuple[Stated | None, Stated | None]:
    """Return the number of tasks on this node and the number of nodes, from the list of tasks per node."""
    # Do not mix variables of a step with variables of its job.
    name = "SLURM_STEP_TASKS_PER_NODE" if world_size.name == "SLURM_STEP_NUM_TASKS" else "SLURM_TASKS_PER_NODE"
    if name not in env:
        return None, num_nodes
    counts = _parsed(env, name, expand_task_counts)
    listed = Stated(f"the number of nodes in {name}", len(counts))
    for total, stated in ((sum(counts), world_size), (len(counts), num_nodes)):
        if stated is not None and total != stated.value:
            what = "add up to" if stated is world_size else "be for as many nodes as"
            raise TopologyError(
                f"{name} must {what} {stated.name}, {stated.value}, but is {env[name]!r}, which makes {total}. "
                f"Is one of them left over from another step? {_REMEDIES['slurm']}"
            )
    if node_rank is None:
        return None, listed
    own = counts[min(node_rank.value, len(counts) - 1)]  # a node beyond the list is refused later
    return Stated(f"the count for this node in {name}", own), listed


def _first_slurm_host(env: Environment) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in env:
            return _parsed(env, name, first_host)
    return None


def _refuse_other_torch_numbers(env: Environment, launcher: LauncherName, statement: Statement) -> None:
    """Raise a `TopologyError` if torchrun's variables (or the user's) contradict this launcher's."""
    said = (statement.rank, statement.world_size, statement.local_rank, statement.local_size)
    theirs = (_TORCH.rank, _TORCH.world_size, _TORCH.local_rank, _TORCH.local_size)
    for stated, variables in zip(said, theirs, strict=True):
        other = _number(env, variables)
        if other is not None and stated is not None and other.value != stated.value:
            raise TopologyError(
                f"{other.name} must be {stated.value} for launcher {launcher!r}, as {stated.name} says, but is "
                f"{other.value} (rank {statement.rank.value} of {statement.world_size.value}). If torchrun started the "
                f"ranks, use launcher 'pytorch'; else unset {other.name}"
            )


def is_loopback(host: str) -> bool:
    """Return whether a host is named by a loopback address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _master_port(env: Environment) -> int | None:
    port = _number(env, ("MASTER_PORT",))
    if port is not None and not 0 < port.value < 2**16:
        raise TopologyError(
            f"MASTER_PORT must be from 1 to 65535, but is {port.value}. mpirun and srun need none: unset it"
        )
    return port.value if port else None


def _job_key(env: Environment, names: _Names) -> str:
    marks = [f"{name}={env[name]}" for name in names.job if name in env]
    return sha256("\n".join(marks).encode()).hexdigest()[:16] if marks else ""


def _number(env: Environment, variables: tuple[str, ...]) -> Stated | None:
    for name in variables:
        if name in env:
            if not _NUMBER.fullmatch(env[name]):
                raise TopologyError(f"{name} must be a whole number, 0 or more, but is {env[name]!r}")
            return Stated(name, int(env[name]))
    return None


def _parsed(env: Environment, name: str, parse: Callable[[str], _Parsed]) -> _Parsed:
    try:
        return parse(env[name])
    except ValueError as error:
        raise TopologyError(f"{name} must have Slurm's format, but {error}. Start the ranks with srun") from error


def first_host(text: str) -> str:
    """Return the first of the host names that a Slurm node list stands for.

    **Raises**: ValueError if the text does not begin like a node list.

    **Example**::

        >>> first_host("n[01-03,7],login"), first_host("rack[1-2]n[3-4]")
        ('n01', 'rack1n3')

    **Source**: "Hostlist expressions", scontrol(1), Slurm 22.05.
    """
    host = _NUMBERS.sub(r"\1", text).partition(",")[0]
    if not host or set(host) & set("[]"):
        raise ValueError(f"{text!r} is not a node list such as n[01-03,7],login")
    return host


def expand_task_counts(text: str) -> list[int]:
    """Return the number of tasks on each node, from Slurm's run-length form.

    **Raises**: ValueError if the text is not such a list.

    **Example**::

        >>> expand_task_counts("2(x3),1")
        [2, 2, 2, 1]

    **Source**: SLURM_TASKS_PER_NODE, sbatch(1), Slurm 22.05.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a task count such as 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
