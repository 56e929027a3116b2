"""What a user is told who hands in a class, a Lightning module, a finished training, or a loop without steps."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.config import Config
from lockstep.dist import barrier, get_rank, get_world_size
from lockstep.errors import ConfigError, DivergenceError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.model import unwrap_model
from lockstep.registry import HOOKS, Registry
from lockstep.runner.arguments import RunnerArguments
from lockstep.runner.resume_from import out_dirs
from lockstep.testing import ranks

DATA = TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))
STEPLESS = "has ended without a call of session.step(loss)"
LIGHTNING = "a Runner does not call methods of Lit that a Lightning module has: "
COMPLETE = "nothing is left to train: the resumed training has completed"


class Lit(nn.Module):
    """What the model of a Lightning user has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2)


def train(folder: Path, model: Any = None, **options: Any) -> None:
    wrapper = {"optimizer": {"type": "SGD", "lr": 0.1}}
    options = {"loss": nn.MSELoss(), "train_cfg": {"max_epochs": 1}, "optim_wrapper": wrapper, **options}
    Runner(model or nn.Linear(2, 1), folder, **{"train_dataloader": loader(), **options}).train()


def log_of(folder: Path) -> str:
    return "".join(file.read_text() for file in sorted(folder.glob("*/log.txt")))


def complete_log_of(folder: Path) -> str:
    """Return what rank 0 has written; every rank calls it."""
    barrier()
    return log_of(folder)


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("optim_wrapper", {"optimizer": {"type": "AdamW1"}}),
        ("param_scheduler", {"type": "StepLRR", "step_size": 1}),
        ("custom_hooks", [{"type": "EMAHok"}]),
        ("default_hooks", {"checkpoint": {"type": "CheckpointHok"}}),
        ("val_evaluator", [{"type": "Acuracy"}]),
        ("visualizer", {"type": "LocalVisualiser"}),
        ("strategy", {"type": "ddpp"}),
        ("train_cfg", {"type": "EpochBasedTrainLop", "max_epochs": 1}),
    ],
)
def test_a_misspelt_type_names_the_argument_that_has_it(tmp_path, argument, wrong):
    with pytest.raises(KeyError, match="did you mean") as caught:
        train(tmp_path, val_dataloader=loader(), **{argument: wrong})
    assert f"while building `{argument}`" in caught.value.__notes__


def test_a_class_that_needs_arguments_is_no_model(tmp_path):
    with pytest.raises(TypeError, match=r"Linear.__init__\(\) missing 2 required positional arguments"):
        Runner(nn.Linear, tmp_path, train_dataloader=loader()).train()
    session = Session(tmp_path, log_level="ERROR")
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"Make a module of the class: Linear\(...\)"):
        session.prepare(nn.Linear, torch.optim.SGD(model.parameters(), lr=0.1), loader())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_function_that_builds_no_module_is_refused(tmp_path):
    scripted = torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"`model` must be a module of Python, but is a TopLevelTracedModule of torch"):
        Runner(scripted, tmp_path, train_dataloader=[torch.ones(2)]).train()
    with pytest.raises(TypeError, match=r"`model` must build a torch\.nn\.Module, but built 3"):
        Runner(lambda: 3, tmp_path, train_dataloader=[torch.ones(2)]).train()


def test_a_class_that_needs_none_is_a_function_that_returns_a_model(tmp_path):
    train(tmp_path, Lit)
    assert LIGHTNING not in log_of(tmp_path)  # a loss is given


@ranks(2)
def test_a_lightning_module_is_told_how_it_can_be_trained(tmp_path):
    with pytest.raises(TypeError, match="A model trains in one of three forms"):
        train(tmp_path / "runner", Lit(), loss=None)
    assert f"{LIGHTNING}training_step; see docs/side-by-side.md" in complete_log_of(tmp_path / "runner")
    session = Session(tmp_path / "session", log_level="ERROR")
    model = Lit()
    model, _, batches = session.prepare(model, model.configure_optimizers(), loader())
    before = model.linear.weight.detach().clone()
    for _ in session.epochs(1):
        for batch_idx, batch in enumerate(batches):
            session.step(model.training_step(batch, batch_idx))
    assert not torch.equal(before, model.linear.weight)
    assert LIGHTNING not in complete_log_of(tmp_path / "session")
    assert STEPLESS not in complete_log_of(tmp_path / "session")


@pytest.mark.parametrize("length", [{"max_epochs": 1}, {"by_epoch": False, "max_iters": 3}])
def test_a_resumed_training_that_is_complete_says_so(tmp_path, length):
    train(tmp_path, train_cfg=length)
    assert COMPLETE not in log_of(tmp_path)
    train(tmp_path, train_cfg=length, resume=True)
    assert log_of(tmp_path).count(COMPLETE) == 1


def test_a_resumed_training_that_is_to_be_shorter_says_so(tmp_path):
    train(tmp_path, train_cfg={"max_epochs": 2})
    train(tmp_path, train_cfg={"max_epochs": 1}, resume=True)
    assert f"{COMPLETE} 2 epochs, of 1 asked for" in log_of(tmp_path)


@ranks(1, 2)
def test_a_session_without_steps_warns_once(tmp_path):
    session = Session(tmp_path)
    model = nn.Linear(2, 1)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(3):
        for x, y in batches:
            nn.functional.mse_loss(model(x), y)
    assert complete_log_of(tmp_path).count(STEPLESS) == 1


def test_a_session_that_steps_in_some_iterations_alone_warns_once(tmp_path):
    session = Session(tmp_path)
    model = nn.Linear(2, 1)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(3):
        for index, (x, y) in enumerate(batches):
            loss = nn.functional.mse_loss(model(x), y)
            if (index + 1) % 2 == 0:  # as one accumulates by hand
                session.step(loss)
    assert log_of(tmp_path).count("2 of 4 iterations have made no call of session.step(loss)") == 1
    assert STEPLESS not in log_of(tmp_path)


def test_a_loop_that_makes_its_data_itself_may_step_in_some_iterations_alone(tmp_path):
    session = Session(tmp_path)
    model = nn.Linear(2, 1)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in session.iterations(4):  # as one that collects samples before each update
        if number % 2:
            session.step(model(torch.ones(1, 2)).mean())
    assert "have made no call of session.step(loss)" not in log_of(tmp_path)


class OnlyReturns(nn.Linear):
    """Returns its loss, as Lightning's training_step does, and leaves the step to whoever calls it."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self(data[0]), data[1])}


class StepsItself(OnlyReturns):
    """Updates its weights around the optim wrapper."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        returned = super().train_step(data, optim_wrapper)
        returned["loss"].backward()
        optim_wrapper.optimizer.step()
        optim_wrapper.optimizer.zero_grad()
        return returned


class WritesData(torch.optim.SGD):
    """Writes into `parameter.data`, as optimizers of older packages do, which no version of the parameter counts."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


def test_a_step_that_writes_the_data_of_parameters_around_the_optim_wrapper_trains(tmp_path):
    model = StepsItself(2, 1)
    before = model.weight.detach().clone()
    train(tmp_path, model, loss=None, optim_wrapper={"optimizer": WritesData(model.parameters(), lr=0.1)})
    assert not torch.equal(model.weight, before)


@ranks(1, 2)
def test_a_train_step_that_only_returns_its_loss_is_told(tmp_path):
    told = r"3 iterations have made no backward pass by the optim wrapper: a loss that `train_step` of %s only"
    train(tmp_path / "own", StepsItself(2, 1), loss=None, train_cfg={"max_epochs": 3})
    assert complete_log_of(tmp_path / "own").count(told % "StepsItself") == 1
    for length in ({"max_epochs": 2}, {"by_epoch": False, "max_iters": 3}):
        with pytest.raises(ConfigError, match=r"nothing is trained: \d iterations have made no backward pass"):
            train(tmp_path / "only", OnlyReturns(2, 1), loss=None, train_cfg=length)


def test_the_optimizer_of_a_lightning_module_is_told_beside_a_loss(tmp_path):
    train(tmp_path, Lit(), optim_wrapper=None)
    assert log_of(tmp_path).count(f"{LIGHTNING}configure_optimizers; see docs/side-by-side.md\n") == 1


class Loses(nn.Linear):
    """Trains as a Runner's model does, and has what Lightning would call beside it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(super().forward(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def optimizer_step(self, *args: Any) -> None: ...

    def on_after_backward(self) -> None: ...


class Steps(nn.Module):
    """Has no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def train_step(self, data: Any, optim_wrapper: Any) -> None:
        optim_wrapper.update_params(nn.functional.mse_loss(self.linear(data[0]), data[1]))


class TakesIndices(Steps):
    def val_step(self, batch: Any, batch_idx: int) -> None: ...


def test_what_lightning_would_call_beside_the_training_is_told(tmp_path):
    train(tmp_path, Loses(2, 1), loss=None, val_dataloader=loader())
    told = "on_after_backward, on_train_epoch_end, optimizer_step, validation_step; see docs/side-by-side.md"
    assert f"methods of Loses that a Lightning module has: {told}" in log_of(tmp_path)


@ranks(1, 2)
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Steps, r"^Steps must have a `forward`, or a `val_step` of its own, for `val_dataloader`, but has neither"),
        (TakesIndices, r"^`val_step` of TakesIndices must be val_step\(data\), but its parameters are \(batch: "),
    ],
)
def test_a_model_that_cannot_be_validated_is_refused_before_it_trains(tmp_path, model, says):
    with pytest.raises(ConfigError, match=rf"{says}.*\n\(rank \d of \d, after 0 iterations\)"):
        train(tmp_path, model(), loss=None, val_dataloader=loader())


def test_a_lightning_module_without_forward_is_told_what_to_give_it(tmp_path):
    class Bare(Steps):
        train_step = None

        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(
        ConfigError, match=r"Bare must have a `forward`.* methods that .*: training_step; see docs/side"
    ):
        train(tmp_path, Bare(), loss=None)


def test_the_stubs_of_a_lightning_module_are_no_steps_of_the_model(tmp_path):
    class Stubs(nn.Module):
        def test_step(self, *args: Any) -> None: ...

        def forward(self, *args: Any) -> None: ...

    for method in (Stubs.test_step, Stubs.forward):
        method.__module__ = "lightning.pytorch.core.module"

    class Module(Lit, Stubs): ...

    runner = Runner(Module(), tmp_path, train_dataloader=loader(), test_dataloader=loader(), loss=nn.MSELoss())
    runner.train()
    assert runner.test()["loss"] >= 0
    assert len(runner.predict(loader())) == len(DATA)
    with pytest.raises(ConfigError, match=r"Bare must have a `forward`, or a `train_step`"):
        train(tmp_path, type("Bare", (nn.Linear,), {"forward": Stubs.forward})(2, 1), loss=None)


@ranks(1, 2)
def test_a_step_without_a_backward_pass_of_the_session_is_refused(tmp_path):
    session = Session(tmp_path, log_level="ERROR")
    model = nn.Linear(2, 1)
    model, optimizer, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    before = model.weight.detach().clone()
    next(session.epochs(1))
    turns = iter(batches)
    x, y = next(turns)
    nn.functional.mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"the step of SGD must follow a backward pass of the session.*rank \d of"):
        optimizer.step()
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize("clears", [None, {"set_to_none": True}, {"set_to_none": False}])
def test_gradients_that_are_there_before_a_step_are_refused(tmp_path, clears):
    session = Session(tmp_path, log_level="ERROR")
    model = nn.Linear(2, 1)
    model, optimizer, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    expected = pytest.raises(RuntimeError, match=r"the gradients of SGD must be those of session\.step\(loss\) alone")
    with nullcontext() if clears else expected:
        for _ in session.epochs(1):
            for x, y in batches:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward(retain_graph=True)
                if clears:
                    optimizer.zero_grad(**clears)
                session.step(loss)


@ranks(1, 2)
@pytest.mark.parametrize("cares", [True, False])
def test_gradients_that_another_optimizers_loss_has_left_are_told_once(tmp_path, cares):
    session = Session(tmp_path)
    parts = {"G": nn.Linear(2, 2), "D": nn.Linear(2, 1)}
    given = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}
    model, optimizers, batches = session.prepare(parts, given, loader())
    for _ in session.epochs(2):
        for x, _ in batches:
            model["D"].requires_grad_(not cares)
            optimizers["G"].update_params(model["D"](model["G"](x)).mean())
            model["D"].requires_grad_(True)
            optimizers["D"].update_params(model["D"](x).square().mean())
        if session.epoch == 0:
            with pytest.raises(
                TypeError, match=r"are several \(G, D\)\. Call optimizers\['G'\]\.update_params\(loss\)"
            ):
                session.step(torch.ones((), requires_grad=True))
    told = "the parameters of optimizers['D'] have gradients before its update_params(loss)"
    assert complete_log_of(tmp_path).count(told) == (not cares)


@ranks(2)
def test_optimizers_may_take_turns_from_iteration_to_iteration(tmp_path):
    session = Session(tmp_path, log_level="WARNING")
    parts = {name: nn.Linear(2, 1) for name in "GD"}
    optimizer = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}
    model, optimizers, batches = session.prepare(parts, optimizer, loader())
    for _ in session.epochs(2):
        for number, (x, _) in enumerate(batches):
            name = "GD"[number % 2]
            optimizers[name].update_params(model[name](x).mean())
    assert session.run.train_loop.iters_without == 0
    assert [optimizers[name].inner_count for name in "GD"] == [session.iter // 2] * 2


def test_values_are_recorded_also_from_a_dict(tmp_path):
    session = Session(tmp_path, log_level="ERROR")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, _, batches = session.prepare(model, optimizer, loader(), schedule)
    for _ in session.epochs(2):
        for x, y in batches:
            session.step(nn.functional.mse_loss(model(x), y))
            session.log({"norm": 2.0}, other=3.0)
            with pytest.raises(TypeError, match="Leave out `step`"):
                session.log({"norm": 2.0}, step=3)
        schedule.step()
    records = [json.loads(line) for line in (session.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {(record["norm"], record["other"]) for record in records} == {(2.0, 3.0)}
    rates = [record["lr"] for record in records if record["mode"] == "epoch"]
    assert rates == pytest.approx([0.1, 0.01])  # with which they were trained


@ranks(1, 2)
def test_a_step_or_a_clearing_within_a_window_is_refused(tmp_path):
    session = Session(tmp_path, log_level="ERROR", accumulative_counts=2)
    model = nn.Linear(2, 1)
    model, optimizer, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            session.step(nn.functional.mse_loss(model(x), y))
            for spoils in (optimizer.step, optimizer.zero_grad):
                if session.is_update:
                    spoils()  # nothing is left after the update
                    continue
                with pytest.raises(
                    RuntimeError, match=r"of SGD comes within a window of accumulation, of which 1 of 2"
                ):
                    spoils()
    assert session.iter == len(batches)


class Clears(nn.Linear):
    """Has a line of an older loop left in its step."""

    left_in = "model"

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        if self.left_in == "model":
            self.zero_grad()
        elif self.left_in == "zero_grad":
            optim_wrapper.zero_grad()
        loss = nn.functional.mse_loss(self(data[0]), data[1])
        optim_wrapper.update_params(loss)
        if self.left_in == "step":
            optim_wrapper.step()
        return {"loss": loss}


@ranks(1, 2)
@pytest.mark.parametrize("left_in", ["model", "zero_grad", "step"])
def test_a_step_or_a_clearing_within_a_window_of_a_train_step_is_refused(tmp_path, left_in):
    model = Clears(2, 1)
    model.left_in = left_in
    wrapper = {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 2}
    with pytest.raises(RuntimeError, match=r"of SGD (comes|are gone) within a window of accumulation, of which 1 of 2"):
        train(tmp_path, model, loss=None, optim_wrapper=wrapper)


@ranks(1, 2)
@pytest.mark.parametrize("counts", [1, 2])
def test_a_clearing_by_the_model_within_a_window_is_refused(tmp_path, counts):
    session = Session(tmp_path, log_level="ERROR", accumulative_counts=counts)
    model = nn.Linear(2, 1)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    says = r"gradients of SGD are gone within a window .* been made \(rank \d of \d\)\. Call session\.step\(loss\)"
    with pytest.raises(RuntimeError, match=says) if counts > 1 else nullcontext():
        for _ in session.epochs(1):
            for x, y in batches:
                model.zero_grad()
                session.step(nn.functional.mse_loss(model(x), y))


def test_a_complete_session_says_so_and_warns_of_no_missing_steps(tmp_path):
    for resume in (False, True):
        session = Session(tmp_path, resume=resume)
        model = nn.Linear(2, 1)
        model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
        for _ in session.epochs(2):
            for x, y in batches:
                session.step(nn.functional.mse_loss(model(x), y))
    assert log_of(tmp_path).count(COMPLETE) == 1
    assert STEPLESS not in log_of(tmp_path)


@ranks(1, 2)
@pytest.mark.parametrize("repeats", ["batch size", "rows", "none"])
def test_rows_that_are_not_one_for_each_sample_are_told(tmp_path, repeats):
    session = Session(tmp_path)
    model = nn.Linear(2, 1)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.ones(7, 2), torch.zeros(7, 1))
    with torch.no_grad():
        for x, y in session.prepare_evaluation(DataLoader(data, batch_size=2)):
            loss = nn.functional.mse_loss(model(x), y)
            session.gather(loss.repeat({"batch size": 2, "rows": len(x), "none": 1}[repeats]))
    session.save("done")
    alone = session.world_size == 1
    told = {
        "batch size": f"with {2 if alone else 4} rows of all ranks for batches of {1 if alone else 3} samples",
        "none": f"with {1 if alone else 2} rows of all ranks for batches of {2 if alone else 4} samples",
    }
    assert complete_log_of(tmp_path).count("gather() was called") == (repeats != "rows")
    assert told.get(repeats, "") in complete_log_of(tmp_path)


@ranks(1, 2)
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("samples", [5, 7, 8])
def test_a_batch_that_a_rank_gets_again_is_told_where_it_may_be_counted_twice(tmp_path, samples, gathers):
    session = Session(tmp_path)
    model = nn.Linear(2, 1)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = DataLoader(TensorDataset(torch.ones(samples, 2)), batch_size=2)
    seen = 0
    with torch.no_grad():
        for (x,) in session.prepare_evaluation(data):
            outputs = model(x)
            seen += len(session.gather(outputs) if gathers else outputs)
    session.save("done")
    again = session.world_size == 2 and samples == 5  # batches of 2 and 1, and of 2
    log = complete_log_of(tmp_path)
    assert ("leaves it out, but was not called; a sum of your own" in log) == (again and not gathers)
    assert ("leaves it out; a sum of your own" in log) == (again and gathers)
    if gathers:
        assert seen == samples


@ranks(2)
def test_metrics_of_one_ranks_part_are_refused(tmp_path):
    session = Session(tmp_path, log_level="ERROR")
    model = nn.Linear(2, 1)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            session.step(nn.functional.mse_loss(model(x), y))
        session.log_metrics(accuracy=0.5 + get_rank() * 1e-9)  # another last digit is none
        with pytest.raises(ConfigError, match=r"same values on every rank, but has {'accuracy': 0.0} on .*1.0"):
            session.log_metrics(accuracy=float(get_rank()))


def test_a_loader_in_the_place_of_schedulers_is_refused_without_reading_it(tmp_path):
    session = Session(tmp_path, log_level="ERROR")
    model = nn.Linear(2, 1)
    with pytest.raises(
        TypeError, match=r"has <.*DataLoader.* go to prepare_evaluation\(\), and there is one loader to train on"
    ):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), loader())


def test_a_hook_can_ask_the_runner_for_no_second_run_within_the_first(tmp_path):
    class Predicts(Hook):
        def after_train_epoch(self, runner: Any) -> None:
            with pytest.raises(RuntimeError, match=r"is running, and can't be predicted by one of its own hooks"):
                whole.predict(loader())
            runner.visualizer.add_scalar("still_open", 1.0)

    whole = Runner(
        nn.Linear(2, 1),
        tmp_path,
        train_dataloader=loader(),
        loss=nn.MSELoss(),
        train_cfg={"max_epochs": 2},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        custom_hooks=[Predicts()],
        visualizer={"type": "TensorBoardVisualizer"},
    )
    whole.train()
    assert len(whole.predict(loader())) == 8  # after the run, it can


class AsksATrainer(Hook):
    def after_train_epoch(self, runner: Any) -> None:
        with pytest.raises(AttributeError, match=r"'TrainRun' .* no attribute 'current_epoch': did you mean `epoch`"):
            _ = runner.current_epoch
        with pytest.raises(AttributeError, match=r"no attribute 'is_global_zero'\. .* see docs/side-by-side\.md"):
            _ = runner.is_global_zero
        for name in ("validate", "evaluate", "metrics"):  # which a run has not: no name of its own is meant
            with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. .* see docs/side-by-side\.md"):
                getattr(runner, name)


def test_names_of_trainers_are_told_what_a_runner_calls_them(tmp_path):
    runner = Runner(nn.Linear(2, 1), tmp_path, loss=nn.MSELoss(), val_dataloader=loader())
    with pytest.raises(AttributeError, match=r"'Runner' object has no attribute 'fit': did you mean `train`"):
        runner.fit(loader())
    with pytest.raises(TypeError, match=r"but is of type DataLoader\. Data to validate are `val_dataloader` of"):
        runner.val(loader())
    train(tmp_path, custom_hooks=[AsksATrainer()])


def test_schedules_that_end_before_the_training_or_after_it_are_told(tmp_path):
    ramp = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 2}
    fall = {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.0, "by_epoch": False, "begin": 2}
    for end in (6, 16, 26):
        train(tmp_path / str(end), train_cfg={"max_epochs": 4}, param_scheduler=[ramp, {**fall, "end": end}])
    cut = "LinearLR ends after 25 iterations, but the training after 16"
    assert [cut in log_of(tmp_path / str(end)) for end in (6, 16, 26)] == [False, False, True]
    says = "have set all learning rates to 0, 11 iterations before the last of 16: nothing is trained at that rate"
    assert says in log_of(tmp_path / "6")
    assert "learning rates to 0" not in log_of(tmp_path / "16")


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ({"type": lr_scheduler.PolynomialLR, "total_iters": 100}, 100),
        ({"type": lr_scheduler.CosineAnnealingLR, "begin": 2, "end": 30}, 30),
        ({"type": "CosineRestartLR", "periods": [10, 20]}, 30),
        ({"type": "MultiStepLR", "milestones": [5], "end": 100}, None),
        ({"type": "LinearLR", "total_iters": 2, "end": 100}, None),
        ({"type": "ConstantLR", "total_iters": 100}, None),
        ({"type": lr_scheduler.ConstantLR, "total_iters": 100}, None),
    ],
)
def test_only_a_schedule_whose_rates_change_gradually_is_too_long(schedule, ends, tmp_path):
    train(tmp_path, train_cfg={"max_epochs": 1}, param_scheduler={**schedule, "by_epoch": False})
    said = f"ends after {ends} iterations, but the training after 4: the rates stop on their way"
    assert (said in log_of(tmp_path)) == ("on their way" in log_of(tmp_path)) == (ends is not None)


@pytest.mark.parametrize(
    ("schedule", "stays"),
    [
        ({"type": "LinearLR", "end": 1}, 0.333333),
        ({"type": "ConstantLR", "factor": 0.1, "begin": 1, "end": 2}, 0.1),
        ({"type": "LinearLR", "end": 2}, None),
        ({"type": "LinearLR", "end": 1, "convert_to_iter_based": True}, None),
        ({"type": "LinearLR", "start_factor": 1.0, "end": 1}, None),
    ],
)
def test_a_warm_up_that_ends_where_it_begins_is_warned_of(schedule, stays, tmp_path):
    train(tmp_path, train_cfg={"max_epochs": 3}, param_scheduler=schedule)
    says = f"multiplies the rates by {stays} at {schedule.get('begin', 0)}, and its window ends there"
    assert (says in log_of(tmp_path)) == ("its window ends there" in log_of(tmp_path)) == (stays is not None)


def for_one_process(optimizer: torch.optim.Optimizer, kind: str, steps: int) -> Any:
    if kind == "LambdaLR":  # as transformers makes them
        return lr_scheduler.LambdaLR(optimizer, partial(falling, num_training_steps=steps))
    if kind == "OneCycleLR":
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    if kind == "CosineAnnealingLR":
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)
    constant = lr_scheduler.ConstantLR(optimizer, total_iters=100)
    if kind == "ConstantLR":
        return constant
    return lr_scheduler.SequentialLR(optimizer, [constant, lr_scheduler.CosineAnnealingLR(optimizer, steps - 1)], [1])


def falling(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


@ranks(1, 2)
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingLR", "SequentialLR", "LambdaLR", "ConstantLR"])
def test_a_schedule_for_the_batches_of_one_process_is_told_on_several_ranks(tmp_path, kind, epochs):
    session, model, whole = Session(tmp_path), nn.Linear(2, 1), DataLoader(DATA, batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = for_one_process(optimizer, kind, epochs * len(whole))
    model, _, batches = session.prepare(model, optimizer, whole, schedulers=schedule)
    for _ in session.epochs(epochs):
        for x, y in batches:
            session.step(nn.functional.mse_loss(model(x), y))
            schedule.step()
    is_told = session.world_size == 2 and kind != "ConstantLR"
    said = f"{kind} ends after {8 * epochs} steps, but makes {4 * epochs} until"
    log = complete_log_of(tmp_path)
    assert (log.count(said), log.count("stop on their way")) == (is_told, is_told)


@pytest.mark.parametrize("by_update", [True, False])
@pytest.mark.parametrize("more", [0, 2])
def test_a_schedule_whose_windows_go_on_over_the_end_of_an_epoch_is_told_its_true_length(tmp_path, by_update, more):
    session, model = Session(tmp_path, accumulative_counts=4), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 12 if by_update else 5  # 5 epochs of 9 batches, in 11 windows of four and a last one of one
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + more)
    loader = DataLoader([DATA[0]] * 9, batch_size=1)
    model, _, batches = session.prepare(model, optimizer, loader, schedulers=schedule)
    for _ in session.epochs(5):
        for x, y in batches:
            session.step(nn.functional.mse_loss(model(x), y))
            if by_update and session.is_update:
                schedule.step()
        if not by_update:
            schedule.step()
    assert schedule.last_epoch == steps
    said = f"OneCycleLR ends after {steps + more} steps, but makes {steps} until"
    assert (said in complete_log_of(tmp_path), "stop on their way" in complete_log_of(tmp_path)) == (more > 0,) * 2


@pytest.mark.parametrize("made", ["Runner(nn.Linear(1, 1), 'work')", "Session('work')"])
def test_a_script_that_is_taken_for_a_config_does_not_train(made: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(f"from lockstep import Runner, Session\nfrom torch import nn\n{made}\n")
    with pytest.raises(ConfigError, match=r"run.py:3: .* is a script: run it by `python run.py`, or on several ranks"):
        Config.fromfile("run.py")
    assert [one.name for one in tmp_path.iterdir()] == ["run.py"]
    Session(tmp_path / "work")


@pytest.mark.parametrize("kind", ["CosineAnnealingLR", lr_scheduler.CosineAnnealingLR])
@pytest.mark.parametrize("end", [None, 2])
def test_a_cosine_that_rises_again_is_told(kind, end, tmp_path):
    train(
        tmp_path, train_cfg={"max_epochs": 1}, param_scheduler={"type": kind, "T_max": 2, "by_epoch": False, "end": end}
    )
    said = "CosineAnnealingLR is at its lowest after 2 iterations, and rises again until the training ends after 4"
    assert (said in log_of(tmp_path)) == (end is None)


@pytest.mark.parametrize("kind", ["OneCycleLR", lr_scheduler.OneCycleLR])
@pytest.mark.parametrize("steps", [2, 4])
def test_a_cycle_that_ends_before_the_training_keeps_its_last_rate_and_is_told(kind, steps, tmp_path):
    cycle = {"type": kind, "max_lr": 0.1, "total_steps": steps, "by_epoch": False}
    train(tmp_path, train_cfg={"max_epochs": 1}, param_scheduler=cycle)
    assert "  lr 4e-07  " in log_of(tmp_path)
    said = "OneCycleLR ends after 2 iterations, but the training after 4: until then the rates stay at their last value"
    assert (said in log_of(tmp_path)) == (steps == 2)


def test_a_step_in_a_pass_over_evaluation_data_is_an_error(tmp_path):
    with Session(tmp_path) as session:
        model = nn.Linear(2, 1)
        model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
        val = session.prepare_evaluation(loader())
        for _ in session.epochs(1):
            for x, y in batches:
                session.step(nn.functional.mse_loss(model(x), y))
            before = model.weight.clone()
            for x, y in val:
                with pytest.raises(RuntimeError, match=r"in a pass over a loader of prepare_evaluation\(\)"):
                    session.step(nn.functional.mse_loss(model(x), y))
            assert torch.equal(before, model.weight)


def test_a_metric_that_a_loop_by_hand_does_not_give_names_log_metrics(tmp_path):
    hook = {"type": "EarlyStoppingHook", "monitor": "val_loss"}
    session = Session(tmp_path, custom_hooks=[hook])
    model = nn.Linear(2, 1)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            session.step(nn.functional.mse_loss(model(x), y))
        with pytest.raises(ConfigError, match=r"Known: `accuracy`\. .* are for `session\.log`\.\n"):
            session.log_metrics(accuracy=1.0)


def test_a_training_in_epochs_and_iterations_says_that_one_is_to_be_given(tmp_path):
    with pytest.raises(ConfigError, match="`train_cfg` must have either `max_epochs` or `max_iters`, but has both"):
        train(tmp_path, train_cfg={"max_epochs": 2, "max_iters": 10})


class FailingMetric(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        raise ValueError("nothing fits")

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {}


def test_a_metric_that_fails_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing fits") as caught:
        train(tmp_path, val_dataloader=loader(), val_evaluator=FailingMetric())
    assert "while the metric FailingMetric was given the predictions for a batch" in caught.value.__notes__


@pytest.mark.parametrize("option", [{"custom_hooks": [object()]}, {"visualizer": "csv"}])
def test_parts_of_other_frameworks_are_told_where_their_counterparts_are(tmp_path, option):
    with pytest.raises(TypeError, match=r"docs/(side-by-side|monitoring)\.md"):
        train(tmp_path, **option)


class OfLightning:
    """Stands for a data module of Lightning's."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


def test_a_data_module_of_lightnings_is_told_to_hand_in_its_loaders(tmp_path):
    with pytest.raises(TypeError, match=r"Hand in its loaders: .* what train_dataloader\(\) returns"):
        Runner(nn.Linear(2, 1), tmp_path, train_dataloader=OfLightning()).train()


class OfAccelerate(DataLoader[Any]):
    """Stands for a loader that accelerate has prepared."""

    __module__ = "accelerate.data_loader"


class Batches:
    """An iterable of batches that is no loader of torch's, as one of webdataset."""

    def __iter__(self) -> Any:
        return iter(loader())

    def __len__(self) -> int:
        return 4


def test_a_prepared_loader_is_refused_among_several(tmp_path):
    with pytest.raises(TypeError, match="`val_dataloader` must be your own, but is accelerate's OfAccelerate"):
        train(tmp_path, val_dataloader={"clean": loader(), "noisy": OfAccelerate(DATA)})


def test_several_sets_may_be_iterables_of_batches(tmp_path):
    train(tmp_path, val_dataloader={"clean": Batches(), "noisy": Batches()}, train_dataloader=loader())
    records = [json.loads(line) for path in tmp_path.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    assert {"clean/loss", "noisy/loss"} <= {name for one in records for name in one}


def test_a_hook_of_another_scope_that_writes_checkpoints_is_found(tmp_path):
    class Elsewhere(Hook):
        writes_checkpoints = True

    Registry("hook", scope="hooks_elsewhere", parent=HOOKS).register_module(module=Elsewhere)
    hook = {"type": "Elsewhere", "_scope_": "hooks_elsewhere", "out_dir": "/there"}
    assert "/there" in out_dirs(RunnerArguments(nn.Linear(1, 1), str(tmp_path), custom_hooks=[hook]))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).mean()


def test_samples_that_have_lists_in_the_place_of_tensors_are_told(tmp_path):
    data = DataLoader([{"input_ids": [0, 1, 2]}] * 4, batch_size=2)
    with pytest.raises(TypeError) as caught:
        Runner(Tokens(), tmp_path, train_dataloader=data, train_cfg={"max_epochs": 1}).train()
    assert any(
        note.startswith("'input_ids' of the batch: a list of tensors") and "with_format('torch')" in note
        for note in caught.value.__notes__
    )


@ranks(1, 2)
@pytest.mark.parametrize("writes", ["one rank", "all ranks"])
def test_weights_that_one_rank_writes_between_epochs_are_told(tmp_path, writes):
    with Session(tmp_path, log_level="ERROR") as session:
        model = nn.Linear(2, 1)
        model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
        differs = writes == "one rank" and session.world_size == 2
        says = r"must be the same on all ranks, but is not.* some ranks alone run, as under `if rank == 0`"
        with pytest.raises(DivergenceError, match=says) if differs else nullcontext():
            for epoch in session.epochs(4):
                for x, y in batches:
                    session.step(nn.functional.mse_loss(model(x), y))
                if epoch == 2 and (writes == "all ranks" or get_rank() == 0):  # the first three updates are compared
                    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            assert not differs


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("saves", ["at once", "at the end"])
def test_what_ranks_have_trained_that_update_different_models_is_not_saved(tmp_path, saves, strategy):
    """Of shards, nothing else shows it; of replicas, later than the updates that are compared in any case."""
    differs = get_world_size() == 2
    says = r"the optimizer `one` has had 4 backward passes on rank 1 of 2, and \d on the others, where a checkpoint"
    with Session(tmp_path, strategy=strategy, log_level="ERROR") as session:
        both = nn.ModuleDict({"one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})
        sgd = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in both.items()}
        both, sgd, _ = session.prepare(both, sgd, loader())
        with pytest.raises(DivergenceError, match=says) if differs else nullcontext():
            for number, (x, y) in enumerate(session.iterations(8)):
                loss = nn.functional.mse_loss(both["one"](x), both["two"](x) + y)
                sgd["two" if number >= 4 and get_rank() == 1 else "one"].update_params(loss)
                if number == 5 and saves == "at once":
                    session.save()
    assert bool(list(tmp_path.glob("*/iter_*"))) is not differs


@ranks(2)
def test_weights_that_one_rank_has_written_since_the_last_update_are_not_saved(tmp_path):
    class Writes(Hook):
        def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
            if runner.iter == 5 and get_rank() == 1:
                unwrap_model(runner.model).weight.data.add_(1.0)

    with pytest.raises(
        DivergenceError, match=r"`weight` must be the same on all ranks.* after 6 updates, where a chec"
    ):
        train(tmp_path, custom_hooks=[Writes()], train_cfg={"max_iters": 6}, log_level="ERROR")
    assert not list(tmp_path.glob("*/iter_*"))
