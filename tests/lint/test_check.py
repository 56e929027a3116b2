"""What the lint finds, and what it leaves alone."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lockstep.config import Config
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.lint import check_config, find_faults
from lockstep.lint.parts import _nested_faults
from lockstep.model import MMFullyShardedDataParallel
from lockstep.registry import HOOKS, MODEL_WRAPPERS, MODELS, Registry

if TYPE_CHECKING:
    from nowhere import Anything

BUILT: list[str] = []
EXAMPLES = Path(__file__).parents[2] / "examples"


class Net(nn.Module):
    """Must never be built here."""

    def __init__(
        self,
        width: int,
        head: dict | None = None,
        stages: tuple[int, ...] = (),
        mode: Literal["fast", "exact"] = "fast",
        name: str = "net",
        anything: Anything = None,
        data_preprocessor=None,
    ) -> None:
        BUILT.append("Net")
        super().__init__()


class Head:
    def __init__(self, in_channels, bias=True):
        BUILT.append("Head")


class Open:
    def __init__(self, size, **kwargs):
        BUILT.append("Open")


class Data:
    def __init__(self, root="."):
        BUILT.append("Data")


class Metric:
    def __init__(self, topk: int = 1):
        BUILT.append("Metric")


class Watch(Hook):
    def __init__(self, interval: int = 1):
        BUILT.append("Watch")


@pytest.fixture(autouse=True)
def nothing_is_built():
    BUILT.clear()
    yield
    assert BUILT == []


def found(changes=(), /, **more):
    """Return the faults of a sound config with some changes, as sentences."""
    cfg = Config(
        {
            "model": {"type": Net, "width": 3},
            "train_dataloader": {"dataset": {"type": Data}, "batch_size": 2},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
            "train_cfg": {"by_epoch": True, "max_epochs": 2},
            **dict(changes, **more),
        }
    )
    return [fault.sentence(cfg) for fault in find_faults(cfg)]


def only(changes=(), /, **more):
    """Return the one fault there is."""
    (fault,) = found(changes, **more)
    return fault


def model(**arguments):
    return {"type": Net, "width": 3, **arguments}


def optimizer(**arguments):
    return {"optimizer": {"type": "SGD", **arguments}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"optm_wrapper": {}},
            "`optm_wrapper` is not an argument of Runner, and nothing reads it: did you mean `optim_wrapper`?",
        ),
        (
            {"banana": 1},
            "`banana` = 1 is not an argument of Runner, and nothing reads it. Remove it, or begin its name with an "
            "underscore if it is for somebody else",
        ),
        (
            {"data_preprocessor": {"non_blockin": True}},
            "`data_preprocessor.non_blockin` = True is not an argument of the model `BaseDataPreprocessor`: did you "
            "mean `non_blocking`?",
        ),
        ({"model": None}, "`model` = None must be given"),
        ({"model": 3}, "`model` must be a torch.nn.Module, its config or a function that returns it, but is 3 of int"),
        ({"model": {"width": 3}}, "`model` must have the key `type`, but has only ['width']"),
        ({"model": {"type": 3}}, "`model.type` = 3 must be a name, a class or a function"),
        ({"loss": nn.CrossEntropyLoss}, "but is the class CrossEntropyLoss. Give dict("),
        (
            {"model": {"type": Net}},
            "`model` must have the key `width`, which the model `Net` needs, but has only ['type']",
        ),
        (
            {"model": model(hed=None)},
            "`model.hed` = None is not an argument of the model `Net`: did you mean `head`?",
        ),
        (
            {"model": {"type": "nowhere.Net"}},
            "`model.type` = 'nowhere.Net' is no model in the registry of scope `lockstep`, nor is there a module "
            "`nowhere`",
        ),
        (
            {"model": {"type": "torch.nn.Linaer"}},
            "`model.type` = 'torch.nn.Linaer' is no model in the module `torch.nn`: did you mean `Linear`?",
        ),
        ({"model": model(width="3")}, "`model.width` = '3' must be int, but is text. Write the number without quotes"),
        (
            {"model": model(width="3e0")},
            "`model.width` = '3e0' must be int, but is text. Write the number without quotes; in YAML it needs a dot",
        ),
        (
            {"train_cfg": {"max_epochs": 3, "max_steps": 10}},
            "`train_cfg.max_steps` = 10 is not an argument of the loop `EpochBasedTrainLoop`: did you mean "
            "`max_iters`?",
        ),
        ({"model": model(width=2.5)}, "`model.width` = 2.5 must be int, but is a float"),
        ({"model": model(width=[3])}, "`model.width` must be int, but is a list"),
        ({"model": model(stages=3)}, "`model.stages` = 3 must be tuple[int, ...], but is an int"),
        ({"model": model(name={"a": 1})}, "`model.name` must be str, but is a dict"),
        ({"model": model(mode="slow")}, "`model.mode` = 'slow' must be Literal['fast', 'exact'], but is text"),
        (
            {"model": model(head={"type": Head, "in_channel": 3})},
            "`model.head.in_channel` = 3 is not an argument of `Head`: did you mean `in_channels`?",
        ),
        ({"train_dataloader": {"batch_size": 1}}, "`train_dataloader` must have the key `dataset`"),
        ({"train_dataloader": "data"}, "`train_dataloader` must be a config dict or a DataLoader, but is 'data'"),
        (
            {"train_dataloader": {"dataset": {"type": Data}, "batchsize": 2}},
            "`train_dataloader.batchsize` = 2 is not an argument of a data loader: did you mean `batch_size`?",
        ),
        (
            {"train_dataloader": {"dataset": {"type": Data}, "num_workers": "2"}},
            "`train_dataloader.num_workers` = '2' must be int",
        ),
        (
            {"train_dataloader": {"dataset": {"type": Data}, "sampler": {}, "shuffle": True}},
            "`train_dataloader.shuffle` = True contradicts `sampler`",
        ),
        (
            {"train_dataloader": {"dataset": {"type": Data}, "sampler": {"type": "DefaultSampler", "shufle": True}}},
            "`train_dataloader.sampler.shufle` = True is not an argument of the data sampler `DefaultSampler`: did you "
            "mean `shuffle`?",
        ),
        (
            {"train_dataloader": {"dataset": {"type": Data}, "split": "no"}},
            "`train_dataloader.split` = 'no' must be True, False or None, or 'ranks' for an iterable dataset",
        ),
        (
            {"train_dataloader": {"dataset": {"type": Data}, "splits": True}},
            "`train_dataloader.splits` = True is not an argument of a data loader: did you mean `split`?",
        ),
        ({"train_cfg": {"max_epochs": 1, "max_iters": 2}}, "have either `max_epochs` or `max_iters`, but has both"),
        (
            {"train_cfg": {"by_epoch": False, "max_epochs": 2}},
            "`train_cfg.by_epoch` = False contradicts `max_epochs`; leave it out, or give `max_iters`",
        ),
        (
            {"train_cfg": {"type": "IterBasedTrainLoop", "by_epoch": False, "max_iters": 2}},
            "`train_cfg` must have either `type` or `by_epoch`, but has both",
        ),
        ({"train_cfg": {"by_epoch": False}}, "`train_cfg` must have the key `max_iters`"),
        (
            {"train_cfg": {"max_epochs": 2, "val_intervall": 1}},
            "is not an argument of the loop `EpochBasedTrainLoop`: did you mean `val_interval`?",
        ),
        (
            {"optim_wrapper": optimizer(lerning_rate=1)},
            "`optim_wrapper.optimizer.lerning_rate` = 1 is not an argument of the optimizer `SGD`: did you mean `lr`?",
        ),
        (
            {"optim_wrapper": optimizer(lr="1e-3")},
            "`optim_wrapper.optimizer.lr` = '1e-3' must be float | torch.Tensor, but is text. Write the number without "
            "quotes; in YAML it needs a dot and a sign, as in 1.0e-3",
        ),
        ({"optim_wrapper": {}}, "`optim_wrapper` must have the key `optimizer`, but has only []"),
        (
            {"optim_wrapper": {"clip_grad": {"max_norm": 1}}},
            "`optim_wrapper` must have the key `optimizer`, but has only ['clip_grad']",
        ),
        (
            {"optim_wrapper": {**optimizer(), "acumulative_counts": 2}},
            "`optim_wrapper.acumulative_counts` = 2 is not an argument of the optim wrapper `OptimWrapper`: did you "
            "mean `accumulative_counts`?",
        ),
        (
            {"optim_wrapper": {**optimizer(), "clip_grad": {"maxnorm": 1}}},
            "`optim_wrapper.clip_grad` must have the key `max_norm`, but has only ['maxnorm']: did you mean `max_norm`",
        ),
        (
            {"optim_wrapper": {**optimizer(), "paramwise_cfg": {"custom_keys": {"head": {"lr_mul": 2}}}}},
            "`optim_wrapper.paramwise_cfg.custom_keys.head.lr_mul` = 2 is no key of "
            "`optim_wrapper.paramwise_cfg.custom_keys.head`: did you mean `lr_mult`?",
        ),
        (
            {"env_cfg": {"dist_cfg": {"backnd": "gloo"}}},
            "`env_cfg.dist_cfg.backnd` = 'gloo' is no key of `env_cfg.dist_cfg`: did you mean `backend`?",
        ),
        (
            {"param_scheduler": [{"type": "LinearLR"}, {"type": "StepLR", "by_epoch": False}]},
            "`param_scheduler.1` must have the key `step_size`",
        ),
        (
            {"optim_wrapper": {"generator": optimizer(), "critic": optimizer(momentm=1)}},
            "`optim_wrapper.critic.optimizer.momentm` = 1 is not an argument of the optimizer `SGD`: did you mean",
        ),
        (
            {"param_scheduler": {"generator": [{"type": "LinearLR"}], "critic": [{"type": "StepLR"}]}},
            "`param_scheduler.critic.0` must have the key `step_size`",
        ),
        ({"val_cfg": {}}, "`val_dataloader` must be given with `val_cfg`, but is None"),
        (
            {"test_dataloader": {"dataset": {"type": Data}}, "test_evaluator": [{"type": Metric, "top": 5}]},
            "`test_evaluator.0.top` = 5 is not an argument of the metric `Metric`: did you mean `topk`?",
        ),
        ({"val_dataloader": {"a": {"dataset": {"type": Data}, "batch_sise": 2}}}, "`val_dataloader.a.batch_sise` = 2"),
        ({"val_dataloader": [{"dataset": {"type": Data}}], "val_evaluator": {"b": {"type": Metric}}}, "key 'b'"),
        ({"default_hooks": {"chekpoint": {"interval": 2}}}, "did you mean `checkpoint`?"),
        ({"default_hooks": {"logger": {"intervall": 2}}}, "of the hook `LoggerHook`: did you mean `interval`?"),
        ({"custom_hooks": {"type": Watch}}, "`custom_hooks` must be a list of hooks or None"),
        ({"custom_hooks": [3]}, "`custom_hooks.0` = 3 must be a config dict or a built hook, but is of int"),
        ({"custom_hooks": [{"type": Watch, "intervl": 3}]}, "of the hook `Watch`: did you mean `interval`?"),
        ({"strategy": "colossalai"}, "needs the package colossalai, which is not installed: the recipe in docs"),
        ({"strategy": {"type": "deepspeed", "stage": 1}}, "needs the package deepspeed, which is not installed: pip"),
        ({"strategy": "dpp"}, "is no strategy in the registry of scope `lockstep`: did you mean `ddp`?"),
        ({"strategy": {"type": "fsdp", "auto_warp_policy": None}}, "did you mean `auto_wrap_policy`?"),
        ({"strategy": {"type": "FSDPStrategy", "model_wrapper": {"cpu_ofload": True}}}, "did you mean `cpu_offload`?"),
        (
            {"strategy": {"type": "fsdp", "model_wrapper": {"type": MMFullyShardedDataParallel, "cpu_ofload": True}}},
            "did you mean `cpu_offload`?",
        ),
        ({"strategy": {"type": "fsdp", "tensor_parallel": {"degre": 2}}}, "key 'degre': did you mean `degree`?"),
        ({"strategy": {"type": "fsdp", "converters": ["flaot8"]}}, "converters.0` = 'flaot8' is no converter in the"),
        (
            {"test_dataloader": {"dataset": {"type": Data}}, "test_evaluator": "Acuracy"},
            "`test_evaluator` = 'Acuracy' is no metric in the registry of scope `lockstep`: did you mean `Accuracy`?",
        ),
        # Keys that are no text, as YAML reads `on` and `1`.
        ({True: 1}, "`True` = 1 is not an argument of Runner, and nothing reads it"),
        ({"env_cfg": {True: "no"}}, "`env_cfg.True` = 'no' is no key of `env_cfg`"),
        ({"model": {"type": Net, 1: 2, "width": 3}}, "`model.1` = 2 is not an argument of the model `Net`"),
        ({"env_cfg": {"cudnn_bench": True}}, "is no key of `env_cfg`: did you mean `cudnn_benchmark`?"),
        ({"randomness": 7}, "`randomness` must be a dict or None, but is 7 of int"),
        ({"randomness": {"sed": 7}}, "`randomness.sed` = 7 is no key of `randomness`: did you mean `seed`?"),
        ({"auto_scale_lr": {"batch_size": 7}}, "is no key of `auto_scale_lr`: did you mean `base_batch_size`?"),
        ({"compile": {"full_graph": True}}, "is no key of `compile`: did you mean `fullgraph`?"),
        ({"log_level": "INFOO"}, "`log_level` must be a level of logging, but is 'INFOO': did you mean `INFO`?"),
        ({"resume": "yes"}, "`resume` must be True (from the last checkpoint, or from `load_from`) or False, but is"),
        ({"visualizer": {"type": "TensorBoard"}}, "did you mean `TensorBoardVisualizer`?"),
    ],
)  # fmt: skip
def test_a_fault_is_found_and_told_with_key_value_and_remedy(changes, says):
    assert says in only(changes)


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_toy.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert only(model={"type": "broken_toy.Net"}) == (
        "`model.type` = 'broken_toy.Net' cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"_note": "for my own tools", "custom_imports": {}, "default_scope": "mmengine", "log_processor": {}},
        {"model": nn.Identity()},
        {"model": model(width=3.0, stages=[1, 2], name=None, anything="x", mode="exact")},
        {"model": model(head={"type": "NotYetRegistered", "whatever": 1})},
        {"model": model(head={"type": Head, "zebra": 1})},  # who builds it may take it out
        {"model": model(head={"type": Head})},  # or add what is missing
        {"model": {"type": Open, "size": 3, "what": "ever"}},
        {"model": {"type": torch.nn.Identity}},
        {"train_dataloader": [torch.zeros(1)]},
        {"train_dataloader": {"dataset": Data, "batch_sampler": {"type": "BatchSampler", "drop_last": True}}},
        {"train_cfg": {"type": "IterBasedTrainLoop", "max_iters": 3, "val_interval": 1}},
        {"train_cfg": {"max_iters": 3, "batch_size_of": len, "dynamic_intervals": [(2, 1)]}},
        {"train_dataloader": {"dataset": {"type": Data}, "split": False}, "data_preprocessor": {"non_blocking": True}},
        {"train_dataloader": {"dataset": {"type": Data}, "split": "ranks"}},
        {"train_dataloader": {"dataset": {"type": Data}, "sampler": {"type": "InfiniteSampler", "shuffle": True}}},
        {"default_hooks": {"runtime_info": {"type": "RuntimeInfoHook"}, "logger": {"log_metric_by_epoch": False}}},
        {"optim_wrapper": SGD([torch.zeros(1, requires_grad=True)], lr=0.1)},
        {"optim_wrapper": {"constructor": dict, "generator": {"optimizer": {"type": "SGD"}}}},
        {"optim_wrapper": {**optimizer(lr=torch.tensor(0.1), momentum=0), "clip_grad": {"max_norm": 1}}},
        {"optim_wrapper": {**optimizer(), "clip_grad": {"type": "value", "clip_value": 1}}},
        {"optim_wrapper": {**optimizer(), "paramwise_cfg": {"custom_keys": {"a": {"lr_mult": 2, "momentum": 0}}}}},
        {"env_cfg": {"dist_cfg": {"backend": "gloo", "timeout": 60}}},
        {"param_scheduler": {"type": "CosineAnnealingLR", "by_epoch": True, "begin": 1, "end": 5}},
        {"param_scheduler": [{"type": torch.optim.lr_scheduler.StepLR, "step_size": 2}]},
        {"default_hooks": {"timer": None, "logger": {"interval": 5}, "mine": {"type": Watch, "priority": "LOW"}}},
        {"custom_hooks": [{"type": Watch, "priority": 70, "interval": 3}]},
        {"strategy": {"type": "ddp", "find_unused_parameters": True}},
        {"strategy": {"type": "fsdp", "tensor_parallel": 2, "mixed_precision": "bf16", "cpu_offload": True}},
        {"strategy": {"type": "fsdp", "converters": ["float8", nn.Sequential, {"type": "Float8", "skip": ["head"]}]}},
        {"test_dataloader": {"dataset": {"type": Data}}, "test_evaluator": ["Accuracy", {"type": Metric}]},
        {"visualizer": {"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]}},
        {"env_cfg": {"cudnn_benchmark": True, "dist_cfg": {"backend": "gloo"}, "mp_cfg": {"mp_start_method": "fork"}}},
        {"compile": True, "log_level": 10, "auto_scale_lr": {"enable": True, "base_batch_size": 16}},
        {"work_dir": None, "load_from": None, "resume": False, "visualizer": None},
    ],
)  # fmt: skip
def test_what_may_be_right_is_left_alone(changes):
    assert found(**changes) == []


def test_registered_names_count():
    MODELS.register_module("LintedNet", module=Net, force=True)
    try:
        assert found(model={"type": "LintedNet", "width": 1}) == []
        assert "did you mean `LintedNet`?" in only(model={"type": "LintdNet", "width": 1})
    finally:
        MODELS._entries.pop("LintedNet")


def test_helpers_of_the_file_are_no_faults_and_the_error_lists_file_line_and_option(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(
        dedent("""
            width = 3
            rate = 0.1
            unread = 7
            model = dict(
                type="torch.nn.Linear",
                in_features=width,
                out_featurs=4)
            optim_wrapper = dict(optimizer=dict(type="SGD", lr=rate))
        """)
    )
    cfg = Config.fromfile(path)
    cfg.merge_from_dict({"optim_wrapper.optimizer.momentum": "much"})
    with pytest.raises(ConfigError) as caught:
        check_config(cfg, needed=("model", "train_dataloader"))
    assert str(caught.value).splitlines() == [
        f"{path} has 5 faults:",
        f"  {path}:4: `unread` = 7 is not an argument of Runner, and nothing reads it. Remove it, or begin its name "
        "with an underscore if it is for somebody else",
        f"  {path}:8: `model.out_featurs` = 4 is not an argument of the model `Linear`: did you mean `out_features`?",
        f"  {path}:5: `model` must have the key `out_features`, which the model `Linear` needs, but has only "
        "['in_features', 'out_featurs', 'type']",
        "  an option: `optim_wrapper.optimizer.momentum` = 'much' must be float, but is text",
        "  `train_dataloader` must be given",
    ]
    cfg.dump(tmp_path / "dumped.py")
    dumped = Config.fromfile(tmp_path / "dumped.py")
    assert "unread" not in {fault.key for fault in find_faults(dumped)}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/config*.py")), ids=lambda path: path.parent.name)
def test_the_examples_have_no_faults(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    assert find_faults(Config.fromfile(path)) == []


def test_a_global_batch_size_contradicts_a_batch_size():
    loader = {"dataset": {"type": Data}, "global_batch_size": 12}
    assert not found(train_dataloader=loader)
    assert "train_dataloader.global_batch_size" in str(found(train_dataloader={**loader, "batch_size": 3}))


def test_what_mmengines_configs_hold_besides_is_known():
    validation = {"val_dataloader": {"dataset": {"type": Data}, "num_batch_per_epoch": 2}, "val_cfg": {}}
    assert not found(
        default_scope="mmengine",
        log_processor={"type": "LogProcessor", "by_epoch": True},
        model_wrapper_cfg={"type": "MMSeparateDistributedDataParallel", "broadcast_buffers": False},
        find_unused_parameters=True,
        sync_bn="torch",
        runner_type="Runner",
        env_cfg={"resource_limit": 4096, "mp_cfg": {"mp_start_method": "fork"}},
        val_evaluator={"type": "Evaluator", "metrics": [{"type": Metric}]},
        **validation,
    )
    assert only(model_wrapper_cfg={"type": "MMDistributedDataParalel"}) == (
        "`model_wrapper_cfg.type` = 'MMDistributedDataParalel' is no model wrapper in the registry of scope "
        "`lockstep`: did you mean `MMDistributedDataParallel`?"
    )
    assert only(val_evaluator={"metrics": {"type": Metric, "topq": 1}}, **validation) == (
        "`val_evaluator.metrics.topq` = 1 is not an argument of the metric `Metric`: did you mean `topk`?"
    )


def test_types_are_looked_for_in_the_default_scope():
    zoo = Registry("hook", parent=HOOKS, scope="lint_zoo")
    zoo.register_module("Watched", module=Watch)
    hooks = [{"type": "Watched", "interval": 2}]
    assert not found(custom_hooks=hooks, default_scope="lint_zoo")
    assert only(custom_hooks=hooks).startswith("`custom_hooks.0.type` = 'Watched' is no hook")


def test_a_scope_inside_of_a_part_is_heeded():
    zoo = Registry("model", parent=MODELS, scope="lint_models")
    zoo.register_module("Scoped", module=Counted)
    MODELS.register_module("Scoped", module=Described, force=True)
    inner = {"type": "Scoped", "_scope_": "lint_models", "counts": 2}
    assert not list(_nested_faults("model.head", inner, MODELS))
    elsewhere = _nested_faults("model.head", {"type": "Scoped", "counts": 2}, MODELS)
    assert [one.key for one in elsewhere] == ["model.head.counts"]


class Counted(nn.Module):
    def __init__(self, counts: int) -> None:
        super().__init__()


class Described(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()


def test_the_default_scope_of_a_script_hides_no_fault():
    cfg = Config({"default_scope": "__main__", "custom_hooks": [{"type": "Watched"}]})
    with pytest.raises(ConfigError, match=r"has 1 fault:\n.*'Watched' is no hook"):
        check_config(cfg, needed=())


def test_a_default_scope_that_is_not_imported_is_told_but_not_imported(tmp_path: Path, monkeypatch):
    (tmp_path / "lint_package").mkdir()
    (tmp_path / "lint_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    cfg = Config({"default_scope": "lint_package", "custom_hooks": [{"type": "Watched"}]})
    with pytest.raises(ConfigError, match=r"has 1 fault:\n.*\n.* add custom_imports=lint_package\.registry$"):
        check_config(cfg, needed=())
    assert "lint_package" not in sys.modules
    cfg.default_scope = "lint_nowhere"
    with pytest.raises(ConfigError) as caught:
        check_config(cfg, needed=())
    assert "custom_imports" not in str(caught.value)


def test_another_packages_wrapper_is_not_taken_for_ours():
    zoo = Registry("model wrapper", parent=MODEL_WRAPPERS, scope="lint_wrappers")
    zoo.register_module("MMFullyShardedDataParallel", module=Net)
    wrapper = {"type": "MMFullyShardedDataParallel", "_scope_": "lint_wrappers", "depth": 2}
    assert not found(strategy={"type": "fsdp", "model_wrapper": wrapper})
    assert "`strategy.model_wrapper.depth`" in only(strategy={"type": "fsdp", "model_wrapper": {"depth": 2}})


LOADERS = {"a": {"dataset": [1]}, "b": {"dataset": [2]}}


@pytest.mark.parametrize(
    ("evaluator", "faults"),
    [
        ({"a": "Accuracy", "b": "Accuracy"}, {}),
        ({"a": None, "b": {"type": "Accuracy"}}, {}),
        ({"a": {"metrics": ["Accuracy"]}, "b": ["Accuracy", {"type": "LossMetric"}]}, {}),
        ({"b": "Acuracy"}, {"val_evaluator.b": "did you mean"}),
        ({"a": []}, {"val_evaluator.a": "must have at least one metric"}),
        ({"a": {"metrics": []}}, {"val_evaluator.a.metrics": "must have at least one metric"}),
        ([], {"val_evaluator": "must have at least one metric"}),
        ([{"metrics": "Accuracy"}, {"metrics": ["Acuracy"]}], {"val_evaluator.1.metrics.0": "did you mean"}),
    ],
)
def test_evaluators_of_several_loaders(evaluator, faults):
    found = find_faults(Config({"val_dataloader": LOADERS, "val_evaluator": evaluator}), needed=())
    assert [fault.key for fault in found] == [*faults]
    assert all(faults[fault.key] in fault.says for fault in found)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("optim_wrapper.paramwise_cfg", "x", "must be a dict such as dict(bias_decay_mult=0.0)"),
        ("optim_wrapper.paramwise_cfg.custom_keys", {"head": {"lr_mult": "x"}}, "must be a number"),
        ("optim_wrapper.clip_grad", {"max_norm": "x"}, "must be a number, but is 'x'"),
        ("optim_wrapper.clip_grad", {"type": "nrm", "max_norm": 1}, "must be 'norm' or 'value', but is 'nrm'"),
        ("env_cfg.dist_cfg", "x", "must be a dict such as dict(backend='nccl')"),
    ],
)
def test_values_of_the_wrong_type_are_found_before_the_run(key, value, says):
    cfg = Config({"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}}, "env_cfg": {}})
    cfg.merge_from_dict({key: value})
    (fault,) = find_faults(cfg, needed=())
    assert fault.key.startswith(key)
    assert fault.says == says


def test_the_norm_may_be_measured_without_a_limit():
    clip = {"max_norm": float("inf")}
    cfg = Config({"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}, "clip_grad": clip}})
    assert not find_faults(cfg, needed=())
