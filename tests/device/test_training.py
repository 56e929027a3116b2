"""Trainings on the simulated accelerator, in many ways at once, have the losses and weights of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.testing import run_ranks

from . import training
from .conftest import Start, launch
from .training import STRATEGIES

RUNS = [
    (size, name, precision)
    for size, names in STRATEGIES.items()
    for name, (_, precisions) in names.items()
    for precision in precisions
]


@pytest.fixture(scope="module")
def found(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank finds on the device, by number of ranks."""
    return {size: launch(start, tmp_path_factory.mktemp(f"on_{size}"), size, "trainings.py") for size in STRATEGIES}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """The same on the CPU."""
    return {size: run_ranks(size, training.train_all, tmp_path_factory.mktemp("cpu"), size) for size in STRATEGIES}


@pytest.mark.parametrize(("size", "name", "precision"), RUNS)
def test_a_training_has_the_losses_and_weights_of_the_cpu(
    found: Any, on_cpu: Any, size: int, name: str, precision: str
) -> None:
    error = 1e-5 if precision == "float32" else 0.01
    for rank, other in zip(found[size], on_cpu[size], strict=True):
        own, cpu = (one[f"{name}, {precision}"] for one in (rank, other))
        assert own["device"] == "sim"
        for what in ("losses", "weights", "average"):
            assert own[what] == pytest.approx(cpu[what], abs=error)
        assert [step for step, _ in own["records"]] == [step for step, _ in cpu["records"]]
        assert [loss for _, loss in own["records"]] == pytest.approx([loss for _, loss in cpu["records"]], abs=error)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loop_by_hand_has_the_losses_of_the_cpu(found: Any, on_cpu: Any, strategy: str) -> None:
    for rank, other in zip(found[2], on_cpu[2], strict=True):
        name = f"{strategy}, by hand"
        assert rank[name] == pytest.approx(other[name], abs=1e-5)


def test_an_average_on_the_cpu_waits_for_the_weights(found: Any) -> None:
    assert [rank["averaged"] for rank in found[2]] == [training.averaged("cpu")] * 2


def test_gradients_of_offloaded_shards_are_unscaled_by_what_has_arrived(found: Any) -> None:
    assert [rank["offloaded"] for rank in found[2]] == [training.offloaded("cpu")] * 2 == [[2.0, 2.0, 0.0]] * 2


def test_a_digest_of_the_device_is_read_beside_one_of_the_host(found: Any) -> None:
    assert [rank["digested"] for rank in found[2]] == [training.digested("cpu")] * 2


def test_copies_of_a_layer_are_compared_on_the_device(found: Any) -> None:
    assert [rank["trial"] for rank in found[2]] == [[0.0] * 4] * 2


def test_fsdp_moves_what_is_on_the_device_of_another_rank_and_what_it_ignores(found: Any) -> None:
    for rank, own in enumerate(found[2]):
        assert set(own["moved"]) == {f"sim:{rank}"}


def test_hooks_of_parameters_stay_where_a_device_needs_other_tensors(found: Any) -> None:
    assert [own["hooked"] for size in found for own in found[size]] == [[2.0, 1.0]] * sum(found)
