"""Hooks: when they are called, in which order, and what the default ones do, as MMEngine's documentation shows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from documented.toys import Accuracy, Net, arguments, loader, training_only
from environments import LOCKSTEP
from torch import nn

import mmengine.hooks
from mmengine.config import ConfigDict
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, Hook, LoggerHook
from mmengine.hooks.test_time_aug_hook import PrepareTTAHook
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.model import BaseTTAModel
from mmengine.registry import HOOKS, LOG_PROCESSORS, MODELS
from mmengine.runner import LogProcessor, Runner, get_priority, set_random_seed

pytestmark = pytest.mark.filterwarnings("ignore")

POINTS = [
    "before_run", "after_run", "before_train", "after_train", "before_train_epoch", "after_train_epoch",
    "before_train_iter", "after_train_iter", "before_val", "after_val", "before_val_epoch", "after_val_epoch",
    "before_val_iter", "after_val_iter", "before_test", "after_test", "before_test_epoch", "after_test_epoch",
    "before_test_iter", "after_test_iter",
]  # fmt: skip


def recorder(calls, names=POINTS):
    """Return a hook that notes each point at which it is called."""

    def note(name):
        return lambda self, runner, *args, **kwargs: calls.append(name)

    return type("Recorder", (Hook,), {name: note(name) for name in names})()


def test_the_points_of_a_training_in_order(tmp_path):
    calls = []
    cfg = dict(by_epoch=True, max_epochs=1, val_interval=1)
    data = dict(train_dataloader=loader(8), val_dataloader=loader(4), train_cfg=cfg)
    Runner(**arguments(tmp_path, custom_hooks=[recorder(calls)], **data)).train()
    iteration = ["before_train_iter", "after_train_iter"]
    assert calls == [
        "before_run", "before_train", "before_train_epoch", *iteration, *iteration, "after_train_epoch",
        "before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val",
        "after_train", "after_run",
    ]  # fmt: skip


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine writes to other backends, and files to be published")
def test_records_and_checkpoints_go_through_the_file_system(caplog):
    LoggerHook(interval_exp_name=100, out_suffix=(".json",), keep_local=False, backend_args={"backend": "local"})
    CheckpointHook(save_param_scheduler=False, published_keys=["meta"], file_client_args={"backend": "local"})
    assert "`published_keys` does nothing" in caplog.text
    with pytest.raises(
        ValueError, match="`out_dir` must be None, but is 's3://bucket': records are written through the file"
    ):
        LoggerHook(out_dir="s3://bucket")
    with pytest.raises(ValueError, match=r"`backend_args` must be None, but is {.backend.*: checkpoints are written"):
        CheckpointHook(backend_args={"backend": "petrel"})


def test_the_points_of_a_training_by_iterations(tmp_path):
    calls = []
    cfg = dict(by_epoch=False, max_iters=2, val_interval=1000)
    Runner(**training_only(tmp_path, custom_hooks=[recorder(calls)], train_cfg=cfg)).train()
    iteration = ["before_train_iter", "after_train_iter"]
    assert calls == [
        "before_run", "before_train", "before_train_epoch", *iteration, *iteration, "after_train_epoch",
        "after_train", "after_run",
    ]  # fmt: skip


def test_the_points_of_a_test_in_order(tmp_path):
    calls = []
    Runner(**arguments(tmp_path, custom_hooks=[recorder(calls)], test_dataloader=loader(4))).test()
    assert calls == [
        "before_run", "before_test", "before_test_epoch", "before_test_iter", "after_test_iter", "after_test_epoch",
        "after_test", "after_run",
    ]  # fmt: skip


def test_what_hooks_are_given(tmp_path):
    seen = {}

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.setdefault("before", (batch_idx, len(data_batch)))

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.setdefault("after", (batch_idx, sorted(outputs), runner.iter, runner.epoch))
            assert runner.message_hub.get_scalar("train/lr").current() == runner.optim_wrapper.get_lr()["lr"][0]

        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.setdefault("val", (batch_idx, len(outputs)))

        def after_val_epoch(self, runner, metrics=None):
            seen.setdefault("metrics", sorted(metrics))

    Runner(**arguments(tmp_path, custom_hooks=[Look()])).train()
    assert seen == {"before": (0, 2), "after": (0, ["loss"], 0, 0), "val": (0, 2), "metrics": ["toy/accuracy"]}


def test_the_message_hub_says_which_loop_it_is(tmp_path):
    stages = []

    class Stages(Hook):
        def note(self, runner, *args, **kwargs):
            stages.append(runner.message_hub.get_info("loop_stage"))

        before_train_epoch = after_val_epoch = after_test_epoch = after_train = note

    runner = Runner(**arguments(tmp_path, custom_hooks=[Stages()]))
    runner.train()
    assert stages == ["train", "val", "train", "val", None]
    runner.test()
    assert stages[5:] == ["test"]
    assert runner.message_hub.get_info("loop_stage") is None


def test_hooks_that_do_the_same_in_all_modes(tmp_path):
    modes = []

    class Same(Hook):
        def _before_epoch(self, runner, mode="train"):
            modes.append(mode)

        def _after_iter(self, runner, batch_idx, data_batch=None, outputs=None, mode="train"):
            modes.append(f"{mode} {batch_idx}")

    cfg = dict(by_epoch=True, max_epochs=1, val_interval=1)
    runner = Runner(
        **arguments(
            tmp_path, custom_hooks=[Same()], train_cfg=cfg, train_dataloader=loader(4), val_dataloader=loader(4)
        )
    )
    runner.train()
    assert modes == ["train", "train 0", "val", "val 0"]


def test_a_hook_says_at_which_points_it_acts():
    class Both(Hook):
        def after_run(self, runner) -> None: ...

        def _before_epoch(self, runner, mode="train") -> None: ...

    assert {*POINTS, "before_save_checkpoint", "after_load_checkpoint"} <= {*Both.stages}
    epochs = {"before_train_epoch", "before_val_epoch", "before_test_epoch"}
    assert set(Both().get_triggered_stages()) == {"after_run", *epochs}


def test_hooks_of_higher_priority_come_first(tmp_path):
    order = []

    def hook(name, priority):
        def before_train(self, runner):
            order.append(name)

        return type(name, (Hook,), {"before_train": before_train, "priority": priority})()

    hooks = [hook("last", "LOWEST"), hook("normal", "NORMAL"), hook("first", "VERY_HIGH"), hook("second", 35)]
    Runner(**training_only(tmp_path, custom_hooks=hooks)).train()
    assert order == ["first", "second", "normal", "last"]


def test_a_config_gives_a_priority(tmp_path):
    order = []

    @HOOKS.register_module(force=True)
    class DocumentedSayer(Hook):
        def __init__(self, word):
            self.word = word

        def before_train(self, runner):
            order.append(self.word)

    hooks = [
        dict(type="DocumentedSayer", word="late", priority="LOW"),
        dict(type="DocumentedSayer", word="early", priority="HIGH"),
    ]
    Runner(**training_only(tmp_path, custom_hooks=hooks)).train()
    assert order == ["early", "late"]


def test_a_hook_is_registered_by_hand(tmp_path):
    calls = []
    runner = Runner(**training_only(tmp_path))
    runner.register_hook(recorder(calls, ["before_train", "after_train"]), priority="HIGH")
    runner.train()
    assert calls == ["before_train", "after_train"]


@pytest.mark.parametrize(
    ("given", "number"), [("HIGHEST", 0), ("very_high", 10), ("NORMAL", 50), ("LOWEST", 100), (33, 33)]
)
def test_priorities_are_names_or_numbers(given, number):
    assert get_priority(given) == number


def test_wrong_priorities():
    with pytest.raises(ValueError):
        get_priority(101)
    with pytest.raises(TypeError):
        get_priority(1.5)
    with pytest.raises(KeyError):
        get_priority("loud")


def test_every_so_many_times():
    hook, runner = Hook(), SimpleNamespace(epoch=3, iter=5)
    assert hook.every_n_epochs(runner, 2)
    assert not hook.every_n_epochs(runner, 3)
    assert hook.every_n_epochs(runner, 2, 2)
    assert hook.every_n_train_iters(runner, 3)
    assert not hook.every_n_train_iters(runner, 4)
    assert hook.every_n_inner_iters(3, 4)
    assert not hook.every_n_inner_iters(3, 5)
    assert not hook.every_n_epochs(runner, -1)


def test_the_ends_of_epochs_and_of_the_training(tmp_path):
    seen = []

    class Ends(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append((self.end_of_epoch(runner.train_dataloader, batch_idx), self.is_last_train_iter(runner)))

        def after_train_epoch(self, runner):
            seen.append(self.is_last_train_epoch(runner))

    Runner(**training_only(tmp_path, train_dataloader=loader(8), custom_hooks=[Ends()])).train()
    assert seen == [(False, False), (True, False), False, (False, False), (True, True), True]


def test_a_default_hook_is_removed_or_changed(tmp_path):
    runner = Runner(
        **training_only(tmp_path, default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1)))
    )
    runner.train()
    assert not list(tmp_path.rglob("*epoch_*"))


# The points of MMEngine's default hooks: a subclass calls `super()` in no others.
POINTS_OF = {
    "CheckpointHook": {"before_train", "after_train", "after_train_epoch", "after_train_iter", "after_val_epoch"},
    "DistSamplerSeedHook": {"before_train_epoch"},
    "IterTimerHook": {
        "before_train",
        *(f"{when}_{mode}_{what}" for when in ("before", "after") for mode in ("train", "val", "test")
          for what in ("epoch", "iter")),
    },
    "LoggerHook": {
        "before_run", "after_run", "after_train_iter", "after_val_iter", "after_test_iter", "after_val_epoch",
        "after_test_epoch",
    },
    "ParamSchedulerHook": {"after_train_iter", "after_train_epoch", "after_val_epoch"},
}  # fmt: skip


@pytest.mark.parametrize("name", POINTS_OF)
def test_a_subclass_calls_super_only_where_its_base_does_something(tmp_path, name):
    base = getattr(mmengine.hooks, name)
    if not LOCKSTEP:
        every = {f"{when}_{mode}{what}" for when in ("before", "after") for mode in ("train", "val", "test")
                 for what in ("", "_epoch", "_iter")} | {"before_run", "after_run"}  # fmt: skip
        for_all = {f"_{when}_{what}": [f"{when}_{mode}_{what}" for mode in ("train", "val", "test")]
                   for when in ("before", "after") for what in ("epoch", "iter")}  # fmt: skip
        own = {point for point in every if getattr(base, point) is not getattr(Hook, point)}
        own |= {one for short, points in for_all.items() for one in points
                if getattr(base, short) is not getattr(Hook, short)}  # fmt: skip
        assert own == POINTS_OF[name]

    def nothing(self, runner, *args, **kwargs):
        pass

    points = [*POINTS, "before_save_checkpoint", "after_load_checkpoint"]
    body = {point: nothing for point in points if point not in POINTS_OF[name]}
    if name in ("DistSamplerSeedHook", "ParamSchedulerHook"):  # MMEngine's have no `__init__`
        body["__init__"] = lambda self: None
    slots = {"CheckpointHook": "checkpoint", "DistSamplerSeedHook": "sampler_seed", "IterTimerHook": "timer",
             "LoggerHook": "logger", "ParamSchedulerHook": "param_scheduler"}  # fmt: skip
    schedule = dict(type="LinearLR", start_factor=0.1, begin=0, end=5, by_epoch=False)

    def trained(hooks, folder):
        set_random_seed(0)
        runner = Runner(**arguments(folder, model=Net(), param_scheduler=schedule, default_hooks=hooks))
        runner.train()
        return [one.detach().tolist() for one in runner.model.parameters()], runner.optim_wrapper.get_lr()

    subclass = type("Own", (base,), body)
    assert trained({slots[name]: subclass()}, tmp_path / "own") == trained({}, tmp_path / "plain")


# Checkpoints.


def saved(folder):
    names = {path.stem for path in folder.rglob("*")}
    return sorted(name for name in names if name.startswith(("epoch_", "iter_", "best_")))


def test_a_checkpoint_after_each_epoch(tmp_path):
    Runner(**training_only(tmp_path, default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)))).train()
    assert saved(tmp_path) == ["epoch_1", "epoch_2"]


def test_checkpoints_after_iterations(tmp_path):
    cfg = dict(type="CheckpointHook", by_epoch=False, interval=2)
    Runner(**training_only(tmp_path, default_hooks=dict(checkpoint=cfg))).train()
    assert saved(tmp_path) == ["iter_2", "iter_4", "iter_6"]


@pytest.mark.parametrize("touched", [False, True])
def test_a_hook_sets_up_before_the_run_what_it_then_takes_from_the_checkpoint(tmp_path, touched):
    class Counts(Hook):
        def before_run(self, runner):
            self.count = 0

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            self.count += 1

        def before_save_checkpoint(self, runner, checkpoint):
            checkpoint["count"] = self.count

        def after_load_checkpoint(self, runner, checkpoint):
            self.count = checkpoint["count"]

    def trained(epochs, **more):
        cfg = dict(by_epoch=True, max_epochs=epochs)
        hook = Counts()
        runner = Runner(**training_only(tmp_path, train_cfg=cfg, custom_hooks=[hook], **more))
        if touched:
            assert runner.train_loop.max_epochs == epochs  # which is built then
        runner.train()
        return hook.count

    assert trained(2) == 6
    assert trained(3, resume=True, experiment_name="documented_counts") == 9


def test_only_some_checkpoints_are_kept(tmp_path):
    cfg = dict(type="CheckpointHook", interval=1, max_keep_ckpts=1)
    Runner(**training_only(tmp_path, default_hooks=dict(checkpoint=cfg))).train()
    assert saved(tmp_path) == ["epoch_2"]


def test_the_best_checkpoint_is_kept(tmp_path):
    cfg = dict(type="CheckpointHook", interval=1, save_best="toy/accuracy", rule="greater")
    Runner(**arguments(tmp_path, default_hooks=dict(checkpoint=cfg))).train()
    assert any(name.startswith("best_toy_accuracy") for name in saved(tmp_path))


@pytest.mark.parametrize("by_config", [True, False])
def test_the_best_may_be_found_by_itself(tmp_path, by_config):
    hook = (
        dict(type="CheckpointHook", interval=1, save_best="auto")
        if by_config
        else CheckpointHook(interval=1, save_best="auto")
    )
    Runner(
        **arguments(tmp_path, default_hooks=dict(checkpoint=hook), val_evaluator=dict(type=Accuracy, prefix="acc"))
    ).train()
    assert any(name.startswith("best_") for name in saved(tmp_path))


# Other hooks.


def test_averaged_weights(tmp_path):
    averages = []

    class Look(Hook):
        priority = "LOWEST"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            averages.append(
                (runner.model.layers[0].bias.detach().clone(), ema.ema_model.module.layers[0].bias.detach().clone())
            )

    ema = EMAHook(ema_type="ExponentialMovingAverage", momentum=0.5)
    Runner(**training_only(tmp_path, custom_hooks=[ema, Look()])).train()
    expected = averages[0][1]
    for trained, averaged in averages[1:]:
        expected = expected * 0.5 + trained * 0.5
        torch.testing.assert_close(averaged, expected)


def test_averaged_weights_are_validated_and_put_back(tmp_path):
    seen = {}

    class Look(Hook):
        priority = "VERY_LOW"

        def before_val(self, runner):
            seen["before"] = runner.model.layers[0].bias.detach().clone()

        def after_val_epoch(self, runner, metrics=None):
            pass

        def before_val_iter(self, runner, batch_idx, data_batch=None):
            seen["during"] = runner.model.layers[0].bias.detach().clone()

        def after_val(self, runner):
            seen["after"] = runner.model.layers[0].bias.detach().clone()

    Runner(**arguments(tmp_path, custom_hooks=[EMAHook(momentum=0.01), Look()])).train()
    assert not torch.equal(seen["during"], seen["after"])


def test_training_stops_early(tmp_path):
    epochs = []

    class Look(Hook):
        def after_train_epoch(self, runner):
            epochs.append(runner.epoch)

    stop = EarlyStoppingHook(monitor="toy/accuracy", rule="greater", min_delta=1.0, patience=2)
    cfg = dict(by_epoch=True, max_epochs=9, val_interval=1)
    Runner(**arguments(tmp_path, train_cfg=cfg, custom_hooks=[stop, Look()])).train()
    assert 2 <= len(epochs) <= 4


# The log processor.


def hub_of(**values):
    hub = MessageHub(f"documented_{len(values)}_{id(values)}")
    for name, numbers in values.items():
        for number in numbers:
            hub.update_scalar(name.replace("__", "/"), number)
    return hub


def runner_of(hub, **kwargs):
    given = dict(
        message_hub=hub, epoch=0, iter=3, max_epochs=2, max_iters=20, train_dataloader=range(10),
        val_dataloader=range(5),
        train_loop=SimpleNamespace(dataloader=range(10)), val_loop=SimpleNamespace(dataloader=range(5)),
        test_loop=SimpleNamespace(dataloader=range(5)), _train_loop=SimpleNamespace(stop_training=False), world_size=1,
        logger=None,
    )  # fmt: skip
    return SimpleNamespace(**{**given, **kwargs})


HISTORY = dict(train__lr=[0.1], train__time=[1.0, 1.0], train__data_time=[0.25], train__loss=[1.0, 2.0, 3.0, 6.0])


def test_values_are_smoothed_over_a_window():
    tag, text = LogProcessor(window_size=2).get_log_after_iter(runner_of(hub_of(**HISTORY)), 3, "train")
    assert (tag["loss"], tag["lr"]) == (4.5, 0.1)
    assert "Epoch(train)" in text
    assert "[1][ 4/10]" in text
    for part in ("lr: 1.0000e-01", "time: 1.0000", "data_time: 0.2500", "loss: 4.5000"):
        assert part in text


def test_lines_count_iterations():
    _, text = LogProcessor(by_epoch=False).get_log_after_iter(runner_of(hub_of(**HISTORY)), 3, "train")
    assert text.startswith("Iter(train) [ 4/20]")


def test_digits_are_chosen():
    _, text = LogProcessor(num_digits=2).get_log_after_iter(runner_of(hub_of(**HISTORY)), 3, "train")
    assert "loss: 3.00" in text


def test_further_values_of_a_history():
    custom = [
        dict(data_src="loss", log_name="loss_largest", method_name="max", window_size="global"),
        dict(data_src="loss", log_name="loss_epoch", method_name="mean", window_size="epoch"),
        dict(data_src="loss", method_name="min", window_size=3),
    ]
    processor = LogProcessor(window_size=1, custom_cfg=custom)
    tag, text = processor.get_log_after_iter(runner_of(hub_of(**HISTORY)), 3, "train")
    assert (tag["loss_largest"], tag["loss_epoch"], tag["loss"]) == (6.0, 3.0, 2.0)
    assert "loss_largest: 6.0000" in text


@HistoryBuffer.register_statistics
def second_largest(self, window_size=None):
    return sorted(self.data[0])[-2]


def test_a_statistic_of_ones_own_is_shown():
    custom = [dict(data_src="loss", log_name="second", method_name="second_largest")]
    tag, _ = LogProcessor(custom_cfg=custom).get_log_after_iter(runner_of(hub_of(**HISTORY)), 3, "train")
    assert tag["second"] == 3.0
    if LOCKSTEP:  # the hub of a run has buffers of another class
        from lockstep.logging import MessageHub as RunsHub

        hub = RunsHub()
        for name, (values, _) in ((name, buffer.data) for name, buffer in hub_of(**HISTORY).log_scalars.items()):
            for value in values:
                hub.update_scalar(name, float(value))
        tag, _ = LogProcessor(custom_cfg=custom).get_log_after_iter(runner_of(hub), 3, "train")
        assert tag["second"] == 3.0


def test_wrong_further_values():
    with pytest.raises(AssertionError):
        LogProcessor(custom_cfg=[dict(log_name="x")])
    with pytest.raises(AssertionError):
        LogProcessor(
            by_epoch=False, custom_cfg=[dict(data_src="loss", method_name="mean", log_name="x", window_size="epoch")]
        )
    with pytest.raises(AssertionError):
        LogProcessor(custom_cfg=[dict(data_src="loss", method_name="mean", log_name="x")] * 2)


def test_names_may_have_their_mode():
    tag, _ = LogProcessor(log_with_hierarchy=True).get_log_after_iter(runner_of(hub_of(**HISTORY)), 3, "train")
    assert "train/loss" in tag


def test_a_line_after_a_validation():
    hub = hub_of(val__acc=[0.5], val__time=[1.0], val__data_time=[0.5])
    tag, text = LogProcessor().get_log_after_epoch(runner_of(hub, epoch=1), 5, "val")
    assert tag["acc"] == 0.5
    assert text.startswith("Epoch(val) [1][5/5]")
    assert "acc: 0.5000" in text


def test_a_log_processor_is_built_from_a_config():
    built = LOG_PROCESSORS.build(dict(type="LogProcessor", window_size=50, by_epoch=False))
    assert (built.window_size, built.by_epoch) == (50, False)


def test_a_log_processor_in_a_run(tmp_path):
    custom = [dict(data_src="loss", log_name="loss_max", method_name="max", window_size="global")]
    cfg = dict(type="LogProcessor", window_size=3, custom_cfg=custom)
    hooks = dict(logger=dict(type="LoggerHook", interval=2))
    Runner(**arguments(tmp_path, log_processor=cfg, default_hooks=hooks)).train()
    logs = "".join(path.read_text() for path in [*tmp_path.rglob("*.log"), *tmp_path.rglob("log.txt")])
    assert "Epoch(train)" in logs
    assert "loss_max:" in logs
    assert "Epoch(val) [1][2/2]" in logs
    assert "toy/accuracy: " in logs


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine's takes no processor of this kind")
def test_a_log_processor_of_ones_own(tmp_path):
    lines = []

    @LOG_PROCESSORS.register_module(force=True)
    class Short(LogProcessor):
        def get_log_after_iter(self, runner, batch_idx, mode):
            tag, text = super().get_log_after_iter(runner, batch_idx, mode)
            lines.append(f"short {text}")
            return tag, lines[-1]

    Runner(
        **training_only(tmp_path, log_processor=dict(type="Short"), default_hooks=dict(logger=LoggerHook(interval=3)))
    ).train()
    assert len(lines) == 2


# Test-time augmentation.


class Plain(nn.Module):
    def __init__(self, factor=2.0, data_preprocessor=None):
        super().__init__()
        self.factor = factor

    def test_step(self, data):
        return [self.factor * one for one in data["inputs"]]


class MeanTTA(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return [sum(forms) / len(forms) for forms in data_samples_list]


def test_predictions_of_several_forms_are_merged():
    data = {"inputs": [[1.0, 10.0], [3.0, 30.0]]}
    assert MeanTTA(Plain()).test_step(data) == [4.0, 40.0]
    MODELS.register_module(name="DocumentedPlain", module=Plain, force=True)
    MODELS.register_module(name="DocumentedMeanTTA", module=MeanTTA, force=True)
    built = MODELS.build(dict(type="DocumentedMeanTTA", module=dict(type="DocumentedPlain", factor=1.0)))
    assert built.test_step(data) == [2.0, 20.0]


def test_data_of_several_forms_may_be_a_sequence():
    class Both(nn.Module):
        def test_step(self, data):
            return [one + two for one, two in zip(*data, strict=True)]

    assert MeanTTA(Both()).test_step(([[1], [3]], [[10], [30]])) == [22.0]


def test_a_hook_prepares_the_model_for_the_test(tmp_path):
    class TwoForms(Net):
        def test_step(self, data):
            return [(scores, labels) for scores, labels in [super().test_step(data)]]

    class First(BaseTTAModel):
        calls = 0

        def test_step(self, data):
            First.calls += 1
            return self.module.test_step(data)[0]

        def merge_preds(self, data_samples_list):
            return data_samples_list

    MODELS.register_module(name="DocumentedFirst", module=First, force=True)
    runner = Runner(
        **arguments(
            tmp_path,
            model=TwoForms(),
            train_dataloader=None,
            train_cfg=None,
            optim_wrapper=None,
            val_dataloader=None,
            val_cfg=None,
            val_evaluator=None,
        )
    )
    runner.register_hook(PrepareTTAHook(tta_cfg=ConfigDict(type="DocumentedFirst")))
    assert "toy/accuracy" in runner.test()
    assert First.calls == 2
