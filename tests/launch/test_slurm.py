"""Under Slurm: a cluster of two nodes that is started here, with all its ways of starting processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.topology import Topology, infer_launcher, read_topology
from lockstep.topology.environ import first_host

from .jobs import (
    LOOPBACK,
    PYTHON,
    TRAIN_DIGITS,
    TWO_STEPS,
    check_digits,
    check_training,
    require,
    run_at_once,
)
from .slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.launchers, require("slurmctld", "slurmd", "srun", "munged", "mpirun", root=True)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def topologies(environments: list[dict[str, str]]) -> list[Topology]:
    read = [read_topology(env, infer_launcher(env)) for env in environments]
    return sorted(read, key=lambda topology: topology.rank)


def places(environments: list[dict[str, str]]) -> list[tuple[int, int, int, int]]:
    """Return, by rank: local rank, local size, node rank, number of nodes."""
    return [(t.local_rank, t.local_size, t.node_rank, t.num_nodes) for t in topologies(environments)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-N", "1", "-n", "2"], [(0, 2, 0, 1), (1, 2, 0, 1)]),
        (["-N", "2", "-n", "3"], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 1, 1, 2)]),
        (["-N", "2", "-n", "4", "--ntasks-per-node=2"], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        (["-N", "2", "-n", "3", "--distribution=cyclic"], [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]),
        (["-w", "n2", "-n", "2"], [(0, 2, 0, 1), (1, 2, 0, 1)]),
        (["-N", "1", "-n", "2", "--mpi=pmi2"], [(0, 2, 0, 1), (1, 2, 0, 1)]),
    ],
)
def test_tasks_of_srun(cluster: SlurmCluster, options: list[str], expected: list[tuple[int, ...]]) -> None:
    environments = cluster.environments(len(expected), "srun", *options)
    assert {infer_launcher(env) for env in environments} == {"slurm"}
    assert places(environments) == expected
    assert {t.master_addr for t in topologies(environments)} == {"n2" if "n2" in options else "n1"}
    assert len({t.job_key for t in topologies(environments)}) == 1


def test_every_step_has_a_job_key_of_its_own(cluster: SlurmCluster) -> None:
    steps = cluster.environments(2, "salloc", "-n", "1", "sh", "-c", 'srun "$0" && srun "$0"')
    assert len({t.job_key for t in topologies(steps)}) == 2


@pytest.mark.parametrize(
    "command",
    [
        ["sbatch", "-N", "2", "-n", "4"],
        ["sbatch", "-N", "2"],
        ["srun", "-n", "1", "sbatch", "-n", "4"],  # inherits the variables of a step that it does not belong to
        ["salloc", "-N", "2", "-n", "4"],
        ["salloc", "-N", "2", "-n", "4", "srun", "--interactive", "--preserve-env"],  # the shell on the first node
    ],
)
def test_a_plain_process_in_an_allocation_is_no_rank(cluster: SlurmCluster, command: list[str]) -> None:
    (env,) = cluster.environments(1, *command)
    assert infer_launcher(env) == "none"


def test_mpirun_in_an_allocation_is_mpi(cluster: SlurmCluster) -> None:
    environments = cluster.environments(2, "salloc", "-N", "1", "-n", "2", "mpirun", "--allow-run-as-root", "-n", "2")
    assert {infer_launcher(env) for env in environments} == {"mpi"}
    assert places(environments) == [(0, 2, 0, 1), (1, 2, 0, 1)]


# What Slurm 22.05 reads in the same way; it also lets pass what is broken.
names = st.from_regex(r"[a-z]{1,3}", fullmatch=True)
numbers = st.tuples(st.integers(0, 99), st.integers(1, 3), st.integers(0, 4))
brackets = st.lists(numbers, min_size=1, max_size=3).map(
    lambda ranges: f"[{','.join(f'{first:0{width}d}-{first + more}' for first, width, more in ranges)}]"
)
hostlists = st.lists(st.builds("".join, st.tuples(names, brackets | st.just("7"))), min_size=1, max_size=3).map(
    ",".join
)


@given(hostlists)
@settings(max_examples=25)
def test_hostlists_are_read_as_slurm_reads_them(cluster: SlurmCluster, text: str) -> None:
    ended = cluster.run("scontrol", "show", "hostnames", text)
    assert first_host(text) == ended.out.split()[0]


def test_two_jobs_on_one_node_at_once_train_apart_and_listen_on_loopback_alone(cluster: SlurmCluster) -> None:
    srun = ("srun", "-N", "1", "-n", "2", PYTHON, TWO_STEPS)
    for ended in run_at_once(srun, srun, env=cluster.env):
        check_training(ended, "slurm", [(0, 2, 0), (1, 2, 0)])
        assert [report["listening"] for report in ended.ranks] == [[LOOPBACK], [LOOPBACK]]


def test_two_nodes_train(cluster: SlurmCluster) -> None:
    ended = cluster.run("srun", "-N", "2", "-n", "4", "--ntasks-per-node=2", PYTHON, TWO_STEPS, MASTER_ADDR=LOOPBACK)
    check_training(ended, "slurm", [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)])


def test_a_batch_script_trains_on_uneven_nodes(cluster: SlurmCluster) -> None:
    ended = cluster.run_batch(f"MASTER_ADDR={LOOPBACK} srun {PYTHON} {TWO_STEPS}", "-N", "2", "-n", "3")
    check_training(ended, "slurm", [(0, 2, 0), (1, 2, 0), (0, 1, 1)])


def test_lockstep_train_joins_the_ranks_it_finds(cluster: SlurmCluster, tmp_path: Path) -> None:
    ended = cluster.run("srun", "-N", "1", "-n", "2", *TRAIN_DIGITS, "--work-dir", str(tmp_path))
    check_digits(ended, tmp_path)
    assert "joining the ranks found (slurm): 2" in ended.err


def test_a_contradiction_ends_the_job_at_once(cluster: SlurmCluster) -> None:
    ended = cluster.run("srun", "-N", "1", "-n", "2", PYTHON, TWO_STEPS, WORLD_SIZE="4")
    assert ended.code == 1
    assert "WORLD_SIZE must be 2 for launcher 'slurm', as SLURM_STEP_NUM_TASKS says, but is 4 (rank" in ended.err
