"""What a user gets by importing, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import lockstep
from lockstep import dist

# Where users find things; the others are behind the command line.
ROOMS = (
    "checkpoint",
    "config",
    "dataset",
    "device",
    "dist",
    "errors",
    "evaluator",
    "hooks",
    "model",
    "optim",
    "registry",
    "runner",
    "session",
    "strategy",
    "testing",
    "tree",
    "visualization",
    "weights",
)

# The public interface of lockstep.dist, by subject.
START = {"init_dist", "infer_launcher", "init_local_group", "destroy_dist"}
QUERIES = {
    "get_backend",
    "get_default_group",
    "get_dist_info",
    "get_local_group",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_num_nodes",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
}
GUARDS = {"local_main_process_first", "main_process_first", "master_only", "run_on_main"}
TENSORS = {
    "ReduceOp",
    "Handle",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
}
OBJECTS = {"all_gather_object", "broadcast_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
NESTED = {
    "all_gather_tree",
    "all_reduce_dict",
    "all_reduce_params",
    "all_reduce_tree",
    "broadcast_tree",
    "sync_random_seed",
}
RESULTS = {"collect_results", "collect_results_cpu", "collect_results_gpu"}
DEVICES = {"cast_data_device", "get_comm_device", "get_data_device", "get_device"}
AGREEMENT = {"CollectiveMismatchError", "CollectiveTimeoutError", "PeerError", "check_collectives"}


STATEMENTS = (
    "pass", "import lockstep", "import lockstep.dist",
    "import lockstep.runner, lockstep.hooks, lockstep.optim, lockstep.evaluator",
)  # fmt: skip


@pytest.fixture(scope="module")
def modules() -> list[set[str]]:
    """The modules that a fresh interpreter has imported after each of the statements."""
    script = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in STATEMENTS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_importing_lockstep_imports_neither_torch_nor_anything_else_from_outside(modules: list[set[str]]) -> None:
    added = packages(modules[1]) - packages(modules[0])
    assert "lockstep" in added
    assert added <= {"lockstep", *sys.stdlib_module_names}


def test_importing_dist_imports_no_package_that_only_some_need(modules: list[set[str]]) -> None:
    imported = packages(modules[2])
    assert "torch" in imported
    assert imported & {"typer", "rich", "yaml", "sklearn", "deepspeed", "colossalai", "pytest"} == set()


def test_importing_the_runner_and_the_hooks_does_not_import_what_only_sharded_models_need(
    modules: list[set[str]],
) -> None:
    assert modules[3] & {"torch.distributed.tensor", "torch.distributed.fsdp"} == set()


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_name_of_lockstep_is_there(name: str) -> None:
    assert getattr(lockstep, name) is not None
    assert name in dir(lockstep)


@pytest.mark.parametrize("name", ROOMS)
def test_every_room_is_imported_at_first_use(name: str) -> None:
    # Asked directly, since a room that somebody has imported before is there anyway.
    assert lockstep.__getattr__(name) is import_module(f"lockstep.{name}")
    assert name in dir(lockstep)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'nonsense'"):
        lockstep.nonsense  # noqa: B018


def test_dist_offers_exactly_what_it_promises() -> None:
    promised = START | QUERIES | GUARDS | TENSORS | OBJECTS | NESTED | RESULTS | DEVICES | AGREEMENT
    assert set(dist.__all__) == promised
    assert dist.__all__ == sorted(dist.__all__)


@pytest.mark.parametrize("name", dist.__all__)
def test_every_name_of_dist_is_documented(name: str) -> None:
    assert getattr(dist, name).__doc__
