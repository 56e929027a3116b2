"""Loops, checkpoint hooks and registries that users change, on one process; the losses are those of the plain ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from documented.toys import Accuracy, Net, arguments, loader, training_only
from environments import LOCKSTEP

from mmengine.config import Config
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS, LOOPS, MODELS, Registry
from mmengine.runner import (
    BaseLoop,
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    Runner,
    TestLoop,
    ValLoop,
    load_checkpoint,
)
from mmengine.runner.loops import _InfiniteDataloaderIterator

pytestmark = pytest.mark.filterwarnings("ignore")


class Losses(Hook):
    def __init__(self):
        self.found, self.points = [], []

    def before_train_epoch(self, runner):
        self.points.append(("epoch", runner.epoch))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.found.append(float(outputs["loss"]))
        self.points.append((batch_idx, runner.iter))


def trained(folder, **changes):
    torch.manual_seed(5)
    losses = Losses()
    model = Net()
    changes = {"custom_hooks": [losses], **changes}
    runner = Runner(**arguments(folder, model=model, **changes))
    runner.train()
    return losses, runner


@LOOPS.register_module(force=True)
class OwnIter(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        self.runner.call_hook("before_train_iter", batch_idx=idx, data_batch=data_batch)
        outputs = self.runner.model.train_step(data_batch, optim_wrapper=self.runner.optim_wrapper)
        self.runner.call_hook("after_train_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)
        self._iter += 1


@LOOPS.register_module(force=True)
class MoreIter(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        super().run_iter(idx, data_batch)


@LOOPS.register_module(force=True)
class OwnEpoch(EpochBasedTrainLoop):
    def run_epoch(self):
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        for idx, data_batch in enumerate(self.dataloader):
            self.run_iter(idx, data_batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1


@LOOPS.register_module(force=True)
class OwnRun(EpochBasedTrainLoop):
    def run(self):
        self.runner.call_hook("before_train")
        while self._epoch < self._max_epochs and not self.stop_training:
            self.run_epoch()
            self._decide_current_val_interval()
            if self._epoch >= self.val_begin and self._epoch % self.val_interval == 0:
                self.runner.val_loop.run()
        self.runner.call_hook("after_train")
        return self.runner.model


@LOOPS.register_module(force=True)
class OnlyALoop(BaseLoop):
    def __init__(self, runner, dataloader, max_epochs):
        super().__init__(runner, dataloader)
        self._max_epochs, self._epoch, self._iter = max_epochs, 0, 0
        self._max_iters = max_epochs * len(self.dataloader)

    max_epochs = property(lambda self: self._max_epochs)
    max_iters = property(lambda self: self._max_iters)
    epoch = property(lambda self: self._epoch)
    iter = property(lambda self: self._iter)

    def run(self):
        self.runner.call_hook("before_train")
        for _ in range(self._epoch, self._max_epochs):
            OwnEpoch.run_epoch(self)
            self.runner.val_loop.run()
        self.runner.call_hook("after_train")

    run_iter = OwnIter.run_iter


@pytest.mark.parametrize("kind", ["OwnIter", "MoreIter", "OwnEpoch", "OwnRun", "OnlyALoop"])
def test_a_loop_of_ones_own_trains_as_the_plain_one(tmp_path, kind):
    plain, plain_runner = trained(tmp_path / "plain")
    own, runner = trained(tmp_path / "own", train_cfg=dict(type=kind, max_epochs=2))
    assert own.found == plain.found
    assert len(own.found) == 6
    assert own.points == plain.points
    assert (runner.epoch, runner.iter) == (2, 6)
    if LOCKSTEP:
        assert recorded(runner) == recorded(plain_runner)


def recorded(runner):
    """Return the losses in a run's records."""
    lines = (runner.run_dir / "metrics.jsonl").read_text().splitlines()
    records = [one for one in map(json.loads, lines) if one["mode"] == "train"]
    assert all(one["samples_per_second"] > 0 for one in records)
    return [round(one["loss"], 5) for one in records]


def test_a_loop_of_ones_own_resumes(tmp_path):
    whole, _ = trained(tmp_path / "whole", train_cfg=dict(type="OnlyALoop", max_epochs=3))
    trained(tmp_path / "own", train_cfg=dict(type="OnlyALoop", max_epochs=2))
    more, runner = trained(tmp_path / "own", train_cfg=dict(type="OnlyALoop", max_epochs=3), resume=True)
    assert more.found == whole.found[6:]
    assert runner.iter == 9


@LOOPS.register_module(force=True)
class OwnIterations(IterBasedTrainLoop):
    def run_iter(self, data_batch):
        self.seen = [*getattr(self, "seen", []), self._iter]
        super().run_iter(data_batch)


@LOOPS.register_module(force=True)
class OwnCourse(IterBasedTrainLoop):
    def run(self):
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")
        self.dataloader_iterator = _InfiniteDataloaderIterator(self.dataloader)
        while self._iter < self._max_iters:
            self.run_iter(next(self.dataloader_iterator))
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")


@pytest.mark.parametrize("kind", ["OwnIterations", "OwnCourse"])
def test_a_loop_by_iterations_of_ones_own_trains_as_the_plain_one(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # MMEngine waits between two passes
    data = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=4)))
    plain, _ = trained(tmp_path / "plain", train_cfg=dict(by_epoch=False, max_iters=4, val_interval=9), **data)
    own, runner = trained(tmp_path / "own", train_cfg=dict(type=kind, max_iters=4, val_interval=9), **data)
    assert own.found == plain.found
    assert runner.iter == 4


@LOOPS.register_module(force=True)
class OwnValidation(ValLoop):
    def run_iter(self, idx, data_batch):
        self.batches = getattr(self, "batches", 0) + 1
        super().run_iter(idx, data_batch)


@LOOPS.register_module(force=True)
class OwnTest(TestLoop):
    def run(self):
        self.runner.call_hook("before_test")
        self.runner.call_hook("before_test_epoch")
        self.runner.model.eval()
        for idx, data_batch in enumerate(self.dataloader):
            self.run_iter(idx, data_batch)
        metrics = self.evaluator.evaluate(len(self.dataloader.dataset))
        self.runner.call_hook("after_test_epoch", metrics=metrics)
        self.runner.call_hook("after_test")
        return metrics


@LOOPS.register_module(force=True)
class OnlyAValidation(BaseLoop):
    def __init__(self, runner, dataloader, evaluator):
        super().__init__(runner, dataloader)
        self.evaluator = evaluator

    def run(self):
        self.runner.call_hook("before_val")
        self.runner.call_hook("after_val_epoch", metrics={"own": 1.5})
        self.runner.call_hook("after_val")
        return {"own": 1.5}


def test_evaluations_of_ones_own(tmp_path):
    changes = dict(val_cfg=dict(type="OwnValidation"), test_cfg=dict(type="OwnTest"))
    _, plain = trained(tmp_path / "plain")
    _, own = trained(tmp_path / "own", **changes)
    assert own.val_loop.batches == 4
    assert own.test() == plain.test()
    best = dict(checkpoint=dict(type="CheckpointHook", save_best="own", rule="greater"))
    if LOCKSTEP:  # MMEngine asks its hub for what its own loop leaves there
        _, own = trained(tmp_path / "only", val_cfg=dict(type="OnlyAValidation"), default_hooks=best)
        assert own.val_loop.metrics == {"own": 1.5}
        assert [one.name for one in (tmp_path / "only").glob("*/best_own*")] == ["best_own_epoch_1"]


@LOOPS.register_module(force=True)
class OverSets(BaseLoop):
    """Several data loaders, each with its evaluator, as projects on MMEngine write it."""

    def __init__(self, runner, dataloader, evaluator):
        super().__init__(runner, dataloader)
        self.evaluators = [runner.build_evaluator(one) if isinstance(one, dict | list) else one for one in evaluator]

    def run(self):
        self.runner.call_hook("before_val")
        metrics = {}
        self.runner.model.eval()
        for index, (batches, evaluator) in enumerate(zip(self.dataloader, self.evaluators, strict=True)):
            for batch in batches:
                with torch.no_grad():
                    outputs = self.runner.model.val_step(batch)
                evaluator.process(data_samples=outputs, data_batch=batch)
            found = evaluator.evaluate(len(batches.dataset))
            metrics |= {f"{index}/{name}": value for name, value in found.items()}
        self.runner.call_hook("after_val_epoch", metrics=metrics)
        self.runner.call_hook("after_val")
        return metrics


def test_a_loop_of_ones_own_gets_a_list_of_evaluators(tmp_path):
    sets = dict(
        val_dataloader=[loader(8), loader(4)],
        val_evaluator=[dict(type=Accuracy), dict(type=Accuracy)],
        val_cfg=dict(type="OverSets"),
    )
    _, own = trained(tmp_path, **sets)
    assert own.val().keys() == {"0/toy/accuracy", "1/toy/accuracy"}


@LOOPS.register_module(force=True)
class OverSetsOfItsOwn(OverSets):
    """The same without an attribute `dataloader` before the first set begins: `BaseLoop.__init__` is not called."""

    def __init__(self, runner, dataloader, evaluator):
        self._runner = runner
        self.dataloaders = [runner.build_dataloader(one) for one in dataloader]
        self.evaluators = [runner.build_evaluator(one) for one in evaluator]

    def run(self):
        self.runner.call_hook("before_val")
        self.runner.call_hook("before_val_epoch")
        self.runner.model.eval()
        metrics, done = {}, 0
        for index, (batches, evaluator) in enumerate(zip(self.dataloaders, self.evaluators, strict=True)):
            self.dataloader = batches  # MMEngine's IterTimerHook asks for it
            for batch in batches:
                self.runner.call_hook("before_val_iter", batch_idx=done, data_batch=batch)
                with torch.no_grad():
                    outputs = self.runner.model.val_step(batch)
                evaluator.process(data_samples=outputs, data_batch=batch)
                self.runner.call_hook("after_val_iter", batch_idx=done, data_batch=batch, outputs=outputs)
                done += 1
            found = evaluator.evaluate(len(batches.dataset))
            metrics |= {f"{index}/{name}": value for name, value in found.items()}
        self.runner.call_hook("after_val_epoch", metrics=metrics)
        self.runner.call_hook("after_val")
        return metrics


def test_a_loop_of_ones_own_may_set_its_data_loader_late(tmp_path):
    sets = dict(
        val_dataloader=[loader(8), loader(4)],
        val_evaluator=[dict(type=Accuracy), dict(type=Accuracy)],
        val_cfg=dict(type="OverSetsOfItsOwn"),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best="1/toy/accuracy", rule="greater")),
    )
    losses, own = trained(tmp_path, **sets)
    assert len(losses.found) == 6
    assert own.val().keys() == {"0/toy/accuracy", "1/toy/accuracy"}


def test_load_checkpoint_loads_at_once_and_returns_what_it_holds(tmp_path):
    source = Net()
    torch.save({"state_dict": source.state_dict(), "meta": {"epoch": 7}}, tmp_path / "weights.pth")
    runner = Runner(**training_only(tmp_path, model=Net()))
    assert runner.load_checkpoint(str(tmp_path / "weights.pth"))["meta"]["epoch"] == 7
    for name, value in source.state_dict().items():
        assert torch.equal(runner.model.state_dict()[name], value)


@HOOKS.register_module(force=True)
class OwnCheckpoints(CheckpointHook):
    saved = 0

    def _save_checkpoint(self, runner):
        OwnCheckpoints.saved += 1
        super()._save_checkpoint(runner)


class Change(Hook):
    def before_save_checkpoint(self, runner, checkpoint):
        assert len(checkpoint["param_schedulers"]) == 1
        assert {"log_scalars", "runtime_info"} <= set(checkpoint["message_hub"])
        checkpoint["state_dict"]["layers.0.bias"] = torch.full((8,), 4.5)
        checkpoint["meta"]["own"] = [checkpoint["meta"]["dataset_meta"]["classes"][0]]


def test_checkpoint_hooks_that_users_change(tmp_path):
    hooks = dict(checkpoint=dict(type="OwnCheckpoints", interval=1))
    schedule = dict(type="MultiStepLR", milestones=[1])
    data = loader()
    data.dataset.metainfo["scale"] = np.arange(3.0)
    given = dict(custom_hooks=[Change()], default_hooks=hooks, param_scheduler=schedule, train_dataloader=data)
    trained(tmp_path, cfg=Config(dict(width=8)), **given)
    assert OwnCheckpoints.saved == 2
    saved = next(tmp_path.glob("*/epoch_2" if LOCKSTEP else "epoch_2.pth"))
    runner = Runner(**training_only(tmp_path / "other", model=Net()))
    checkpoint = runner.load_checkpoint(str(saved))
    assert checkpoint["state_dict"]["layers.0.bias"].tolist() == [4.5] * 8
    assert checkpoint["meta"]["epoch"] == 2
    assert runner.model.layers[0].bias.tolist() == [4.5] * 8
    meta = load_checkpoint(Net(), str(saved))["meta"]
    assert meta["own"] == ["below"]
    assert meta["dataset_meta"]["classes"] == ("below", "above")
    assert meta["dataset_meta"]["scale"].tolist() == [0, 1, 2]
    assert "width = 8" in meta["cfg"]
    assert {"time", "experiment_name", "epoch", "iter"} <= meta.keys()


def test_what_hooks_add_to_a_checkpoint_comes_back(tmp_path):
    loaded = []

    class Keep(Hook):
        def before_save_checkpoint(self, runner, checkpoint):
            checkpoint["kept"] = {"count": runner.iter, "tensor": torch.arange(3.0), "names": ["a", "b"]}

        def after_load_checkpoint(self, runner, checkpoint):
            loaded.append(checkpoint["kept"])
            assert "layers.0.bias" in checkpoint["state_dict"]
            assert "classes" in checkpoint["meta"]["dataset_meta"]

    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1))
    trained(tmp_path, custom_hooks=[Keep()], default_hooks=hooks)
    assert loaded == []
    longer = dict(by_epoch=True, max_epochs=3)
    trained(tmp_path, custom_hooks=[Keep()], default_hooks=hooks, resume=True, train_cfg=longer)
    (kept,) = loaded
    assert (kept["names"], kept["tensor"].tolist()) == (["a", "b"], [0.0, 1.0, 2.0])
    assert kept["count"] in (5, 6)
    if LOCKSTEP:
        file = tmp_path / "a.pth"
        from mmengine.runner import export_checkpoint

        export_checkpoint(next(tmp_path.glob("*/epoch_2")), file)
        trained(tmp_path / "file", custom_hooks=[Keep()], load_from=str(file), resume=True, train_cfg=longer)
        assert (loaded[1]["names"], loaded[1]["count"]) == (kept["names"], kept["count"])


def test_entries_of_a_registry_are_taken_out_and_put_in():
    registry = Registry("thing", scope="own_loops")
    registry.register_module(name="A", module=Net)
    registry.module_dict["B"] = registry.module_dict.pop("A")
    assert registry.get("A") is None
    assert registry.get("B") is Net
    assert "ImgDataPreprocessor" in MODELS.module_dict


def test_the_backend_of_the_tutorial_is_taken(tmp_path):
    env_cfg = dict(cudnn_benchmark=False, backend="nccl", mp_cfg=dict(mp_start_method="fork"))
    Runner(**training_only(tmp_path, env_cfg=env_cfg)).train()
