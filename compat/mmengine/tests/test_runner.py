"""The parts of a Runner that code for MMEngine reads and changes between `from_cfg` and `train`."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

from lockstep.checkpoint import read_meta
from lockstep.dist import destroy_dist
from lockstep.errors import ConfigError, Preempted
from lockstep.launch.worker import RESUME_SINCE
from mmengine import registry
from mmengine.config import Config
from mmengine.evaluator import DumpResults, Evaluator
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import DATASETS, METRICS, MODELS, RUNNERS, Registry, init_default_scope
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, FlexibleRunner, LogProcessor, Runner, ValLoop
from mmengine.testing.runner_test_case import ToyDataset, ToyMetric, ToyModel
from mmengine.visualization import BaseVisBackend, Visualizer

LOADER = {"dataset": {"type": "ToyDataset"}, "sampler": {"type": "DefaultSampler", "shuffle": False}, "batch_size": 3}


@pytest.fixture
def cfg(tmp_path):
    for table, kind in ((MODELS, ToyModel), (DATASETS, ToyDataset), (METRICS, ToyMetric)):
        table.register_module(module=kind, force=True)
    evaluated = {
        f"{mode}_{part}": value
        for mode in ("val", "test")
        for part, value in (("dataloader", LOADER), ("evaluator", [{"type": "ToyMetric"}]), ("cfg", {}))
    }
    yield {
        "model": {"type": "ToyModel"},
        "work_dir": str(tmp_path),
        "train_dataloader": LOADER,
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
        "param_scheduler": {"type": "StepLR", "step_size": 1},
        "train_cfg": {"by_epoch": True, "max_epochs": 2},
        "visualizer": [],
        "log_level": "ERROR",
        "randomness": {"seed": 1},
        **evaluated,
    }
    destroy_dist()
    init_default_scope("mmengine")


class Watch(Hook):
    """Notes at which points it was called, and what it was called with."""

    def __init__(self):
        self.seen = []

    def before_train(self, runner):
        self.seen += [runner.max_iters, runner._resume, len(runner._hooks) == len(runner.hooks)]
        names = ("experiment_name", "log_dir", "model_name", "launcher", "deterministic", "val_begin", "val_interval")
        self.told = {name: getattr(runner, name) for name in (*names, "val_dataloader", "val_evaluator")}
        with pytest.raises(AttributeError, match="has no attribute 'test_evaluator'"):
            _ = runner.test_evaluator
        loader = runner.build_dataloader(LOADER, seed=3)
        self.seen.append(len(loader))

    def after_train(self, runner):
        saved = runner.save_checkpoint("mine", by_epoch=False, save_param_scheduler=False)
        runner.load_checkpoint(saved, "cpu", True)
        self.saved = read_meta(saved)


def test_the_parts_that_are_touched_are_those_that_are_trained(cfg):
    cfg["train_cfg"]["val_interval"] = 2
    runner = Runner.from_cfg({**cfg, "experiment_name": "exp"})
    model = runner.model
    assert isinstance(model, ToyModel)
    assert (runner.max_epochs, runner.epoch, runner.iter, runner.seed, runner.rank) == (2, 0, 0, 1, 0)
    assert runner.timestamp in runner.log_dir
    assert json.dumps(runner.work_dir) == json.dumps(str(cfg["work_dir"]))
    names = [type(hook).__name__ for hook in runner.hooks]
    assert "CheckpointHook" in names
    assert "CheckpointHook" in runner.get_hooks_info()
    watch = Watch()
    runner.register_hook(watch, "LOWEST")
    assert runner.hooks[-1] is watch
    loader, evaluator, visualizer = runner.train_dataloader, runner.val_evaluator, runner.visualizer
    assert len(loader) == 4
    before = model.linear1.weight.detach().clone()
    runner.train()
    assert watch.seen == [8, False, True, 4]
    assert (watch.saved["epoch"], watch.saved["iter"]) == (2, 9)  # as if in `after_train_iter`
    assert watch.told == {
        "experiment_name": f"exp_{runner.timestamp}",
        "log_dir": str(runner.run_dir),
        "model_name": "ToyModel",
        "launcher": "none",
        "deterministic": False,
        "val_begin": 1,
        "val_interval": 2,
        "val_dataloader": runner.val_loop.dataloader,
        "val_evaluator": evaluator,
    }
    assert [runner.val_interval, runner.model_name] == [2, "ToyModel"]
    assert runner.model is model
    assert not torch.equal(model.linear1.weight, before)
    assert runner.train_dataloader is loader
    assert runner.val_evaluator is evaluator
    assert runner.visualizer is visualizer
    assert list(runner.hooks)[-1] is watch


def test_a_model_that_is_put_in_its_place_is_trained(cfg):
    runner = Runner.from_cfg(cfg)
    runner.model = ToyModel()
    own = runner.model
    runner.train()
    assert runner.model is own


def test_loops_and_optim_wrapper_are_built_before_the_training(cfg):
    runner = Runner.from_cfg(cfg)
    assert runner.train_loop.max_iters == 8
    assert isinstance(runner.optim_wrapper, OptimWrapper)
    assert runner.val_loop.dataloader is not runner.test_loop.dataloader
    loop = runner.train_loop
    runner.train()
    assert runner.train_loop is loop
    assert runner.iter == 8


def test_the_length_of_the_training_is_known_before_it(cfg):
    runner = Runner.from_cfg(cfg)
    assert (runner.max_iters, runner.max_epochs) == (8, 2)


@pytest.mark.parametrize("touches", [False, True])
@pytest.mark.parametrize("as_file", [False, True])
def test_resume_goes_on_where_a_checkpoint_is(cfg, tmp_path, touches, as_file):
    """Of lockstep or, as `as_files` writes it, of MMEngine."""
    cfg["default_hooks"] = {"checkpoint": {"type": "mmengine.CheckpointHook", "interval": 1, "as_files": True}}
    whole = Runner.from_cfg({**cfg, "work_dir": str(tmp_path / "whole")})
    whole.train()
    checkpoint = tmp_path / "whole" / "epoch_1.pth" if as_file else whole.run_dir / "epoch_1"
    runner = Runner.from_cfg({**cfg, "work_dir": str(tmp_path / "resumed")})
    if touches:
        _ = runner.train_loop
    runner.resume(checkpoint)
    assert (runner.epoch, runner.iter) == (1, 4)
    runner.train()
    assert (runner.epoch, runner.iter, runner.optim_wrapper.get_lr()) == (2, 8, whole.optim_wrapper.get_lr())
    assert torch.equal(runner.model.linear1.weight, whole.model.linear1.weight)
    with pytest.raises(RuntimeError, match="before the training, but that has made 8 iterations"):
        runner.resume(checkpoint)


def test_resume_takes_the_seed_of_the_checkpoint_and_the_schedules_that_it_is_told_to_take(cfg, tmp_path):
    del cfg["randomness"]
    former = Runner.from_cfg({**cfg, "work_dir": str(tmp_path / "former"), "randomness": {"seed": 7}})
    former.train()
    checkpoint = former.run_dir / "epoch_1"
    runner = Runner.from_cfg({**cfg, "param_scheduler": []})
    with pytest.raises(ConfigError, match="`resume_optimizer` must be True"):
        runner.resume(checkpoint, resume_optimizer=False)
    runner.resume(checkpoint, resume_param_scheduler=False)
    assert (runner.seed, runner.iter, runner.param_schedulers) == (7, 4, [])
    late = Runner.from_cfg(cfg)
    _ = late.train_loop
    with pytest.raises(RuntimeError, match=r"the checkpoint 7\. Give that in `randomness`"):
        late.resume(checkpoint)


def test_ranks_that_start_again_resume_from_the_last_checkpoint_of_their_job(cfg, monkeypatch):
    monkeypatch.setenv(RESUME_SINCE, str(time.time() - 1))
    former = Runner.from_cfg(cfg)
    former.train()
    again = Runner.from_cfg(cfg)
    again.resume(former.run_dir / "epoch_1")
    assert again.iter == 8


def test_infos_of_the_hub_are_those_of_mmengine(cfg):
    seen = []

    class Seen(Hook):
        def before_val(self, runner):
            seen.append((runner.message_hub.get_info("epoch"), runner.message_hub.get_info("iter")))

    runner = Runner.from_cfg(Config(cfg))
    runner.register_hook(Seen())
    runner.train()
    assert seen == [(0, 3), (1, 7)]
    assert runner.message_hub.get_info("cfg") == Config(cfg).pretty_text


def test_a_metric_is_added_before_the_test(cfg, tmp_path):
    del cfg["train_dataloader"], cfg["train_cfg"], cfg["optim_wrapper"], cfg["param_scheduler"]
    runner = Runner.from_cfg(cfg)
    runner.test_evaluator.metrics.append(DumpResults(out_file_path=str(tmp_path / "found.pkl")))
    assert runner.test() == {"acc": 1.0}
    assert (tmp_path / "found.pkl").is_file()


def test_parts_are_built_one_by_one(cfg):
    runner = Runner.from_cfg(cfg)
    assert isinstance(runner.build_model({"type": "ToyModel"}), ToyModel)
    assert isinstance(runner.wrap_model(None, ToyModel()), ToyModel)  # one rank has no wrapper
    assert isinstance(runner.build_optim_wrapper(cfg["optim_wrapper"]), OptimWrapper)
    assert isinstance(runner.build_evaluator([{"type": "ToyMetric"}]), Evaluator)
    assert len(Runner.build_dataloader(LOADER)) == 4
    assert isinstance(runner.build_message_hub(), MessageHub)
    assert isinstance(runner.log_processor, LogProcessor)
    assert isinstance(runner.build_val_loop({}), ValLoop)
    assert [type(one).__name__ for one in runner.build_param_scheduler({"type": "StepLR", "step_size": 1})] == [
        "StepLR"
    ]


def test_a_backend_of_the_default_scope_gets_its_folder_from_the_runner(cfg):
    visualizers = Registry("visualizer", parent=registry.VISUALIZERS, scope="drawn")
    backends = Registry("visualizer backend", parent=registry.VISBACKENDS, scope="drawn")
    told = []

    @visualizers.register_module()
    class Own(Visualizer):
        pass

    @backends.register_module()
    class Lines(BaseVisBackend):
        def __init__(self, save_dir):
            super().__init__(save_dir)
            told.append(save_dir)

        experiment = None

        def _init_env(self):
            pass

    cfg |= {"default_scope": "drawn", "visualizer": {"type": "Own", "vis_backends": [{"type": "Lines"}]}}
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.visualizer.dataset_meta == ToyDataset.METAINFO
    assert told == [f"{runner.log_dir}/vis_data"]
    assert runner.visualizer.instance_name == runner.experiment_name


def test_a_flexible_runner_joins_the_ranks_that_are_found(cfg, monkeypatch):
    joined = []
    monkeypatch.setattr("lockstep.runner.start.join_ranks", lambda launcher, env_cfg: joined.append(launcher))
    for kind in (FlexibleRunner, Runner):
        kind.from_cfg(cfg)
    assert list(dict.fromkeys(joined)) == [None, "none"]


def test_a_loop_of_ones_own_may_make_others_from_configs(cfg):
    runner = Runner.from_cfg(cfg)
    loader = Runner.build_dataloader(LOADER)
    metric = {"type": "ToyMetric"}
    for data, evaluator in ((loader, metric), (LOADER, [metric]), (LOADER, {"type": "Evaluator", "metrics": metric})):
        loop = ValLoop(runner, data, evaluator)
        assert [type(one).__name__ for one in loop.evaluator.metrics] == ["ToyMetric"]
        assert [sorted(batch) for batch in loop.dataloader] == [sorted(batch) for batch in loader]


def test_a_runner_type_names_the_runner(cfg):
    runner = RUNNERS.build({**cfg, "runner_type": "FlexibleRunner", "strategy": {"type": "SingleDeviceStrategy"}})
    assert type(runner) is FlexibleRunner
    runner.train()
    assert runner.iter == 8


def test_an_error_of_the_model_is_not_hidden(cfg):
    @MODELS.register_module(force=True)
    class Broken(ToyModel):
        def __init__(self):
            super().__init__()
            self.no_such_layer.weight  # noqa: B018 - raises

    runner = Runner.from_cfg({**cfg, "model": {"type": "Broken"}})
    with pytest.raises(AttributeError, match="no_such_layer"):
        runner.model  # noqa: B018 - raises


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_checkpoints_are_written_as_files_too(cfg, tmp_path):
    hook = {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 1, "as_files": True}
    Runner.from_cfg({**cfg, "default_hooks": {"checkpoint": hook}}).train()
    assert names_in(tmp_path) == ["epoch_2.pth", "last_checkpoint"]
    content = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    assert content["meta"]["epoch"] == 2
    destroy_dist()
    named = {"checkpoint": {**hook, "filename_tmpl": "epoch_{}.pth"}}
    longer = {**cfg, "train_cfg": {"by_epoch": True, "max_epochs": 3}, "resume": True, "default_hooks": named}
    resumed = Runner.from_cfg(longer)
    resumed.train()
    assert resumed.run.resume_from is not None  # from the checkpoint, which says more than the file
    assert {"epoch_3.pth"} == {*names_in(tmp_path)} - {"epoch_2.pth", "last_checkpoint"}
    destroy_dist()
    from_file = Runner.from_cfg({**longer, "load_from": str(tmp_path / "epoch_2.pth")})
    from_file.train()
    assert (resumed.iter, from_file.iter) == (12, 12)
    for one, other in zip(resumed.model.parameters(), from_file.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class DrawInValidation(Hook):
    """Draws a random number in each validation, and notes one after the training."""

    def __init__(self):
        self.after = None

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        torch.rand(1)

    def after_train(self, runner):
        self.after = torch.rand(1).item()


def test_a_validation_draws_from_the_random_numbers_of_the_training(cfg):
    drawn = []
    for interval in (1, 5):
        cfg["train_cfg"]["val_interval"] = interval
        runner = Runner.from_cfg({**cfg, "custom_hooks": [DrawInValidation()]})
        runner.train()
        drawn += [hook.after for hook in runner.hooks if isinstance(hook, DrawInValidation)]
        destroy_dist()
    first, second = drawn
    assert first != second


def test_a_runner_whose_weights_cannot_be_loaded_says_so_at_each_call(cfg, tmp_path):
    (tmp_path / "weights.pth").write_bytes(b"no weights")
    runner = Runner.from_cfg({**cfg, "load_from": str(tmp_path / "weights.pth")})
    for _ in range(2):
        with pytest.raises(ConfigError):
            runner.test()


class OwnLoop(BaseLoop):
    """A loop that validates by itself, and does not when it resumes."""

    def __init__(self, runner, dataloader):
        super().__init__(runner, dataloader)
        self._iter = self._epoch = 0
        self.max_epochs, self.max_iters = 4, 4 * len(self.dataloader)

    def run(self):
        self.runner.call_hook("before_train")
        for _ in range(self._epoch, self.max_epochs):
            self.runner.call_hook("before_train_epoch")
            self.runner.model.train()
            for idx, batch in enumerate(self.dataloader):
                self.runner.call_hook("before_train_iter", batch_idx=idx, data_batch=batch)
                outputs = self.runner.model.train_step(batch, optim_wrapper=self.runner.optim_wrapper)
                self.runner.call_hook("after_train_iter", batch_idx=idx, data_batch=batch, outputs=outputs)
                self._iter += 1
            self.runner.call_hook("after_train_epoch")
            self._epoch += 1
            self.runner.val_loop.run()
        self.runner.call_hook("after_train")


class Rates(Hook):
    """Notes a number that each epoch draws, and the rate that each validation changes; a signal comes in one."""

    priority = "VERY_LOW"

    def __init__(self, stop_in=None):
        self.rates, self.drawn, self.stop_in = [], [], stop_in

    def before_train_epoch(self, runner):
        self.drawn.append(float(torch.rand(())))

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx == 0 and runner.epoch == self.stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
            while not runner.agreement.is_asked:
                time.sleep(0.01)

    def after_val_epoch(self, runner, metrics=None):
        self.rates += runner.optim_wrapper.get_lr()["lr"]


def test_a_signal_in_a_validation_of_an_own_loop_stops_after_it(cfg):
    schedule = {"type": "ReduceOnPlateauLR", "monitor": "acc", "rule": "less", "factor": 0.5, "patience": 0}
    cfg |= {"train_cfg": {"type": OwnLoop}, "param_scheduler": schedule}
    whole, stopped, resumed = Rates(), Rates(stop_in=2), Rates()
    Runner(**{**cfg, "work_dir": f"{cfg['work_dir']}/whole"}, custom_hooks=[whole]).train()
    with pytest.raises(Preempted):
        Runner(**cfg, custom_hooks=[stopped]).train()
    Runner(**cfg, custom_hooks=[resumed], resume=True).train()
    assert (len(stopped.rates), whole.rates) == (2, [0.1, 0.05, 0.025, 0.025])
    assert stopped.rates + resumed.rates == whole.rates
    assert stopped.drawn + resumed.drawn == whole.drawn


class TwoPasses(ToyModel):
    """Makes two backward passes in each step."""

    def train_step(self, data, optim_wrapper):
        for _ in range(2):
            losses = self(**self.data_preprocessor(data, True), mode="loss")
            optim_wrapper.update_params(losses["loss"])
        return losses


class OwnIteration(EpochBasedTrainLoop):
    """A loop with an iteration of its own."""

    def run_iter(self, idx, data_batch):
        super().run_iter(idx, data_batch)


class OwnRun(EpochBasedTrainLoop):
    """A loop that does something before it runs."""

    def run(self):
        return super().run()


def test_a_loop_with_own_methods_resumes_in_the_window_that_was_open(cfg, tmp_path):
    cfg["model"] = {"type": TwoPasses}
    cfg["optim_wrapper"]["accumulative_counts"] = 3  # of 8 backward passes in an epoch, 2 are in an open window
    weights = []
    for kind in (EpochBasedTrainLoop, OwnIteration, OwnRun):
        cfg |= {"train_cfg": {"type": kind, "max_epochs": 2}, "work_dir": str(tmp_path / kind.__name__)}
        Runner(**cfg).train()
        (saved,) = tmp_path.glob(f"{kind.__name__}/*/epoch_1")
        resumed = Runner(**{**cfg, "work_dir": f"{cfg['work_dir']}/resumed"}, load_from=str(saved), resume=True)
        resumed.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in resumed.model.parameters()]))
    assert torch.equal(weights[1], weights[0])
    assert torch.equal(weights[2], weights[0])


@pytest.mark.parametrize("first", [1, 2])
def test_workers_that_a_validation_keeps_draw_no_number_when_a_run_resumes(cfg, first):
    cfg |= {"val_dataloader": {**LOADER, "num_workers": 1, "persistent_workers": True}}
    cfg["train_cfg"] = {"by_epoch": True, "max_epochs": 4, "val_begin": first}
    whole, stopped, resumed = Rates(), Rates(), Rates()
    Runner(**{**cfg, "work_dir": f"{cfg['work_dir']}/whole"}, custom_hooks=[whole]).train()
    for hook, last in ((stopped, 2), (resumed, 4)):
        Runner(
            **cfg | {"train_cfg": {**cfg["train_cfg"], "max_epochs": last}}, custom_hooks=[hook], resume=True
        ).train()
    assert stopped.drawn + resumed.drawn == whole.drawn
    assert len(set(whole.drawn)) == 4


class Noting(BaseModel):
    """Notes the samples that it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, inputs, mode="loss"):
        self.seen.append([int(one) for one in inputs])
        return {"loss": self.layer(torch.stack(list(inputs))).square().mean()}


def test_a_file_of_a_training_by_iterations_goes_on_at_its_sample(tmp_path):
    def trained(place, iterations, **options):
        model = Noting()
        data = [{"inputs": torch.tensor([float(index)])} for index in range(10)]
        loader = {"batch_size": 4, "dataset": data, "sampler": {"type": "InfiniteSampler", "shuffle": True}}
        hook = {"type": "CheckpointHook", "by_epoch": False, "interval": 8, "as_files": True}
        Runner(
            model,
            str(tmp_path / place),
            train_dataloader=loader,
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
            train_cfg={"by_epoch": False, "max_iters": iterations, "val_interval": 99},
            default_hooks={"checkpoint": hook},
            randomness={"seed": 0},
            **options,
        ).train()
        destroy_dist()
        return model.seen

    whole = trained("whole", 12)
    trained("half", 8)
    assert trained("rest", 12, resume=True, load_from=str(tmp_path / "half" / "iter_8.pth")) == whole[8:]


def test_the_hub_of_a_run_keeps_counts_also_in_checkpoints(cfg, tmp_path):
    class Right(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            MessageHub.get_current_instance().update_scalar("train/right", 6.0, 8)

    runner = Runner.from_cfg({**cfg, "custom_hooks": [Right()]})
    runner.train()
    assert runner.message_hub.get_scalar("train/right").mean() == 0.75
    destroy_dist()
    cfg["train_cfg"] = {**cfg["train_cfg"], "max_epochs": 3}
    resumed = Runner.from_cfg({**cfg, "resume": True})
    resumed.train()
    assert resumed.message_hub.get_scalar("train/right").mean() == 0.75


@pytest.mark.parametrize("options", [{}, {"log_processor": {"by_epoch": True}}])
def test_each_metric_is_in_the_hub_once_for_each_validation(cfg, options):
    runner = Runner.from_cfg({**cfg, **options})
    runner.train()
    names = [name for name in runner.message_hub.log_scalars if name.startswith("val/") and "time" not in name]
    assert names
    assert {name: len(runner.message_hub.get_scalar(name).values) for name in names} == dict.fromkeys(names, 2)
