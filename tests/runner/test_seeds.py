"""Which random numbers are the same on all ranks, and which are not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split

from lockstep import Runner, Session
from lockstep.dist import all_gather_object, get_rank
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.runner.seeds import set_randomness
from lockstep.strategy import FSDPStrategy
from lockstep.testing import ranks

from ..runs import StopAfter


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Shows the number of a sample, and what is drawn where it is made."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.rand(1)


class Net(nn.Module):
    """Notes its batches and what is drawn beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 8), nn.Linear(8, 1)
        self.seen: dict[str, list[Any]] = {"samples": [], "made": [], "mask": [], "python": [], "numpy": []}

    def forward(self, samples: Tensor, made: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones(16), 0.5)
        drawn = [samples.tolist(), made.tolist(), mask.tolist(), random.random(), np.random.rand()]
        for values, value in zip(self.seen.values(), drawn, strict=True):
            values.append(value)
        return self.second(self.first(samples)).mean()


def train(
    work_dir: Path, different: bool | None, workers: int = 0, epochs: int = 1, **options: Any
) -> list[dict[str, list[Any]]]:
    """Return what each rank has seen."""
    model = Net()
    randomness = {"seed": 3} if different is None else {"seed": 3, "diff_rank_seed": different}
    context = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    runner = Runner(
        options.pop("model", model),
        work_dir,
        train_dataloader=options.pop("train_dataloader", None) or {"dataset": Drawing(), "batch_size": 2, **context},
        train_cfg={"max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-3}},
        randomness=randomness,
        visualizer=[],
        **options,
    )
    runner.train()
    return all_gather_object(model.seen)


@ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("different", [None, True])
def test_dropout_numpy_and_python_differ_between_ranks_by_default(different: bool | None, workers: int, tmp_path: Path):
    alike, apart = train(tmp_path, False, workers), train(tmp_path, different, workers)
    for kind in ("mask", "python", "numpy"):
        assert alike[0][kind] == alike[1][kind]
        assert apart[0][kind] != apart[1][kind]
    assert (alike[0]["made"] == alike[1]["made"]) == (workers == 0)
    assert apart[0]["made"] != apart[1]["made"]
    assert [seen["samples"] for seen in alike] == [seen["samples"] for seen in apart]
    assert apart == train(tmp_path, different, workers)


@ranks(1, 2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["config", "seeded loader"])
def test_each_sample_of_each_epoch_is_augmented_anew(kind: str, workers: int, tmp_path: Path):
    loader = None
    if kind == "seeded loader":  # as torch's page on reproducibility has it
        seeded = torch.Generator().manual_seed(0)
        context = {"multiprocessing_context": "fork"} if workers else {}  # others import torch in each worker
        loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=workers, generator=seeded, **context)
    seen = train(tmp_path, None, workers, epochs=3, train_dataloader=loader)
    made = [value for rank in seen for batch in rank["made"] for (value,) in batch]
    assert len(set(made)) == len(made) == 48


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_differ_under_each_strategy(strategy: str, tmp_path: Path):
    seen = train(tmp_path, None, strategy=strategy)
    for kind in ("samples", "mask", "python", "numpy"):
        assert seen[0][kind] != seen[1][kind]


@ranks(2)
def test_model_data_and_hooks_are_built_from_the_same_numbers(tmp_path: Path):
    drawn: list[float] = []

    class Draws(Hook):
        def before_train(self, runner: Any) -> None:
            drawn.append(torch.rand(()).item())

    def build() -> nn.Module:
        drawn.append(torch.rand(()).item())
        return Net()

    train(tmp_path, None, model=build, custom_hooks=[Draws()])
    first, second = all_gather_object(drawn)
    assert first == second
    assert len(first) == 2


@ranks(1, 2)
def test_one_process_and_the_first_rank_go_on_with_the_numbers_of_the_building(tmp_path: Path):
    assert train(tmp_path, None)[0]["mask"] == train(tmp_path, False)[0]["mask"]


@ranks(2)
def test_a_session_draws_alike_until_its_first_iteration(tmp_path: Path):
    session = Session(tmp_path, randomness={"seed": 3}, visualizer=[], log_level="ERROR")
    parts = [part.indices for part in random_split(Drawing(), [12, 4])]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(Drawing(), batch_size=4))
    noise = []
    for _ in session.epochs(1):
        for samples, _ in loader:
            noise.append(torch.randn(3).tolist())
            session.step(model(samples).mean())
    first, second = all_gather_object((parts, noise))
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("given", ["randomness", "resume", "load_from", "resume_options"])
@ranks(2)
def test_what_all_ranks_decide_alike_must_be_given_alike(given: str, tmp_path: Path):
    values = {
        "randomness": {"seed": get_rank()},
        "resume": get_rank() == 0,
        "load_from": tmp_path if get_rank() else None,
        "resume_options": ("config", "checkpoint")[get_rank()],
    }
    with pytest.raises(ConfigError, match=rf"^`{given}.* must be the same on all ranks, but is "):
        Runner(Net(), tmp_path, train_dataloader=DataLoader(Drawing()), visualizer=[], **{given: values[given]}).train()


@ranks(2)
def test_a_session_must_have_one_seed(tmp_path: Path):
    session = Session(tmp_path, randomness={"seed": get_rank()}, visualizer=[])
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"^`randomness\['seed'\]` .* is 0 on rank 0, 1 on rank 1\."):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Drawing()))


@pytest.mark.parametrize("seed", ["a", 3.7, float("inf"), 2**64])
def test_a_seed_that_is_no_whole_number_is_told(seed: Any):
    with pytest.raises(
        ConfigError, match=rf"`randomness\['seed'\]` must be a whole number of 64 bits or None, but is {seed!r}"
    ):
        set_randomness({"seed": seed})


def test_a_seed_may_be_any_that_torch_draws():
    assert set_randomness({"seed": 2**64 - 1}) == 2**64 - 1


class Count(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"count": len(results)}


@ranks(2)
def test_a_validation_by_itself_draws_other_numbers_on_each_rank(tmp_path: Path):
    model, loader = Net(), DataLoader(Drawing(), batch_size=4)
    Runner(model, tmp_path, val_dataloader=loader, val_evaluator=Count(), randomness={"seed": 3}).val()
    first, second = all_gather_object(model.seen["python"])
    assert first != second


@ranks(4)
@pytest.mark.parametrize("different", [None, True])
def test_ranks_that_compute_together_draw_the_same(different: bool | None, tmp_path: Path):
    plan = {"degree": 2, "plan": {"first": "colwise", "second": "rowwise"}}
    seen = train(tmp_path, different, strategy=FSDPStrategy(tensor_parallel=plan))
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    for kind in ("samples", "mask", "python", "numpy"):
        assert seen[0][kind] != seen[2][kind]


@ranks(2)
@pytest.mark.parametrize("different", [None, True])
def test_each_rank_goes_on_with_its_own_numbers(different: bool | None, tmp_path: Path):
    whole = train(tmp_path / "whole", different)
    every = {"default_hooks": {"checkpoint": {"by_epoch": False, "interval": 1}}}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "work", different, custom_hooks=[StopAfter(2)], **every)
    resumed = train(tmp_path / "work", different, resume=True, **every)
    assert len(whole[0]["mask"]) == 4
    for rank in (0, 1):
        assert resumed[rank] == {kind: values[2:] for kind, values in whole[rank].items()}


def test_what_hooks_of_a_validation_draw_is_not_missing_in_the_training(tmp_path: Path):
    class Draws(Hook):
        def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
            drawn.append((torch.randn(7), random.random(), np.random.rand()))

    drawn: list[Any] = []
    validated = {"val_dataloader": {"dataset": Drawing(), "batch_size": 4}}
    plain, drawing = [train(tmp_path, None, epochs=2, custom_hooks=hooks, **validated) for hooks in ([], [Draws()])]
    assert plain == drawing
    assert len(drawn) == 2
