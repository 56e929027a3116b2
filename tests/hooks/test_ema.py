"""The average of a model's weights in a run: seen by validation, saved, resumed, equal on all ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.data import DataLoader

from lockstep import Session
from lockstep.checkpoint import find_last_checkpoint, load_state, read_meta
from lockstep.dist import all_gather_object
from lockstep.errors import ConfigError
from lockstep.hooks import EMAHook, Hook
from lockstep.model import ExponentialMovingAverage, unwrap_model
from lockstep.testing import ranks
from lockstep.weights import load_checkpoint

from .runs import Net, Predicted, make_data, make_runner


class Recorder(Hook):
    """Averages by hand, next to the hook, and keeps the weights of every iteration."""

    priority = "HIGH"

    def __init__(self, momentum: float = 0.1) -> None:
        self.momentum = momentum
        self.average: Tensor | None = None
        self.averages: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        weight = unwrap_model(runner.model).linear.weight.detach().clone()
        share = 1.0 if self.average is None else self.momentum
        self.average = weight if self.average is None else self.average + share * (weight - self.average)
        self.averages[runner.iter + 1] = self.average
        self.weights[runner.iter + 1] = weight


def equal_on_ranks(tensor: Tensor) -> bool:
    return all(torch.equal(tensor, other) for other in all_gather_object(tensor))


def last(work_dir: Path) -> Path:
    found = find_last_checkpoint(work_dir)
    assert found is not None
    return found


@ranks(1, 2)
def test_validation_sees_the_average_and_training_goes_on_from_its_own_weights(tmp_path: Path):
    recorder, metric = Recorder(), Predicted()
    runner = make_runner(tmp_path, [recorder, EMAHook(momentum=0.1)], metric)
    trained = unwrap_model(runner.train())
    without = Recorder()
    make_runner(tmp_path, [without], Predicted()).train()
    assert list(recorder.weights) == list(range(1, 9))
    for place, weight in without.weights.items():
        assert torch.equal(recorder.weights[place], weight)  # training does not notice
    assert len(metric.seen) == 2
    for (predicted, running_mean), place in zip(metric.seen, (4, 8), strict=True):
        assert torch.allclose(predicted, recorder.averages[place], atol=1e-6)
        assert not torch.equal(predicted, recorder.weights[place])
        assert equal_on_ranks(predicted)
        assert equal_on_ranks(running_mean)
    assert torch.equal(trained.linear.weight, recorder.weights[8])


@ranks(1, 2)
def test_a_checkpoint_holds_the_average_as_its_model_and_the_weights_beside_it(tmp_path: Path):
    recorder = Recorder()
    make_runner(tmp_path, [recorder, EMAHook(momentum=0.1)], Predicted()).train()
    like = Net().state_dict()
    saved = load_state(last(tmp_path), {"model": copy.deepcopy(like), "ema": {"linear.weight": like["linear.weight"]}})
    assert torch.allclose(saved["model"]["linear.weight"], recorder.averages[8], atol=1e-6)
    assert torch.equal(saved["ema"]["linear.weight"], recorder.weights[8])
    assert read_meta(last(tmp_path))["ema"] == {"steps": 8}
    metric = Predicted()
    make_runner(tmp_path, [], metric, load_from=last(tmp_path)).val()
    assert torch.equal(metric.seen[0][0], saved["model"]["linear.weight"])


class Stop(Hook):
    priority = "LOWEST"

    def after_val_epoch(self, runner, metrics=None) -> None:
        raise KeyboardInterrupt


OPTIONS = {
    "plain": {"momentum": 0.1},
    "with buffers": {"momentum": 0.1, "update_buffers": True},
    "annealed": {"ema_type": "MomentumAnnealingEMA", "gamma": 2},
    "mean": {"ema_type": "StochasticWeightAverage"},
    "late": {"begin_epoch": 2, "momentum": 0.3},
    "later": {"begin_iter": 6, "momentum": 0.3},
}


@ranks(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path: Path, options):
    def run(name: str, stop: bool = False, **changes):
        recorder, metric, hook = Recorder(), Predicted(), EMAHook(**options)
        hooks = [recorder, hook, Stop()] if stop else [recorder, hook]
        runner = make_runner(tmp_path / name, hooks, metric, train_cfg={"max_epochs": 3}, **changes)
        try:
            runner.train()
        except KeyboardInterrupt:
            assert stop
        return recorder.weights, metric.seen, hook.ema_model.state_dict()

    weights, seen, state = run("whole")
    run("work", stop=True)
    resumed_weights, resumed_seen, resumed_state = run("work", resume=True)
    assert list(resumed_weights) == list(range(5, 13))
    for place, weight in resumed_weights.items():
        assert torch.equal(weight, weights[place])
    for (weight, _), (wanted, _) in zip(resumed_seen, seen, strict=True):
        assert torch.equal(weight, wanted)
        assert equal_on_ranks(weight)
    for name, value in state.items():
        # Each rank has running statistics of its own, of which the mean is saved.
        assert torch.equal(value, resumed_state[name]) or "running" in name, name


@ranks(2)
def test_averaged_buffers_are_one_set_for_all_ranks(tmp_path: Path):
    metric = Predicted()
    hook = EMAHook(momentum=0.1, update_buffers=True)
    make_runner(tmp_path, [hook], metric, default_hooks={"sync_buffers": None}).train()
    for _, running_mean in metric.seen:
        assert equal_on_ranks(running_mean)


class Growing(Net):
    """Extends a table in each forward pass, as models of positions do for longer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        self.table = torch.arange(len(self.table) + 1.0)
        return super().forward(x, y, mode)


@pytest.mark.parametrize("interval", [1, 3])
def test_a_buffer_that_is_extended_after_it_was_averaged_stays_as_it_is(tmp_path: Path, interval: int):
    recorder, metric = Recorder(), Predicted()
    hooks = [EMAHook(momentum=0.1, update_buffers=True, interval=interval), recorder]
    runner = make_runner(tmp_path, hooks, metric, Growing)
    runner.train()
    assert torch.equal(runner.model.linear.weight, recorder.weights[8])
    assert runner.model.table.tolist() == list(range(8 + 2 * 4))  # of the iterations, and of the validations' batches
    if interval == 1:
        torch.testing.assert_close([weight for weight, _ in metric.seen], [recorder.averages[i] for i in (4, 8)])


class Registering(Net):
    """Registers a buffer in its first forward pass, and another in its first one of a validation, as for masks."""

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        name = "mask" if self.training else "mask_of_all"
        if not hasattr(self, name):
            self.register_buffer(name, torch.ones(2), persistent=False)
        return super().forward(x, y, mode)


@pytest.mark.parametrize("update_buffers", [False, True])
def test_a_buffer_that_is_registered_in_a_forward_pass_has_no_average(tmp_path: Path, update_buffers: bool):
    recorder, metric = Recorder(), Predicted()
    hooks = [EMAHook(momentum=0.1, update_buffers=update_buffers), recorder]
    runner = make_runner(tmp_path, hooks, metric, Registering)
    runner.train()
    assert torch.equal(runner.model.linear.weight, recorder.weights[8])
    torch.testing.assert_close([weight for weight, _ in metric.seen], [recorder.averages[i] for i in (4, 8)])


@pytest.mark.parametrize("options", [{"begin_epoch": 2}, {"begin_iter": 5}])
def test_averaging_begins_in_the_epoch_and_with_the_iteration_that_are_named(tmp_path: Path, options):
    recorder, metric, hook = Recorder(), Predicted(), EMAHook(momentum=0.5, **options)
    make_runner(tmp_path, [recorder, hook], metric).train()
    assert torch.equal(metric.seen[0][0], recorder.weights[4])
    expected = recorder.weights[5]
    for place in (6, 7, 8):
        expected = expected + 0.5 * (recorder.weights[place] - expected)
    assert torch.allclose(metric.seen[1][0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"begin_epoch": 3}, "averages nothing: it begins in epoch 3, but 2 is the last"),
        ({"begin_iter": 9}, "averages nothing: it begins in iteration 9, but 8 is the last"),
    ],
)
def test_an_average_that_would_never_begin_is_warned_of(tmp_path: Path, options: dict[str, Any], says: str):
    runner = make_runner(tmp_path, [EMAHook(**options)])
    runner.train()
    assert says in (runner.run_dir / "log.txt").read_text()


@pytest.mark.parametrize(("options", "first"), [({"begin_epoch": 2}, 5), ({"begin_iter": 6}, 6)])
def test_a_resumed_run_forgets_an_average_that_has_not_begun_by_its_config(tmp_path: Path, options, first: int):
    make_runner(tmp_path, [EMAHook(momentum=0.5)], train_cfg={"max_epochs": 1}).train()
    recorder, metric = Recorder(), Predicted()
    hooks = [recorder, EMAHook(momentum=0.5, **options)]
    runner = make_runner(tmp_path, hooks, metric, resume=True)
    runner.train()
    expected = recorder.weights[first]
    for place in range(first + 1, 9):
        expected = expected + 0.5 * (recorder.weights[place] - expected)
    assert torch.allclose(metric.seen[-1][0], expected, atol=1e-6)
    assert "forgets the average" in (runner.run_dir / "log.txt").read_text()


class Torchs(Hook):
    """Averages by torch's own class, from the first iteration's weights."""

    priority = "HIGH"

    def __init__(self, average: Callable[..., Any], interval: int) -> None:
        self.multi_avg_fn, self.interval = average, interval
        self.averages: dict[int, Tensor] = {}

    def before_train(self, runner) -> None:
        model = unwrap_model(runner.model)
        self.model = AveragedModel(model, multi_avg_fn=self.multi_avg_fn)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter % self.interval == 0:
            self.model.update_parameters(unwrap_model(runner.model))
        self.averages[runner.iter + 1] = self.model.module.linear.weight.clone()


KINDS = {
    "ExponentialMovingAverage": ({"momentum": 0.1}, get_ema_multi_avg_fn(0.9)),
    "StochasticWeightAverage": ({}, get_swa_multi_avg_fn()),
}


@ranks(2)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_average_is_that_of_torchs_class(tmp_path: Path, kind, interval):
    options, average = KINDS[kind]
    torchs, metric = Torchs(average, interval), Predicted()
    hook = EMAHook(kind, interval=interval, **options)
    make_runner(tmp_path, [torchs, hook], metric).train()
    for (predicted, _), place in zip(metric.seen, (4, 8), strict=True):
        assert torch.allclose(predicted, torchs.averages[place], atol=1e-6)


def test_a_test_sees_the_average(tmp_path: Path):
    recorder, metric = Recorder(), Predicted()
    test = {"test_dataloader": make_data(), "test_evaluator": metric}
    runner = make_runner(tmp_path, [recorder, EMAHook(momentum=0.1)], **test)
    runner.train()
    runner.test()
    assert torch.allclose(metric.seen[0][0], recorder.averages[8], atol=1e-6)
    assert torch.equal(runner.model.linear.weight, recorder.weights[8])


class SaveBeforeSwapBack(Hook):
    priority = "HIGHEST"

    def after_val_epoch(self, runner, metrics=None) -> None:
        runner.save_checkpoint("within", epoch=runner.epoch, iteration=runner.iter, is_last=False)


def test_a_checkpoint_within_a_validation_is_like_any_other(tmp_path: Path):
    runner = make_runner(tmp_path, [SaveBeforeSwapBack(), EMAHook(momentum=0.1)], Predicted())
    runner.train()
    names = [name for name, _ in Net().named_parameters()]
    states = []
    for checkpoint in ("within", "epoch_2"):
        places = {"model": Net().state_dict(), "ema": dict(Net().named_parameters())}
        states.append(load_state(runner.run_dir / checkpoint, places))
    for name in names:
        assert torch.equal(states[0]["model"][name], states[1]["model"][name])
        assert torch.equal(states[0]["ema"][name], states[1]["ema"][name])


class Loads(Hook):
    """Loads other weights within a validation, as a hook may that looks for the best."""

    priority = "HIGHEST"

    def __init__(self, path: Path) -> None:
        self.path = path

    def before_val_iter(self, runner, batch_idx, data_batch=None) -> None:
        if batch_idx == 0:
            runner.load_checkpoint(self.path)


def test_weights_that_are_loaded_within_a_validation_stay(tmp_path: Path):
    torch.save(Net().state_dict(), tmp_path / "other.pth")
    other = torch.load(tmp_path / "other.pth")["linear.weight"]
    hooks = [EMAHook(momentum=0.1), Loads(tmp_path / "other.pth")]
    runner = make_runner(tmp_path, hooks, Predicted(), train_cfg={"max_epochs": 1})
    runner.train()
    assert torch.equal(runner.model.linear.weight, other)


class Halved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        return super().forward(x.bfloat16(), y.bfloat16(), mode)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(2)
def test_weights_in_half_precision_are_averaged_in_float32(tmp_path: Path, strategy: str):
    hooks = [Recorder(momentum=1e-3), EMAHook(momentum=1e-3)]
    runner = make_runner(tmp_path, hooks, None, Halved, strategy=strategy)
    runner.train()
    averaged = hooks[1].ema_model.module.linear.weight
    expected = list(hooks[0].weights.values())
    average = full(expected[0]).float()
    for weight in expected[1:]:
        average = average + 1e-3 * (full(weight).float() - average)
    assert averaged.dtype == torch.float32
    assert torch.allclose(full(averaged), average, rtol=1e-6)
    assert not torch.equal(full(averaged), full(expected[0]).float())
    resumed = EMAHook(momentum=1e-3)
    again = make_runner(tmp_path, [resumed], None, Halved, strategy=strategy, resume=True)
    again.train()
    assert torch.equal(full(resumed.ema_model.module.linear.weight), full(averaged))
    plain = make_runner(tmp_path, [], Predicted(), Halved, load_from=last(tmp_path))
    plain.val()
    assert torch.equal(unwrap_model(plain.model).linear.weight, average.bfloat16())


class Mixed(Halved):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1, dtype=torch.float64), requires_grad=False)


def test_weights_in_double_precision_beside_those_in_half_are_averaged_as_they_are(tmp_path: Path):
    hook = EMAHook()
    make_runner(tmp_path, [hook], None, Mixed).train()
    averaged = hook.ema_model.module
    assert averaged.linear.weight.dtype == torch.float32
    assert averaged.scale.item() == 0.1


def full(tensor: Tensor) -> Tensor:
    found: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return found


class Fail(Hook):
    def before_val_iter(self, runner, batch_idx, data_batch=None) -> None:
        raise RuntimeError("no")


def test_the_models_own_weights_are_back_after_a_validation_that_failed(tmp_path: Path):
    recorder = Recorder()
    runner = make_runner(tmp_path, [recorder, EMAHook(momentum=0.1), Fail()], Predicted())
    with pytest.raises(RuntimeError, match="no"):
        runner.train()
    assert torch.equal(runner.model.linear.weight, recorder.weights[4])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(1, 2)
def test_a_run_that_has_the_hook_no_more_goes_on_with_the_trained_weights(tmp_path: Path, strategy: str):
    longer = {"strategy": strategy, "train_cfg": {"max_epochs": 3}}
    straight, resumed = Recorder(), Recorder()
    make_runner(tmp_path / "straight", [straight], **longer).train()
    make_runner(tmp_path / "halves", [EMAHook(momentum=0.1)], strategy=strategy).train()
    runner = make_runner(tmp_path / "halves", [resumed], **longer, resume=True)
    runner.train()
    assert torch.equal(full(resumed.weights[12]), full(straight.weights[12]))
    if runner.rank == 0:
        assert "has no EMAHook any more" in (runner.run_dir / "log.txt").read_text()


def test_a_checkpoint_without_an_average_begins_one_or_is_refused(tmp_path: Path):
    make_runner(tmp_path, []).train()
    longer = {"train_cfg": {"max_epochs": 3}, "resume": True}
    with pytest.raises(ConfigError, match=r"has no average of weights, which `strict_load`.*strict_load=False"):
        make_runner(tmp_path, [EMAHook(strict_load=True)], **longer).train()
    recorder, hook = Recorder(), EMAHook(momentum=0.1)
    runner = make_runner(tmp_path, [recorder, hook], **longer)
    runner.train()
    assert "EMAHook begins anew" in (runner.run_dir / "log.txt").read_text()
    assert torch.allclose(hook.ema_model.module.linear.weight, recorder.averages[12], atol=1e-6)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(3, 1)
        self.again.weight = self.linear.weight

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        loss = super().forward(x, y, mode)
        return loss if mode == "predict" else loss + self.again(x).square().mean()


@ranks(1, 2)
def test_a_part_called_module_keeps_its_name_beside_one_that_is_wrapped(tmp_path: Path):
    session = Session(tmp_path, log_level="ERROR", custom_hooks=[EMAHook(momentum=0.1)])
    model = nn.Sequential(OrderedDict(module=nn.Sequential(checkpoint_wrapper(nn.Linear(4, 1)))))
    data = DataLoader([torch.ones(4)] * 4)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for _ in session.epochs(1):
        for x in batches:
            session.step(model(x).sum())
    saved = load_state(last(tmp_path), {key: {"module.0.weight": torch.empty(1, 4)} for key in ("model", "ema")})
    assert torch.equal(saved["ema"]["module.0.weight"], model.module[0].weight)


def test_tied_weights_stay_tied(tmp_path: Path):
    make_runner(tmp_path, [EMAHook(momentum=0.1)], Predicted(), Tied).train()
    hook = EMAHook(momentum=0.1)
    runner = make_runner(tmp_path, [hook], Predicted(), Tied, resume=True, train_cfg={"max_epochs": 3})
    runner.train()
    assert runner.model.again.weight is runner.model.linear.weight
    assert hook.ema_model.module.again.weight is hook.ema_model.module.linear.weight
    loaded = load_state(last(tmp_path), {"model": Tied().state_dict()})["model"]
    assert torch.equal(loaded["again.weight"], loaded["linear.weight"])
    assert torch.equal(loaded["linear.weight"], hook.ema_model.module.linear.weight)


class OwnAverage(ExponentialMovingAverage):
    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: Tensor) -> None:
        averaged_param.copy_(source_param)


def test_an_average_of_ones_own_is_used_and_nothing_else_is_taken(tmp_path: Path):
    recorder, metric = Recorder(), Predicted()
    make_runner(tmp_path, [recorder, {"type": "EMAHook", "ema_type": OwnAverage}], metric).train()
    assert torch.equal(metric.seen[1][0], recorder.weights[8])
    with pytest.raises(ConfigError, match="must build a BaseAveragedModel, but built ModelHolder"):
        make_runner(tmp_path, [EMAHook(ModelHolder)]).train()
    with pytest.raises(ConfigError, match="must be above 0, but they are 3 and 1"):
        EMAHook(begin_iter=3, begin_epoch=1)
    with pytest.raises(ConfigError, match="`begin_iter` must be an int of at least 0, but is '1e3'"):
        EMAHook(begin_iter="1e3")


class ModelHolder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


class Called(Net):
    """Shows its whole weight also where it is sharded or wrapped: as what it does to the unit vectors."""

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        if mode != "predict":
            return super().forward(x, y, mode)
        weight = (self.linear(torch.eye(3)) - self.linear(torch.zeros(1, 3))).t()
        return weight, unwrap_model(self.norm).running_mean.clone()


LAYOUTS = {
    "fsdp": "fsdp",
    "separate": {"type": "ddp", "model_wrapper": {"type": "MMSeparateDistributedDataParallel"}},
}


@ranks(2, warnings="default")
@pytest.mark.parametrize("strategy", LAYOUTS.values(), ids=LAYOUTS)
def test_the_average_is_the_same_however_the_model_is_laid_out(tmp_path: Path, strategy):
    def run(name: str, strategy: Any, epochs: int, **changes) -> list[Tensor]:
        metric, cfg = Predicted(), {"max_epochs": epochs}
        hooks = [EMAHook(momentum=0.1)]
        make_runner(tmp_path / name, hooks, metric, Called, strategy=strategy, train_cfg=cfg, **changes).train()
        return [weight for weight, _ in metric.seen]

    wanted, seen = run("ddp", "ddp", 3), run("whole", strategy, 3)
    first, resumed = run("other", strategy, 1), run("other", strategy, 3, resume=True)
    assert len(wanted) == 3
    assert torch.allclose(torch.stack(seen), torch.stack(wanted), atol=1e-5)
    # The checkpoint was saved before the validation, which the run that goes on from it makes first.
    assert torch.equal(torch.stack(resumed), torch.stack(seen))
    assert torch.equal(first[0], seen[0])
    for name in ("ddp", "other"):  # a checkpoint's model is the average, whatever laid it out
        loaded = load_state(last(tmp_path / name), {"model": Net().state_dict()})["model"]
        assert torch.allclose(loaded["linear.weight"], wanted[-1], atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(2)
def test_a_session_evaluates_ranks_and_exports_the_same_average(tmp_path: Path, strategy: str):
    hook, x = EMAHook(momentum=0.3), torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"default_hooks": {"checkpoint": {"save_best": "loss"}}, "custom_hooks": [hook]}
    session = Session(tmp_path, strategy=strategy, randomness={"seed": 0}, log_level="ERROR", **options)
    model: nn.Module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, batches = session.prepare(model, optimizer, DataLoader(x, batch_size=3, shuffle=True))
    held_out = session.prepare_evaluation(DataLoader(x, batch_size=4))
    with session:
        for _ in session.epochs(2):
            for rows in batches:
                session.step(model(rows).square().mean())
            trained = [whole(weight).clone() for weight in model.parameters()]
            with torch.no_grad():
                outputs = torch.cat([session.gather(model(rows)) for rows in held_out])
            assert all(torch.equal(whole(now), then) for now, then in zip(model.parameters(), trained, strict=True))
            session.log_metrics(loss=outputs.square().mean().item())
        session.save_pretrained(tmp_path / "exported")
    (best,) = session.run_dir.glob("best_loss_*")
    for weights in (best, tmp_path / "exported"):  # the last epoch is the best: weights shrink
        found = nn.Linear(4, 2)
        load_checkpoint(found, weights)
        torch.testing.assert_close(found(x), outputs)
        assert not torch.allclose(found.weight, trained[0], atol=1e-3)


def whole(weight: Any) -> Tensor:
    full: Tensor = weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
    return full
