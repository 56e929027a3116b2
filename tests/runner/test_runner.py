"""What a Runner does with what it is given."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.config import Config
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError, PeerError, RegistryError
from lockstep.evaluator import Accuracy
from lockstep.hooks import Hook
from lockstep.model import MMDistributedDataParallel
from lockstep.registry import RUNNERS
from lockstep.runner import FlexibleRunner, Runner
from lockstep.runner.arguments import RunnerArguments
from lockstep.strategy import DDPStrategy, SingleDeviceStrategy
from lockstep.testing import ranks

FEATURES = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
CLASSES = (FEATURES.sum(1) > 0).long()


class Classifier(nn.Module):
    """Inherits from nothing of lockstep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor"):
        scores = self.linear(x)
        return nn.functional.cross_entropy(scores, y) if mode == "loss" else scores


def data() -> TensorDataset:
    return TensorDataset(FEATURES, CLASSES)


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def complete(folder: Path, **changes) -> Runner:
    return Runner(
        **{
            "model": Classifier(),
            "work_dir": folder,
            "train_dataloader": {"dataset": data(), "batch_size": 4},
            "val_dataloader": {"dataset": data(), "batch_size": 4},
            "val_evaluator": {"type": "Accuracy"},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.5}},
            "train_cfg": {"by_epoch": True, "max_epochs": 2, "val_interval": 1},
            "randomness": {"seed": 1},
            **changes,
        }
    )


def test_making_a_runner_does_nothing(tmp_path: Path):
    before = torch.get_rng_state()
    runner = Runner({"type": "NoSuchModel"}, tmp_path / "new", {"dataset": {"type": "NoSuchData"}})
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("model", "optim_wrapper", "train_loop", "run_dir"):
        with pytest.raises(AttributeError, match=rf"`{name}` is built by train\(\)"):
            getattr(runner, name)
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = runner.modle


def test_what_belongs_to_a_run_can_not_be_set_on_the_runner(tmp_path: Path):
    runner = complete(tmp_path)
    for _ in range(2):
        for name in ("model", "train_dataloader"):
            with pytest.raises(AttributeError, match=rf"`{name}` of a Runner can't be set.* the argument `{name}`"):
                setattr(runner, name, None)
        for name in ("train_loop", "optim_wrapper", "seed", "iter", "work_dir", "cfg"):
            with pytest.raises(AttributeError, match=rf"'?`?{name}"):
                setattr(runner, name, None)
        runner.of_my_own = 1
        if runner.iter == 0:
            runner.train()
    assert (runner.iter, runner.of_my_own) == (12, 1)


@ranks(1, 2)
def test_the_smallest_call_trains_with_defaults_that_are_said(tmp_path: Path):
    torch.manual_seed(get_rank())
    model = Classifier()
    before = model.linear.weight.detach().clone()
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    runner = Runner(model=model, work_dir=tmp_path, train_dataloader=loader)
    trained = runner.train()

    assert not torch.equal(model.linear.weight, before)
    weights = all_gather_object(model.linear.weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert isinstance(trained, MMDistributedDataParallel if get_world_size() > 1 else Classifier)
    if get_rank() == 0:
        log = (runner.run_dir / "log.txt").read_text()
        assert f"seed {runner.seed}" in log
        assert "`optim_wrapper` is not given; by default it is {'optimizer': {'type': 'AdamW'" in log
        assert "`train_cfg` is not given; by default it is {'by_epoch': True, 'max_epochs': 3" in log
        assert ("22 samples, 11 on each of 2 ranks" in log) == (get_world_size() == 2)
        assert (tmp_path / "last_checkpoint").read_text().splitlines()[0] == f"{runner.run_dir.name}/epoch_3"
    assert len(set(all_gather_object(runner.seed))) == 1
    assert len(set(all_gather_object(runner.run_dir))) == 1
    assert [path.name for path in runner.run_dir.glob("log_rank*")] == []


@ranks(2)
def test_a_run_records_itself(tmp_path: Path):
    runner = complete(tmp_path, default_hooks={"logger": {"interval": 2}})
    runner.train()
    if get_rank() != 0:
        return
    by_mode: dict[str, list[dict]] = {}
    for record in records(runner.run_dir):
        by_mode.setdefault(record.pop("mode"), []).append(record)
    # 11 samples per rank and epoch, in batches of 4: 3 iterations
    assert [r["iter"] for r in by_mode["train"]] == [2, 3, 4, 6]
    assert [r["epoch"] for r in by_mode["train"]] == [1, 1, 2, 2]
    assert [(r["epoch"], r["iter"]) for r in by_mode["epoch"]] == [(1, 3), (2, 6)]
    assert [(r["epoch"], r["iter"]) for r in by_mode["val"]] == [(1, 3), (2, 6)]
    for record in by_mode["train"] + by_mode["epoch"]:
        assert record["lr"] == 0.5
        assert record["samples_per_second"] > 0
        assert 0 < record["loss"] < 2
    scores = runner.model.module(FEATURES)
    assert by_mode["val"][-1]["accuracy"] == pytest.approx(100 * (scores.argmax(1) == CLASSES).float().mean().item())


@ranks(2)
def test_a_recorded_loss_is_the_mean_over_ranks(tmp_path: Path):
    runner = complete(tmp_path, default_hooks={"logger": {"interval": 1}}, train_cfg={"max_epochs": 1})
    losses: list[float] = []

    class Spy(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            losses.append(float(outputs["loss"]))

    runner.register_hook(Spy())
    runner.train()
    means = [sum(pair) / 2 for pair in zip(*all_gather_object(losses), strict=True)]
    if get_rank() == 0:
        recorded = [r["loss"] for r in records(runner.run_dir) if r["mode"] == "train"]
        assert recorded == pytest.approx(means, rel=1e-6)


@ranks(2)
def test_validation_and_test_need_no_training(tmp_path: Path):
    model = Classifier()
    torch.nn.init.zeros_(model.linear.weight)
    with torch.no_grad():
        model.linear.bias.copy_(torch.tensor([1.0, 0.0]))
    accuracy = 100 * float((CLASSES == 0).float().mean())
    runner = complete(
        tmp_path, model=model, test_dataloader={"dataset": data()}, test_evaluator=Accuracy(prefix="held out")
    )
    assert runner.val() == {"accuracy": pytest.approx(accuracy)}
    assert runner.test() == {"held out/accuracy": pytest.approx(accuracy)}
    assert (runner.epoch, runner.iter, runner.max_epochs) == (0, 0, None)
    assert not list(runner.run_dir.glob("epoch_*"))


@ranks(2)
def test_one_runner_trains_then_tests(tmp_path: Path):
    runner = complete(tmp_path, test_dataloader={"dataset": data()}, test_evaluator=[Accuracy()])
    runner.train()
    last = runner.val_loop.metrics
    assert runner.test() == runner.val() == last
    with pytest.raises(RuntimeError, match="has trained already"):
        runner.train()


@ranks(2)
def test_a_model_that_is_wrapped_already_is_taken_as_it_is(tmp_path: Path):
    for wrapper in (MMDistributedDataParallel, nn.parallel.DistributedDataParallel):
        wrapped = wrapper(Classifier())
        before = wrapped.module.linear.weight.detach().clone()
        assert complete(tmp_path, model=wrapped).train() is wrapped
        assert not torch.equal(wrapped.module.linear.weight, before)


@ranks(2)
def test_an_optimizer_object_is_taken_as_it_is(tmp_path: Path):
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    runner = complete(tmp_path, model=model, optim_wrapper=optimizer)
    runner.train()
    assert runner.optim_wrapper.optimizer is optimizer
    assert optimizer.state[model.linear.weight]["step"] == runner.iter == 6


@pytest.mark.parametrize("strategy", ["ddp", "single", {"type": "DDPStrategy"}, SingleDeviceStrategy, None])
def test_every_strategy_of_one_process_trains(tmp_path: Path, strategy):
    strategy = strategy() if isinstance(strategy, type) else strategy
    runner = complete(tmp_path, strategy=strategy)
    assert isinstance(runner.train(), Classifier)


@ranks(2)
def test_strategies_on_ranks(tmp_path: Path):
    runner = complete(tmp_path, strategy={"type": "ddp", "find_unused_parameters": True})
    assert runner.train().find_unused_parameters
    assert isinstance(runner.strategy, DDPStrategy)
    own = {"type": "MMDistributedDataParallel", "detect_anomalous_params": True}
    assert complete(tmp_path, strategy=DDPStrategy(model_wrapper=own)).train().detect_anomalous_params
    with pytest.raises(ConfigError, match=rf"must lay the model over all ranks.*rank {get_rank()} of 2"):
        complete(tmp_path, strategy="single").train()


def test_a_config_makes_the_same_runner(tmp_path: Path):
    cfg = Config(
        {
            "model": {"type": Classifier},
            "work_dir": str(tmp_path),
            "train_dataloader": {"dataset": data(), "batch_size": 4},
            "train_cfg": {"max_epochs": 1},
            "some_variable": 3,
            "optim_wraper": {},
            "model_wraper_cfg": {},
        }
    )
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert "max_epochs=1" in (runner.run_dir / "config.py").read_text()
    log = (runner.run_dir / "log.txt").read_text()
    assert "`optim_wraper` means nothing here: did you mean `optim_wrapper`?" in log
    assert "`model_wraper_cfg` means nothing here: did you mean `model_wrapper_cfg`?" in log
    assert "some_variable" not in log
    file = tmp_path / "read.py"  # a key that the config itself reads is none that is misspelt
    file.write_text("test_pipeline = [1]\ntest_dataloader = dict(dataset=test_pipeline)\n")
    assert RunnerArguments(model=Classifier(), work_dir=tmp_path, cfg=Config.fromfile(file)).misspelt == {}
    del cfg["model"]
    with pytest.raises(ConfigError, match="key `model`"):
        Runner.from_cfg(cfg)


class OneTensor(torch.optim.SGD):
    """Has its rate in a tensor that both groups share."""

    def __init__(self, params, lr: float) -> None:
        groups = [{"params": [one]} for group in params for one in group["params"]]
        super().__init__(groups, lr=torch.tensor(lr), foreach=False)


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "enable", "lrs"), [("SGD", True, [2.0]), ("SGD", False, [0.5]), (OneTensor, True, [2.0, 2.0])]
)
def test_the_learning_rate_scales_with_the_global_batch_where_that_is_enabled(kind, enable, lrs, tmp_path: Path):
    runner = complete(
        tmp_path,
        optim_wrapper={"optimizer": {"type": kind, "lr": 0.5}},
        auto_scale_lr={"enable": enable, "base_batch_size": 2},
    )
    runner.train()
    assert runner.optim_wrapper.get_lr() == {"lr": lrs}


def test_without_a_batch_size_no_learning_rate_is_scaled(tmp_path: Path):
    loader = {"dataset": data(), "batch_sampler": [[0, 1], [2]]}
    runner = complete(tmp_path, train_dataloader=loader, auto_scale_lr={"enable": True, "base_batch_size": 2})
    with pytest.raises(ConfigError, match=r"has none, as one with a `batch_sampler`\. Give `batch_size`, or set"):
        runner.train()


class WithoutRate(torch.optim.Optimizer):
    """Has no `lr` in its groups."""

    def __init__(self, params, weight_decay: float) -> None:
        super().__init__(params, {"weight_decay": weight_decay})

    def step(self, closure=None) -> None:
        """Update nothing."""


def test_an_optimizer_may_have_no_learning_rate(tmp_path: Path):
    runner = complete(
        tmp_path,
        optim_wrapper={"optimizer": {"type": WithoutRate, "weight_decay": 0.1}},
        param_scheduler={"type": "CosineAnnealingParamScheduler", "param_name": "weight_decay", "by_epoch": False},
        custom_hooks=[{"type": "RuntimeInfoHook"}],
    )
    runner.train()
    assert runner.optim_wrapper.param_groups[0]["weight_decay"] < 0.01
    scaled = complete(
        tmp_path / "scaled",
        optim_wrapper={"optimizer": {"type": WithoutRate, "weight_decay": 0.1}},
        auto_scale_lr={"enable": True, "base_batch_size": 2},
    )
    with pytest.raises(ConfigError, match="which this optimizer sets itself"):
        scaled.train()


def test_a_compiled_model_trains(tmp_path: Path):
    torch._dynamo.reset()
    runner = complete(tmp_path, compile={"backend": "eager"})
    trained = runner.train()
    assert trained._compiled_call_impl is not None
    assert set(trained.state_dict()) == {"linear.weight", "linear.bias"}


def test_a_visualizer_gets_the_scalars(tmp_path: Path):
    seen: dict[str, list[int]] = {}

    class Board:
        def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
            for name in scalar_dict:
                seen.setdefault(name, []).append(step)

    complete(tmp_path, visualizer=Board()).train()
    assert seen["val/accuracy"] == [6, 12]
    assert seen["train/loss"] == [6, 10, 12]
    with pytest.raises(TypeError, match="must be an object with a method add_scalars"):
        complete(tmp_path, visualizer=3).train()


def test_the_seed_decides_everything(tmp_path: Path):
    def weights(seed: int) -> Tensor:
        runner = complete(tmp_path, model={"type": Classifier}, randomness={"seed": seed, "deterministic": True})
        return runner.train().linear.weight

    try:
        first, second, third = weights(1), weights(1), weights(2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@ranks(2)
def test_ranks_may_have_seeds_of_their_own(tmp_path: Path):
    def drawn(**randomness) -> list[float]:
        runner = complete(tmp_path, randomness={"seed": 3, **randomness})
        values: list[float] = []

        class Draw(Hook):
            def before_train(self, runner) -> None:
                values.append(torch.rand(()).item())

        runner.register_hook(Draw())
        runner.train()
        return all_gather_object(values[0])

    assert len(set(drawn())) == 1
    assert len(set(drawn(diff_rank_seed=True))) == 2


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"hooks": []}, TypeError, "a Runner has no argument `hooks`: did you mean `custom_hooks`"),
        ({"max_epochs": 3}, TypeError, "a Runner has no argument `max_epochs`: it is a key of `train_cfg`"),
        (
            {"profiler": "simple"},
            TypeError,
            r"no argument `profiler`\. For names of .* see docs/side-by-side.md; of .* docs/hugg",
        ),
        ({"max_steps": 9}, TypeError, "no argument `max_steps`: it is `max_iters`, a key of `train_cfg`"),
        ({"gradient_clip_val": 1.0}, TypeError, "`gradient_clip_val`: it is `clip_grad`, a key of `optim_wrapper`"),
        ({"precision": "bf16-mixed"}, TypeError, "`precision`: give optim_wrapper=dict.type='AmpOptimWrapper', dtype="),
        ({"accelerator": "gpu", "devices": 2}, TypeError, "`accelerator`: each rank finds its device, and `lockstep l"),
        ({"train_loader": []}, TypeError, "a Runner has no argument `train_loader`: did you mean `train_dataloader`"),
        ({"model": "resnet"}, TypeError, r"`model` must be a torch.nn.Module.*'resnet'"),
        ({"work_dir": None}, TypeError, "`work_dir` must be a path"),
        ({"resume": "checkpoint"}, TypeError, "from the last checkpoint, or from `load_from`"),
        ({"custom_hooks": Hook()}, TypeError, "`custom_hooks` must be a list"),
        ({"randomness": 3}, TypeError, "`randomness` must be a dict or None"),
        ({"val_dataloader": {"a": {"dataset": data()}}, "val_evaluator": {"b": Accuracy()}}, TypeError, "key 'b'"),
        ({"train_dataloader": [{"dataset": data()}] * 2}, TypeError, "one data loader, but is a list of 2. Join"),
        ({"val_dataloader": None}, ConfigError, "`val_dataloader` must be given with `val_evaluator`"),
        ({"test_cfg": {}}, ConfigError, "`test_dataloader` must be given with `test_cfg`"),
        ({"log_level": "info"}, TypeError, "`log_level` must be a level of logging, but is 'info': did you mean"),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path: Path, changes, error, says):
    with pytest.raises(error, match=says):
        complete(tmp_path, **changes)


def test_what_is_missing_is_missing_in_the_call_of_the_runner():
    with pytest.raises(TypeError, match=r"^Runner\(\) missing 1 required positional argument: 'work_dir'"):
        Runner(torch.nn.Linear(1, 1))


@ranks(2)
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": {"type": "Clasifier"}}, RegistryError, "no model `Clasifier`"),
        ({"train_cfg": {"by_epoch": True}}, ConfigError, "key `max_epochs`"),
        ({"train_cfg": {"max_epochs": 0}}, ConfigError, "`max_epochs` must be an int of at least 1, but is 0"),
        ({"train_cfg": {"max_epochs": 1, "val_intervall": 2}}, ConfigError, "did you mean `val_interval`"),
        ({"compile": {"mod": "default"}}, ConfigError, "`compile` has the unknown key 'mod': did you mean `mode`"),
        ({"compile": {"model": "default"}}, ConfigError, "`compile` has the unknown key 'model'"),
        ({"randomness": {"sed": 1}}, ConfigError, "`randomness` has the unknown key 'sed': did you mean `seed`"),
        ({"env_cfg": {"backend": "gloo"}}, ConfigError, "`env_cfg` has the unknown key 'backend'. Known: .*`dist_cfg`"),
        (
            {"env_cfg": {"mp_cfg": {"mp_start_metod": "spawn"}}},
            ConfigError,
            "`env_cfg.mp_cfg` has the unknown key 'mp_start_metod': did you mean `mp_start_method`",
        ),
        (
            {"env_cfg": {"dist_cfg": {"timout": 3}}},
            ConfigError,
            "`env_cfg.dist_cfg` has the unknown key 'timout': did you mean `timeout`",
        ),
        ({"default_hooks": {"speed": {"interval": 3}}}, ConfigError, r"`default_hooks\['speed'\]` must have a `type`"),
        ({"default_hooks": {"checkpoints": None}}, ConfigError, "did you mean `checkpoint`"),
        ({"custom_hooks": [{"type": "LogerHook"}]}, RegistryError, "did you mean `LoggerHook`"),
        ({"custom_hooks": [3]}, TypeError, "must be a Hook"),
        ({"load_from": "nowhere.pth"}, ConfigError, "the weights to load must be a checkpoint.*nowhere.pth"),
        ({"auto_scale_lr": {"enable": True}}, ConfigError, "`base_batch_size`"),
        ({"auto_scale_lr": {"enable": True, "base_batch_size": -2}}, ConfigError, "finite number above 0, but is -2"),
        (
            {"auto_scale_lr": {"enable": True, "base_batch_size": "64"}},
            ConfigError,
            "finite number above 0, but is '64'",
        ),
        ({"val_cfg": 5}, TypeError, "`val_cfg` must be a dict or None, but is 5 of int"),
        ({"auto_scale_lr": {"enabl": True, "base_batch_size": 2}}, ConfigError, "did you mean `enable`"),
        ({"val_evaluator": None}, ConfigError, "`val_evaluator` must be given with `val_dataloader`"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_before_training(tmp_path: Path, changes, error, says):
    with pytest.raises(error, match=says):
        complete(tmp_path, **changes).train()
    assert all_gather_object(1) == [1, 1]


@ranks(2)
def test_an_unwritable_work_dir_is_refused_on_every_rank(tmp_path: Path):
    (tmp_path / "file").touch(exist_ok=True)
    with pytest.raises(ConfigError if get_rank() == 0 else PeerError, match=r"`work_dir`.*file"):
        complete(tmp_path / "file" / "work").train()


@pytest.mark.parametrize("mode", ["train", "val", "test"])
def test_each_mode_needs_its_data(tmp_path: Path, mode):
    with pytest.raises(ConfigError, match=f"`{mode}_dataloader` must be given"):
        getattr(Runner(Classifier(), tmp_path), mode)()


def test_logging_is_as_before_when_a_run_is_over(tmp_path: Path):
    logger = logging.getLogger("lockstep")
    before = (logger.level, logger.propagate, list(logger.handlers))
    complete(tmp_path).train()
    with pytest.raises(ConfigError):
        complete(tmp_path, train_cfg={}).train()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_runs_that_begin_together_get_folders_of_their_own(tmp_path: Path):
    runs = [complete(tmp_path, experiment_name="toy") for _ in range(3)]
    for runner in runs:
        runner.val()
    assert len({runner.run_dir for runner in runs}) == 3
    assert all(runner.run_dir.name.startswith("toy_2") for runner in runs)


def test_it_has_its_names():
    assert lockstep.Runner is FlexibleRunner is Runner is RUNNERS["Runner"]
