"""Who is this process? Tables of what launchers really set, and of what contradicts itself."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import TopologyError
from lockstep.topology import Topology, infer_launcher, read_topology

from .launcher_environments import (
    BARE_PMI,
    BARE_PMIX,
    MPICH,
    OPEN_MPI,
    OPEN_MPI_5,
    SLURM_ALLOCATION,
    SLURM_BATCH,
    SLURM_BATCH_WITHIN_STEP,
    SLURM_CYCLIC_STEP,
    SLURM_INTERACTIVE_STEP,
    SLURM_NARROW_STEP,
    SLURM_PTY,
    SLURM_STEP,
    TORCHRUN,
    TORCHRUN_STANDALONE,
    TORCHRUN_UNEVEN,
    Environment,
)


def without(env: Environment, *names: str) -> Environment:
    return {name: value for name, value in env.items() if name not in names}


def hand_set(rank: int, world_size: int, **more: object) -> Environment:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size)} | {name: str(value) for name, value in more.items()}


@pytest.mark.parametrize(
    ("launcher", "env"),
    [
        ("none", {}),
        ("none", {"PATH": "/bin", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}),
        ("pytorch", TORCHRUN),
        ("pytorch", TORCHRUN_STANDALONE),
        ("pytorch", hand_set(0, 2, MASTER_ADDR="localhost", MASTER_PORT=29500)),
        ("pytorch", {"RANK": "0"}),  # a slip: read_topology says what is missing
        ("pytorch", {"WORLD_SIZE": "2"}),
        ("slurm", SLURM_STEP),
        ("slurm", SLURM_NARROW_STEP),
        ("slurm", SLURM_NARROW_STEP | {"ENVIRONMENT": "BATCH"}),  # srun within an sbatch script
        ("slurm", SLURM_STEP | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "7.0"}),  # srun --mpi=pmi2
        ("slurm", SLURM_STEP | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"}),  # srun --mpi=pmix
        ("slurm", SLURM_STEP | {"WORLD_SIZE": "3"}),  # exported by the script
        ("slurm", SLURM_STEP | {"RANK": "2", "WORLD_SIZE": "3"}),  # Slurm knows more than these two
        ("mpi", OPEN_MPI),
        ("mpi", OPEN_MPI_5),
        ("mpi", MPICH),
        ("mpi", BARE_PMI),
        ("mpi", BARE_PMIX),
    ],
)
def test_infer_launcher(launcher: str, env: Environment) -> None:
    assert infer_launcher(env) == launcher


@pytest.mark.parametrize(
    ("launcher", "env"),
    [
        ("pytorch", SLURM_STEP | TORCHRUN),
        ("pytorch", SLURM_BATCH | TORCHRUN),
        ("pytorch", OPEN_MPI | TORCHRUN),
        ("mpi", SLURM_ALLOCATION | OPEN_MPI),
        ("mpi", SLURM_STEP | OPEN_MPI),  # mpirun has srun start its daemons, and hands on what srun told them
        ("mpi", SLURM_NARROW_STEP | MPICH),
        ("mpi", SLURM_BATCH | MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}),
        ("mpi", SLURM_STEP | {"PMI_RANK": "2", "PMI_SIZE": "6"}),  # the proxies' rank, by chance
        ("mpi", SLURM_STEP | BARE_PMIX),
    ],
)
def test_the_innermost_launcher_counts(launcher: str, env: Environment) -> None:
    assert infer_launcher(env) == launcher


@pytest.mark.parametrize(
    "env", [SLURM_BATCH, SLURM_BATCH_WITHIN_STEP, SLURM_ALLOCATION, SLURM_INTERACTIVE_STEP, SLURM_PTY]
)
def test_a_plain_python_does_not_wait_for_the_tasks_of_an_allocation(env: Environment) -> None:
    assert infer_launcher(env) == "none"


@pytest.mark.parametrize(
    ("env", "topology"),
    [
        (TORCHRUN, Topology("pytorch", 3, 4, 1, 2, 1, 2, "node0", 29500, restart_count=2)),
        (TORCHRUN_UNEVEN, Topology("pytorch", 2, 3, 0, 1, 1, 2, "node0", 29500, restart_count=2)),
        (TORCHRUN_STANDALONE, Topology("pytorch", 1, 2, 1, 2, 0, 1, "localhost", 42571, agent_store=True)),
        (SLURM_STEP | TORCHRUN_STANDALONE, Topology("pytorch", 1, 2, 1, 2, 0, 1, "localhost", 42571, agent_store=True)),
        (SLURM_STEP, Topology("slurm", 2, 3, 0, 1, 1, 2, "n01")),
        (SLURM_NARROW_STEP, Topology("slurm", 1, 2, 1, 2, 0, 1, "n03")),
        (SLURM_CYCLIC_STEP, Topology("slurm", 1, 4, 0, 2, 1, 2, "n01")),
        (
            SLURM_STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"},
            Topology("slurm", 2, 3, 0, 1, 1, 2, "10.0.0.1", 7),
        ),
        (SLURM_STEP | {"SLURM_RESTART_COUNT": "1"}, Topology("slurm", 2, 3, 0, 1, 1, 2, "n01", restart_count=1)),
        (SLURM_STEP | {"SLURM_NTASKS": "9"}, Topology("slurm", 2, 3, 0, 1, 1, 2, "n01")),  # srun --preserve-env
        (SLURM_PTY, Topology("slurm", 0, 2, 0, 2, 0, 1, "n03")),  # the user says that it is a task
        (SLURM_INTERACTIVE_STEP, Topology("slurm", 0, 1, 0, 1, 0, 1, "n1")),
        (OPEN_MPI, Topology("mpi", 1, 2, 1, 2, 0, 1)),
        (OPEN_MPI_5, Topology("mpi", 5, 6, 1, 2, 2, 3)),
        (OPEN_MPI_5 | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}, Topology("mpi", 5, 6, 1, 2, 1, 3)),
        (MPICH, Topology("mpi", 3, 4, 1, 2, 1, 2)),
        (SLURM_STEP | MPICH, Topology("mpi", 3, 4, 1, 2, 1, 2)),
        (BARE_PMI, Topology("mpi", 1, 2, 1, 2, 0, 1)),
        (BARE_PMIX, Topology("mpi", 1, 2, 1, 2, 0, 1)),
        (
            BARE_PMIX | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node0"},
            Topology("mpi", 1, 2, 0, 1, 1, 2, "node0"),
        ),
        (TORCHRUN | SLURM_STEP | OPEN_MPI, Topology("none")),  # the argument beats the environment
    ],
)
def test_topology(env: Environment, topology: Topology) -> None:
    assert replace(read_topology(env, topology.launcher), job_key="") == topology


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (hand_set(0, 1), (0, 1, 0, 1)),
        (hand_set(0, 1, MASTER_ADDR="node0"), (0, 1, 0, 1)),
        (hand_set(1, 2), (1, 2, 0, 1)),
        (hand_set(1, 2, MASTER_ADDR="127.0.0.1"), (1, 2, 0, 1)),
        (hand_set(1, 2, MASTER_ADDR="localhost", LOCAL_RANK=1), (1, 2, 0, 1)),
        (hand_set(1, 2, MASTER_ADDR="::1"), (1, 2, 0, 1)),
        (hand_set(1, 2, MASTER_ADDR="node0", GROUP_WORLD_SIZE=1), (1, 2, 0, 1)),
        (hand_set(5, 6, MASTER_ADDR="node0", LOCAL_WORLD_SIZE=3), (2, 3, 1, 2)),
        (hand_set(5, 6, MASTER_ADDR="node0", LOCAL_WORLD_SIZE=3, LOCAL_RANK=2), (2, 3, 1, 2)),
    ],
)
def test_what_ranks_set_by_hand_leave_out(env: Environment, place: tuple[int, ...]) -> None:
    topology = read_topology(env, "pytorch")
    assert (topology.local_rank, topology.local_size, topology.node_rank, topology.num_nodes) == place


@pytest.mark.parametrize(
    ("launcher", "env", "message"),
    [
        ("torchrun", TORCHRUN, "`launcher` must be one of 'pytorch', 'slurm', 'mpi', 'none', but is 'torchrun'"),
        ("slrum", SLURM_STEP, "'slrum': did you mean `slurm`?"),
        # Missing.
        ("pytorch", {}, "RANK must be set for launcher 'pytorch', but is missing. Start the ranks with torchrun"),
        ("pytorch", SLURM_STEP, "RANK must be set for launcher 'pytorch'"),
        ("pytorch", {"RANK": "3"}, "WORLD_SIZE must be set where RANK is, 3, but is missing"),
        ("pytorch", {"WORLD_SIZE": "3"}, "RANK must be set for launcher 'pytorch', since WORLD_SIZE is, to '3', but"),
        ("slurm", TORCHRUN, "SLURM_PROCID must be set for launcher 'slurm', but is missing. Start the ranks with srun"),
        (
            "mpi",
            TORCHRUN,
            "OMPI_COMM_WORLD_RANK or PMI_RANK or PMIX_RANK must be set for launcher 'mpi', but is missing. "
            "Start the ranks with mpirun",
        ),
        ("mpi", without(BARE_PMIX, "WORLD_SIZE"), "WORLD_SIZE must be set where PMIX_RANK is, 1"),
        (
            "pytorch",
            hand_set(1, 2, MASTER_ADDR="node0"),
            "LOCAL_WORLD_SIZE must be set, because nothing says how many of the 2 ranks run on this node. "
            "Export LOCAL_RANK and LOCAL_WORLD_SIZE",
        ),
        ("pytorch", hand_set(1, 2, GROUP_WORLD_SIZE=2), "LOCAL_WORLD_SIZE must be set"),
        # No numbers.
        ("pytorch", TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE must be a whole number, 0 or more, but is 'four'"),
        ("pytorch", TORCHRUN | {"RANK": "-1"}, "RANK must be a whole number, 0 or more, but is '-1'"),
        ("pytorch", TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, 0 or more, but is ''"),
        ("pytorch", TORCHRUN | {"RANK": "\u0663"}, "RANK must be a whole number"),
        ("pytorch", TORCHRUN | {"RANK": "1" * 5000}, "RANK must be a whole number"),
        ("pytorch", TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535, but is 0"),
        ("pytorch", TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT must be from 1 to 65535, but is 65536"),
        (
            "slurm",
            SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,x"},
            "SLURM_STEP_TASKS_PER_NODE must have Slurm's format",
        ),
        (
            "slurm",
            SLURM_STEP | {"SLURM_STEP_NODELIST": "n[1-"},
            "SLURM_STEP_NODELIST must have Slurm's format, but 'n[1-'",
        ),
        # Out of bounds.
        (
            "pytorch",
            TORCHRUN | {"RANK": "4"},
            "RANK must be below WORLD_SIZE, 4, but is 4 (rank 4 of 4). Start the ranks",
        ),
        ("pytorch", TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1, but is 0"),
        (
            "pytorch",
            TORCHRUN | {"LOCAL_RANK": "2"},
            "LOCAL_RANK must be below LOCAL_WORLD_SIZE, 2, but is 2 (rank 3 of 4)",
        ),
        ("pytorch", TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE must fit WORLD_SIZE, 4 on 2 nodes"),
        ("pytorch", TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE must fit WORLD_SIZE, 4 on 2 nodes"),
        ("pytorch", hand_set(0, 2, LOCAL_WORLD_SIZE=3), "LOCAL_WORLD_SIZE must fit WORLD_SIZE, 2, but is 3"),
        (
            "pytorch",
            TORCHRUN_STANDALONE | {"WORLD_SIZE": "4"},
            "LOCAL_WORLD_SIZE must fit WORLD_SIZE, 4 on 1 nodes (GROUP_WORLD_SIZE), but is 2",
        ),
        ("pytorch", TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK must be below GROUP_WORLD_SIZE, 2, but is 2"),
        (
            "pytorch",
            hand_set(3, 4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_RANK=2),
            "GROUP_RANK must be below the number of nodes (4 ranks, 2 on each), 2, but is 2 (rank 3 of 4)",
        ),
        (
            "pytorch",
            hand_set(0, 2, LOCAL_RANK=2),
            "LOCAL_RANK must be below the number of ranks on this node, 2, but is 2",
        ),
        ("slurm", SLURM_STEP | {"SLURM_PROCID": "3"}, "SLURM_PROCID must be below SLURM_STEP_NUM_TASKS, 3, but is 3"),
        (
            "slurm",
            SLURM_STEP | {"SLURM_LOCALID": "1"},
            "SLURM_LOCALID must be below the count for this node in SLURM_STEP_TASKS_PER_NODE, 1, but is 1",
        ),
        (
            "slurm",
            SLURM_STEP | {"SLURM_NODEID": "2"},
            "SLURM_NODEID must be below the number of nodes in SLURM_STEP_TASKS_PER_NODE, 2, but is 2",
        ),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK must be below OMPI_COMM_WORLD_SIZE, 2"),
        ("mpi", MPICH | {"MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID must be below MPI_LOCALNRANKS, 2, but is 2"),
        # At odds with each other.
        (
            "slurm",
            SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "2(x2)"},
            "SLURM_STEP_TASKS_PER_NODE must add up to SLURM_STEP_NUM_TASKS, 3, but is '2(x2)', which makes 4",
        ),
        (
            "slurm",
            SLURM_BATCH | {"SLURM_TASKS_PER_NODE": "2"},
            "SLURM_TASKS_PER_NODE must add up to SLURM_NTASKS, 4, but is '2', which makes 2",
        ),
        (
            "slurm",
            SLURM_STEP | {"SLURM_STEP_NUM_NODES": "3"},
            "SLURM_STEP_TASKS_PER_NODE must be for as many nodes as SLURM_STEP_NUM_NODES, 3, but is '2,1'",
        ),
        (
            "slurm",
            SLURM_STEP | TORCHRUN,
            "RANK must be 2 for launcher 'slurm', as SLURM_PROCID says, but is 3 (rank 2 of 3). "
            "If torchrun started the ranks, use launcher 'pytorch'; else unset RANK",
        ),
        (
            "slurm",
            SLURM_STEP | {"WORLD_SIZE": "4"},
            "WORLD_SIZE must be 3 for launcher 'slurm', as SLURM_STEP_NUM_TASKS",
        ),
        ("slurm", SLURM_STEP | {"LOCAL_RANK": "1"}, "LOCAL_RANK must be 0 for launcher 'slurm', as SLURM_LOCALID says"),
        ("mpi", OPEN_MPI | {"RANK": "0"}, "RANK must be 1 for launcher 'mpi', as OMPI_COMM_WORLD_RANK says, but is 0"),
        # Tasks that never come.
        ("slurm", SLURM_BATCH, "SLURM_NTASKS must be 1 outside of a step of srun, but is 4"),
        ("slurm", SLURM_BATCH_WITHIN_STEP, "SLURM_STEP_NUM_TASKS must be 1 outside of a step of srun, but is 2"),
        ("slurm", SLURM_ALLOCATION, "SLURM_PROCID must be set"),
        # More than one answer: which node is this?
        (
            "pytorch",
            {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            "LOCAL_RANK must be set where GROUP_RANK says which node this is: ranks may be numbered across 2 nodes",
        ),
        (
            "pytorch",
            {"RANK": "0", "WORLD_SIZE": "10", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "2"},
            "LOCAL_WORLD_SIZE must divide WORLD_SIZE, 10, evenly over 2 nodes (GROUP_WORLD_SIZE) where nothing says",
        ),
        (
            "mpi",
            OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "7"},
            "OMPI_COMM_WORLD_LOCAL_SIZE must divide OMPI_COMM_WORLD_SIZE, 7, where nothing says which node this is",
        ),
        (
            "mpi",
            OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},  # mpirun --map-by node
            "OMPI_COMM_WORLD_LOCAL_RANK must be 1 where ranks fill one node after the other, 2 each, but is 0",
        ),
    ],
)
def test_contradictions(launcher: str, env: Environment, message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        read_topology(env, launcher)


def test_a_topology_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="must be below"):
        read_topology(hand_set(2, 2), "pytorch")


def test_a_topology_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        read_topology({}, "none").rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("launcher", "env", "another_rank", "another_job"),
    [
        (
            "slurm",
            SLURM_STEP,
            {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1"},
            {"SLURM_STEP_ID": "1"},
        ),
        ("slurm", SLURM_STEP, {}, {"SLURM_JOB_ID": "8"}),
        (
            "mpi",
            OPEN_MPI,
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"},
            {"OMPI_MCA_orte_hnp_uri": "1306853376.0;tcp://127.0.0.1:54552"},
        ),
        (
            "mpi",
            OPEN_MPI_5,
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "PMIX_RANK": "1",
                "PMIX_SERVER_URI41": "prterun-node0-4711@0.1;tcp4://10.0.0.1:1",
            },
            {"PMIX_NAMESPACE": "prterun-node0-4711@2"},
        ),
        ("mpi", BARE_PMI, {"PMI_RANK": "0", "PMI_FD": "11"}, {"PMI_JOBID": "8.1"}),
    ],
)
def test_job_key_is_shared_by_the_ranks_of_one_job_only(
    launcher: str, env: Environment, another_rank: Environment, another_job: Environment
) -> None:
    key = read_topology(env, launcher).job_key
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert read_topology(env | another_rank, launcher).job_key == key
    assert read_topology(env | another_job, launcher).job_key != key


@pytest.mark.parametrize(("launcher", "env"), [("none", {}), ("pytorch", TORCHRUN), ("mpi", MPICH)])
def test_no_job_key_where_nothing_identifies_the_job(launcher: str, env: Environment) -> None:
    assert read_topology(env, launcher).job_key == ""


node_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(node_sizes)
def test_slurm_places_every_rank_once(sizes: list[int]) -> None:
    world_size, nodes = sum(sizes), len(sizes)
    tasks = ",".join(map(str, sizes))
    shared = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
    }
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    for rank, (node, local) in enumerate(places):
        env = shared | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        assert infer_launcher(env) == "slurm"
        assert read_topology(env, "slurm") == Topology(
            "slurm",
            rank,
            world_size,
            local,
            sizes[node],
            node,
            nodes,
            "n1",
            job_key=read_topology(env, "slurm").job_key,
        )


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from(["OMPI_COMM_WORLD", "PMI"]))
def test_mpi_fills_one_node_after_the_other(nodes: int, size: int, dialect: str) -> None:
    local = (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        if dialect == "PMI"
        else (f"{dialect}_LOCAL_RANK", f"{dialect}_LOCAL_SIZE")
    )
    for rank in range(nodes * size):
        numbers = (rank, nodes * size, rank % size, size)
        env = {
            name: str(value)
            for name, value in zip((f"{dialect}_RANK", f"{dialect}_SIZE", *local), numbers, strict=True)
        }
        assert read_topology(env, "mpi") == Topology("mpi", *numbers, rank // size, nodes)


small = st.integers(-1, 5).map(str) | st.sampled_from(["", "x"])


@given(
    st.sampled_from([TORCHRUN, SLURM_STEP, SLURM_BATCH, OPEN_MPI, MPICH, BARE_PMIX, {}]),
    st.dictionaries(
        st.sampled_from([*hand_set(0, 0, LOCAL_RANK=0, LOCAL_WORLD_SIZE=0, GROUP_RANK=0), *SLURM_STEP]), small
    ),
    st.sampled_from(["pytorch", "slurm", "mpi"]),
)
def test_any_environment_is_a_sound_topology_or_an_error(env: Environment, changes: Environment, launcher: str) -> None:
    try:
        topology = read_topology(env | changes, launcher)
    except TopologyError:
        return
    assert 0 <= topology.rank < topology.world_size
    assert 0 <= topology.local_rank < topology.local_size <= topology.world_size
    assert 0 <= topology.node_rank < topology.num_nodes <= topology.world_size
    assert (topology.num_nodes == 1) == (topology.local_size == topology.world_size)
