"""The Runner, as MMEngine's first pages and its documentation of the Runner show it, on one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from documented.toys import Accuracy, Net, Points, arguments, training_only
from environments import LOCKSTEP
from torch import nn
from torch.optim import SGD

from mmengine.config import Config
from mmengine.dataset import DefaultSampler, default_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import BaseModel, ImgDataPreprocessor
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATASETS, LOOPS, METRICS, MODELS, RUNNERS
from mmengine.runner import EpochBasedTrainLoop, Runner, load_checkpoint, set_random_seed
from mmengine.structures import BaseDataElement

pytestmark = pytest.mark.filterwarnings("ignore")

for _registry, _entry in ((MODELS, Net), (DATASETS, Points), (METRICS, Accuracy)):
    _registry.register_module(name=f"Documented{_entry.__name__}", module=_entry, force=True)


def config(work_dir, **changes):
    """A whole run in one config."""
    data = dict(
        dataset=dict(type="DocumentedPoints", size=12),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
        batch_size=4,
    )
    cfg = dict(
        model=dict(type="DocumentedNet", width=4),
        work_dir=str(work_dir),
        train_dataloader=data,
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.1)),
        param_scheduler=dict(type="MultiStepLR", milestones=[1], gamma=0.1),
        val_dataloader=copy.deepcopy(data),
        val_cfg=dict(),
        val_evaluator=dict(type="DocumentedAccuracy"),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
        randomness=dict(seed=1),
        experiment_name=f"documented_{abs(hash(str(work_dir)))}",
    )
    return Config({**cfg, **changes})


def test_the_first_page_trains_and_validates(tmp_path):
    runner = Runner(**arguments(tmp_path))
    before = copy.deepcopy(runner.model.state_dict()) if not LOCKSTEP else None
    runner.train()
    assert (runner.epoch, runner.iter) == (2, 6)
    assert before is None or not torch.equal(before["layers.0.weight"], runner.model.state_dict()["layers.0.weight"])


def test_validation_and_test_return_metrics(tmp_path):
    runner = Runner(**arguments(tmp_path, train_dataloader=None, train_cfg=None, optim_wrapper=None))
    assert set(runner.val()) == {"toy/accuracy"}
    assert 0 <= runner.test()["toy/accuracy"] <= 1


def test_a_runner_of_a_config(tmp_path):
    runner = Runner.from_cfg(config(tmp_path))
    runner.train()
    assert isinstance(runner.model, Net)
    assert runner.optim_wrapper.get_lr()["lr"] == pytest.approx([0.01])


def test_a_runner_is_built_by_its_registry(tmp_path):
    assert isinstance(RUNNERS.build(config(tmp_path)), Runner)


def test_training_counts_iterations(tmp_path):
    cfg = dict(by_epoch=False, max_iters=5, val_interval=2)
    runner = Runner(**arguments(tmp_path, train_cfg=cfg))
    runner.train()
    assert runner.iter == 5


def test_each_later_pass_of_a_training_by_iterations_draws_a_number_when_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # MMEngine waits between two passes
    drawn = []

    class Draw(Hook):
        def before_train(self, runner):
            torch.manual_seed(11)

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            drawn.append(torch.rand(()).item())

    batches = dict(dataset=Points(), batch_size=4, sampler=dict(type="DefaultSampler"), collate_fn=default_collate)
    changes = dict(train_cfg=dict(by_epoch=False, max_iters=7), custom_hooks=[Draw()], train_dataloader=batches)
    Runner(**training_only(tmp_path, **changes)).train()
    torch.manual_seed(11)
    expected = []
    for iteration in range(7):
        if iteration in (3, 6):  # a data loader seeds its workers by a number of torch's global generator
            torch.empty((), dtype=torch.int64).random_()
        expected.append(torch.rand(()).item())
    assert drawn == expected


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine resumes with other random numbers")
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_training_by_iterations_resumes_at_each_place_of_a_pass(tmp_path, stop):
    class Draw(Hook):
        def __init__(self):
            self.drawn = []

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            self.drawn.append(torch.rand(()).item())

    def trained(folder, iters, **changes):
        batches = dict(dataset=Points(), batch_size=4, sampler=dict(type="DefaultSampler"), collate_fn=default_collate)
        saved = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=10))
        draw = Draw()
        changes |= dict(train_cfg=dict(by_epoch=False, max_iters=iters), custom_hooks=[draw], default_hooks=saved)
        Runner(**training_only(folder, train_dataloader=batches, **changes)).train()
        return draw.drawn

    whole = trained(tmp_path / "whole", 7)
    assert trained(tmp_path / "parts", stop) == whole[:stop]
    assert trained(tmp_path / "parts", 7, resume=True) == whole[stop:]


def test_a_model_of_several_losses(tmp_path):
    class Two(Net):
        def forward(self, points, labels, mode="tensor"):
            if mode != "loss":
                return super().forward(points, labels, mode)
            scores = self.layers(points)
            return {
                "loss_a": scores.mean(),
                "loss_b": [scores.pow(2).mean(), scores.abs().mean()],
                "acc": torch.tensor(1.0),
            }

    seen = []

    class Look(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append({name: float(value) for name, value in outputs.items()})

    Runner(**training_only(tmp_path, model=Two(), custom_hooks=[Look()])).train()
    assert seen[0].keys() == {"loss", "loss_a", "loss_b", "acc"}
    assert seen[0]["loss"] == pytest.approx(seen[0]["loss_a"] + seen[0]["loss_b"])


def test_a_train_step_of_ones_own(tmp_path):
    class Pair(BaseModel):
        """Two networks that are trained in turn, as in the documentation's GAN."""

        def __init__(self):
            super().__init__()
            self.generator, self.critic = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, points, labels=None, mode="tensor"):
            return self.generator(points)

        def train_step(self, data, optim_wrapper):
            data = self.data_preprocessor(data, True)
            points, _ = data
            with optim_wrapper["critic"].optim_context(self.critic):
                loss = -self.critic(points).mean() + self.critic(self.generator(points).detach()).mean()
            optim_wrapper["critic"].update_params(loss)
            with optim_wrapper["generator"].optim_context(self.generator):
                fooled = -self.critic(self.generator(points)).mean()
            optim_wrapper["generator"].update_params(fooled)
            return {"critic_loss": loss.detach(), "generator_loss": fooled.detach()}

    model = Pair()
    before = copy.deepcopy(model.state_dict())
    wrappers = OptimWrapperDict(
        generator=OptimWrapper(optimizer=SGD(model.generator.parameters(), lr=0.1)),
        critic=OptimWrapper(optimizer=SGD(model.critic.parameters(), lr=0.2)),
    )
    runner = Runner(**training_only(tmp_path, model=model, optim_wrapper=wrappers))
    runner.train()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items() if "weight" in name)
    assert runner.optim_wrapper.get_lr()["critic.lr"] == [0.2]


def test_gradients_are_accumulated_in_a_run(tmp_path):
    steps = []

    class Counting(SGD):
        def step(self, closure=None):
            steps.append(1)
            return super().step(closure)

    model = Net()
    wrapper = OptimWrapper(optimizer=Counting(model.parameters(), lr=0.1), accumulative_counts=2)
    Runner(**training_only(tmp_path, model=model, optim_wrapper=wrapper)).train()
    assert len(steps) == 3


@pytest.mark.parametrize("by_epoch", [True, False])
def test_schedules_of_a_run(tmp_path, by_epoch):
    rates = []

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            rates.append(runner.optim_wrapper.get_lr()["lr"][0])

    schedule = dict(type="StepLR", step_size=1, gamma=0.5, by_epoch=by_epoch)
    Runner(**training_only(tmp_path, param_scheduler=schedule, custom_hooks=[Look()])).train()
    assert rates == pytest.approx([0.1] * 3 + [0.05] * 3 if by_epoch else [0.1 / 2**i for i in range(6)])


def test_a_warm_up_by_iterations_of_an_epoch(tmp_path):
    rates = []

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            rates.append(runner.optim_wrapper.get_lr()["lr"][0])

    schedules = [
        dict(type="LinearLR", start_factor=0.1, by_epoch=True, begin=0, end=1, convert_to_iter_based=True),
        dict(type="MultiStepLR", by_epoch=True, milestones=[1], gamma=0.1),
    ]
    Runner(**training_only(tmp_path, param_scheduler=schedules, custom_hooks=[Look()])).train()
    assert rates[:3] == pytest.approx([0.01, 0.055, 0.1])
    assert rates[3:] == pytest.approx([0.01] * 3)


def test_a_config_of_a_dataloader(tmp_path):
    cfg = dict(
        dataset=dict(type="DocumentedPoints", size=10),
        batch_size=4,
        num_workers=0,
        sampler=dict(type="DefaultSampler", shuffle=True),
        drop_last=True,
    )
    built = Runner.build_dataloader(cfg, seed=5)
    assert isinstance(built.sampler, DefaultSampler)
    assert len(built) == 2
    cfg = dict(cfg, sampler=dict(type="InfiniteSampler", shuffle=False), num_batch_per_epoch=1)
    assert [len(batch[1]) for batch, _ in zip(Runner.build_dataloader(cfg), range(1), strict=False)] == [4]


def test_a_dataset_that_is_built_is_taken(tmp_path):
    built = Runner.build_dataloader(
        dict(dataset=Points(6), batch_size=2, sampler=dict(type="DefaultSampler", shuffle=False))
    )
    assert [len(batch[0]) for batch in built] == [2, 2, 2]


def test_the_same_seed_gives_the_same_weights():
    set_random_seed(7)
    one = torch.rand(3)
    set_random_seed(7)
    assert torch.equal(one, torch.rand(3))


def test_the_seed_of_a_run(tmp_path):
    def first(name):
        runner = Runner(**training_only(tmp_path / name, model=dict(type="DocumentedNet"), randomness=dict(seed=9)))
        runner.train()
        return runner.model.state_dict()["layers.0.weight"]

    assert torch.equal(first("a"), first("b"))


def test_weights_are_initialised_before_training(tmp_path):
    class Constant(Net):
        def init_weights(self):
            for one in self.parameters():
                nn.init.constant_(one, 0.25)

    seen = []

    class Look(Hook):
        def before_train(self, runner):
            seen.extend(float(one.detach().mean()) for one in runner.model.parameters())

    Runner(**training_only(tmp_path, model=Constant(), custom_hooks=[Look()])).train()
    assert seen == [0.25] * 4


def test_a_loop_of_ones_own(tmp_path):
    @LOOPS.register_module(force=True)
    class CountingLoop(EpochBasedTrainLoop):
        batches = 0

        def run(self):
            CountingLoop.batches += len(self.dataloader) * self.max_epochs
            return super().run()

    Runner(**training_only(tmp_path, train_cfg=dict(type="CountingLoop", max_epochs=2))).train()
    assert CountingLoop.batches == 6


def test_an_evaluator_that_is_built(tmp_path):
    evaluator = Evaluator(Accuracy())
    runner = Runner(
        **arguments(tmp_path, train_dataloader=None, train_cfg=None, optim_wrapper=None, val_evaluator=evaluator)
    )
    assert "toy/accuracy" in runner.val()
    assert evaluator.dataset_meta["classes"] == ("below", "above")


def test_metrics_get_data_elements_as_dicts(tmp_path):
    class Elements(Net):
        def forward(self, points, labels, mode="tensor"):
            if mode == "predict":
                return [BaseDataElement(label=int(label), metainfo={"id": 3}) for label in labels]
            return super().forward(points, labels, mode)

    class Kinds(BaseMetric):
        def process(self, data_batch, data_samples):
            self.results += [(type(one), one["id"], one.pop("label") in (0, 1)) for one in data_samples]

        def compute_metrics(self, results):
            return {"are_dicts": results == [(dict, 3, True)] * 8}

    class Look(Hook):
        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            assert all(type(one) is BaseDataElement and "label" in one for one in outputs)

        def before_val_epoch(self, runner):
            assert runner.val_evaluator.dataset_meta["classes"] == ("below", "above")

    metric = dict(type=Kinds)
    runner = Runner(
        **arguments(tmp_path, model=Elements(), val_evaluator=metric, test_evaluator=[metric], custom_hooks=[Look()])
    )
    runner.train()
    assert runner.val() == {"are_dicts": True}
    assert runner.test() == {"are_dicts": True}


def test_several_metrics(tmp_path):
    metrics = [dict(type=Accuracy, prefix="a"), dict(type=Accuracy, prefix="b")]
    runner = Runner(
        **arguments(tmp_path, train_dataloader=None, train_cfg=None, optim_wrapper=None, val_evaluator=metrics)
    )
    assert set(runner.val()) == {"a/accuracy", "b/accuracy"}


def test_validation_begins_late_and_is_rare(tmp_path):
    validated = []

    class Look(Hook):
        def before_val(self, runner):
            validated.append(runner.epoch)

    cfg = dict(by_epoch=True, max_epochs=5, val_begin=2, val_interval=2)
    Runner(**arguments(tmp_path, train_cfg=cfg, custom_hooks=[Look()])).train()
    assert validated == [2, 4, 5]


def test_the_interval_of_validations_changes(tmp_path):
    validated = []

    class Look(Hook):
        def before_val(self, runner):
            validated.append(runner.epoch)

    cfg = dict(by_epoch=True, max_epochs=6, val_interval=3, dynamic_intervals=[(5, 1)])
    Runner(**arguments(tmp_path, train_cfg=cfg, custom_hooks=[Look()])).train()
    assert validated == [3, 4, 5, 6]  # the new interval holds already at the end of the epoch before


def test_a_preprocessor_of_batches(tmp_path):
    class Pictures(BaseModel):
        def __init__(self):
            super().__init__(data_preprocessor=dict(type="ImgDataPreprocessor", mean=[1.0] * 3, std=[2.0] * 3))
            self.layer = nn.Linear(3, 1)

        def forward(self, inputs, data_samples=None, mode="tensor"):
            seen.append(inputs)
            return {"loss": self.layer(inputs.mean(dim=(2, 3))).mean()}

    seen = []
    samples = [dict(inputs=torch.full((3, 4, 4), 5, dtype=torch.uint8)) for _ in range(4)]
    data = dict(
        dataset=samples,
        batch_size=2,
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="pseudo_collate"),
    )
    model = Pictures()
    assert isinstance(model.data_preprocessor, ImgDataPreprocessor)
    Runner(**training_only(tmp_path, model=model, train_dataloader=data)).train()
    assert seen[0].shape == (2, 3, 4, 4)
    assert torch.equal(seen[0], torch.full((2, 3, 4, 4), 2.0))


def test_arguments_that_belong_together(tmp_path):
    with pytest.raises(ValueError, match="val"):
        Runner(**arguments(tmp_path, val_dataloader=None))


# Checkpoints.


def test_weights_are_loaded_before_training(tmp_path):
    model = Net()
    torch.save({"state_dict": model.state_dict(), "meta": {}}, tmp_path / "start.pth")
    runner = Runner(
        **training_only(
            tmp_path,
            model=Net(),
            load_from=str(tmp_path / "start.pth"),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        )
    )
    runner.train()
    assert torch.equal(runner.model.state_dict()["layers.0.weight"], model.state_dict()["layers.0.weight"])

    class Change(Hook):
        def after_load_checkpoint(self, runner, checkpoint):
            checkpoint["state_dict"]["layers.0.bias"] = torch.full((8,), 4.5)

    state = {**model.state_dict(), "unknown": torch.ones(2), "layers.2.weight": torch.ones(5, 8)}
    del state["layers.2.bias"]
    torch.save({"state_dict": state, "meta": {}}, tmp_path / "part.pth")
    runner = Runner(**arguments(tmp_path, load_from=str(tmp_path / "part.pth"), custom_hooks=[Change()]))
    assert MessageHub.get_current_instance() is runner.message_hub
    runner.test()  # with the weights that fit
    assert torch.equal(runner.model.state_dict()["layers.0.weight"], model.state_dict()["layers.0.weight"])
    assert runner.model.layers[0].bias.tolist() == [4.5] * 8
    if LOCKSTEP:
        log = "".join(file.read_text() for file in tmp_path.rglob("log.txt"))
        assert f"loaded the weights of {tmp_path / 'part.pth'}" in log  # not of the copy that a hook may change


def test_a_training_resumes(tmp_path):
    whole = Runner(**training_only(tmp_path / "whole", train_cfg=dict(by_epoch=True, max_epochs=3)))
    torch.manual_seed(0)
    start = Net()
    twin = copy.deepcopy(start)
    whole = Runner(**training_only(tmp_path / "whole2", model=start, train_cfg=dict(by_epoch=True, max_epochs=3)))
    whole.train()
    first = Runner(**training_only(tmp_path / "part", model=twin, train_cfg=dict(by_epoch=True, max_epochs=2)))
    first.train()
    second = Runner(
        **training_only(
            tmp_path / "part",
            model=Net(),
            train_cfg=dict(by_epoch=True, max_epochs=3),
            resume=True,
            experiment_name="documented_second",
        )
    )
    second.train()
    assert (second.epoch, second.iter) == (3, 9)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value)


def test_the_last_checkpoint_of_a_run_is_found(tmp_path):
    runner = Runner(**training_only(tmp_path, default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1))))
    runner.train()
    from mmengine.runner import find_latest_checkpoint

    places = [tmp_path, *(path for path in sorted(tmp_path.rglob("*")) if path.is_dir())]
    found = next(path for path in map(find_latest_checkpoint, map(str, places)) if path)
    model = Net()
    load_checkpoint(model, found)
    assert torch.equal(model.state_dict()["layers.0.weight"], runner.model.state_dict()["layers.0.weight"])


def test_a_folder_for_each_run(tmp_path):
    runner = Runner.from_cfg(config(tmp_path))
    runner.train()
    assert any(tmp_path.rglob("*.py"))
    assert Path(runner.work_dir) == tmp_path
    assert any(tmp_path.rglob("*.log")) or any(tmp_path.rglob("log.txt"))
