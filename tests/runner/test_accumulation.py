"""Windows of accumulation where an iteration makes several backward passes, or only some iterations make one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import StopAfter
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_world_size
from lockstep.hooks import Hook
from lockstep.model import BaseModel
from lockstep.optim import OptimWrapper
from lockstep.testing import ranks

BATCH = 4
X = torch.randn(7 * BATCH, 3, generator=torch.Generator().manual_seed(2))
STRATEGIES = ["single", "fsdp"]  # on two ranks, the first is DDP


def loader(iterations: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[: iterations * BATCH]), batch_size=BATCH // get_world_size())


def two_losses(model: Any, x: Tensor) -> list[Any]:
    """Return functions of two losses of one batch."""
    return [lambda: model(x).square().mean(), lambda: (model(x) - 1).abs().mean()]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def by_hand(iterations: int, counts: int, made: Any = lambda iteration: (0, 1), epochs: int = 1) -> tuple[Tensor, int]:
    """Return the weight after a loop in one process, which averages each window, and the number of updates."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes = [(i, which) for i in range(iterations) for which in made(i)]
    windows = [passes[start : start + counts] for start in range(0, len(passes), counts)] * epochs
    updates = 0
    for window in windows:
        for iteration, which in window:
            losses = two_losses(model, X[iteration * BATCH : (iteration + 1) * BATCH])
            (losses[which]() / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
    return model.weight.detach(), updates


class TwoUpdates(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear = network()

    def forward(self, x: Tensor, mode: str = "tensor") -> Tensor:
        return self.linear(x)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        for loss_of in two_losses(self, data[0]):
            with optim_wrapper.optim_context(self):
                loss = loss_of()
            optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class CountUpdates(Hook):
    """Counts the steps of the optimizer, in this run."""

    def before_train(self, runner: Any) -> None:
        self.count = 0
        runner.optim_wrapper.optimizer.register_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def weight_of(runner: Any) -> Tensor:
    state = runner.run.strategy.model_state()
    (weight,) = (value for name, value in state.items() if name.endswith("weight"))
    return getattr(weight, "full_tensor", lambda: weight)().detach().clone()


def train(work_dir: Path, iterations: int, counts: int, strategy: str, **changes: Any) -> tuple[Tensor, int]:
    updates = CountUpdates()
    hooks = [updates, *changes.pop("hooks", [])]
    runner = Runner(
        changes.pop("model", TwoUpdates)(),
        work_dir,
        train_dataloader=loader(iterations),
        optim_wrapper={
            "optimizer": {"type": "SGD", "lr": 0.1},
            "accumulative_counts": counts,
            **changes.pop("optim", {}),
        },
        strategy=strategy,
        custom_hooks=hooks,
        randomness={"seed": 0},
        **{"train_cfg": {"max_epochs": 1}, "log_level": "ERROR", **changes},
    )
    runner.train()
    return weight_of(runner), updates.count


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("iterations", "counts"), [(6, 4), (5, 4), (7, 3), (2, 4), (3, 1)])
@ranks(1, 2)
def test_a_step_with_two_updates_averages_every_window(tmp_path, iterations, counts, strategy):
    if strategy == "single" and get_world_size() > 1:
        strategy = "ddp"
    weight, updates = train(tmp_path, iterations, counts, strategy)
    expected, expected_updates = by_hand(iterations, counts)
    assert updates == expected_updates
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("iterations", "counts"), [(6, 4), (5, 4)])
@ranks(1, 2)
def test_two_steps_of_a_session_average_every_window(tmp_path, iterations, counts, strategy):
    if strategy == "single" and get_world_size() > 1:
        strategy = "ddp"
    session = Session(
        tmp_path, strategy=strategy, accumulative_counts=counts, randomness={"seed": 0}, log_level="ERROR"
    )
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(iterations))
    updates = 0
    for _ in session.epochs(1):
        for (x,) in batches:
            for loss_of in two_losses(model, x):
                session.step(loss_of())
                updates += session.is_update
    expected, expected_updates = by_hand(iterations, counts)
    assert updates == expected_updates
    torch.testing.assert_close(weight_of(session), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stop_after", [2, 4])
@ranks(1, 2)
def test_a_resumed_run_goes_on_in_the_same_windows(tmp_path, stop_after):
    changes = {"default_hooks": {"checkpoint": {"by_epoch": False, "interval": stop_after}}}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 5, 4, "ddp", hooks=[StopAfter(stop_after)], **changes)
    weight, updates = train(tmp_path, 5, 4, "ddp", resume=True)
    expected, expected_updates = by_hand(5, 4)
    assert updates == expected_updates - stop_after // 2
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


def test_another_size_of_windows_begins_with_a_new_one(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        train(
            tmp_path, 5, 4, "single", hooks=[StopAfter(2)],
            default_hooks={"checkpoint": {"by_epoch": False, "interval": 2}},
        )  # fmt: skip
    _, updates = train(tmp_path, 5, 3, "single", resume=True, log_level="WARNING")
    assert updates == 2  # of the 6 backward passes that are left
    logs = "".join(path.read_text() for path in tmp_path.glob("*/log.txt"))
    assert "accumulative_counts is 3 now, and was 4: windows begin here" in logs
    assert "inside an accumulation window" not in capsys.readouterr().out


class Turns(TwoUpdates):
    """Trains only in every third iteration."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.calls = getattr(self, "calls", 0) + 1
        return super().train_step(data, optim_wrapper) if self.calls % 3 == 1 else {}


@pytest.mark.parametrize(("iterations", "updates", "said"), [(7, 2, False), (6, 1, True)])
def test_iterations_without_a_backward_pass_do_not_count(tmp_path, capsys, iterations, updates, said):
    weight, made = train(tmp_path, iterations, 3, "single", log_level="WARNING", model=Turns)
    assert made == updates
    assert ("its last 1 backward passes are not used" in capsys.readouterr().out) == said
    if not said:
        torch.testing.assert_close(weight, by_hand(7, 3, lambda i: () if i % 3 else (0, 1))[0])


def test_the_steps_of_an_update_by_hand_average_a_short_window():
    model = network()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), 4)
    wrapper.initialize_count_status(model, 0, 3)
    for index, samples in enumerate([2, 4, 1]):
        wrapper.begin_iteration(index)
        wrapper.count_samples(samples, samples)
        loss = model(X[:samples]).square().mean()
        wrapper.backward(wrapper.scale_loss(loss))
        if wrapper.should_update():
            wrapper.step()
            wrapper.zero_grad()
    other = network()
    squares = torch.cat([other(X[:samples]).square() for samples in [2, 4, 1]])
    squares.mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weight, other.weight)


ENDING_WITH_EPOCHS: dict[str, Any] = {"train_cfg": {"max_epochs": 3}, "optim": {"accumulate_across_epochs": False}}


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2)
def test_windows_that_end_with_epochs_leave_none_open_where_a_run_resumes(tmp_path, strategy):
    if strategy == "single" and get_world_size() > 1:
        strategy = "ddp"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 3, 4, strategy, hooks=[StopAfter(5)], **ENDING_WITH_EPOCHS)
    weight, updates = train(tmp_path, 3, 4, strategy, resume=True, **ENDING_WITH_EPOCHS)
    expected, expected_updates = by_hand(3, 4, epochs=3)
    assert (updates, expected_updates) == (4, 6)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


def test_a_session_ends_windows_with_epochs(tmp_path):
    session = Session(tmp_path, accumulative_counts=2, accumulate_across_epochs=False, log_level="WARNING")
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    updates = []
    for _ in session.epochs(2):
        for (x,) in batches:
            session.step(model(x).square().mean())
            updates.append(session.is_update)
    assert updates == [False, True, True] * 2
    expected, _ = by_hand(3, 2, lambda iteration: (0,), epochs=2)
    torch.testing.assert_close(weight_of(session), expected)
