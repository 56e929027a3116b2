"""What `lockstep config check` says of optim wrappers and schedules before anything is built."""

from __future__ import annotations

import pytest

from lockstep.config import Config
from lockstep.lint import find_faults

SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}


def found(**changes) -> list[str]:
    cfg = Config({"model": {"type": "torch.nn.Identity"}, "optim_wrapper": SGD, **changes})
    return [fault.sentence(cfg) for fault in find_faults(cfg)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"optim_wrapper": {"type": "AmpOptimWrapper", **SGD, "los_scale": 1}},
            "`optim_wrapper.los_scale` = 1 is not an argument of the optim wrapper `AmpOptimWrapper`: did you mean "
            "`loss_scale`?",
        ),
        (
            {"optim_wrapper": {"type": "AmpOptimWrapper", **SGD, "loss_scale": "dynamc"}},
            "`optim_wrapper.loss_scale` = 'dynamc' must be Union[Literal['dynamic'], float",
        ),
        (
            {"optim_wrapper": {**SGD, "paramwise_cfg": {"custom_key": {}}}},
            "`optim_wrapper.paramwise_cfg.custom_key` is no key of `optim_wrapper.paramwise_cfg`: did you mean "
            "`custom_keys`?",
        ),
        (
            {"optim_wrapper": {**SGD, "paramwise_cfg": {"bias_lr_mult": "2"}}},
            "`optim_wrapper.paramwise_cfg.bias_lr_mult` = '2' must be a number",
        ),
        (
            {"optim_wrapper": {**SGD, "paramwise_cfg": {"custom_keys": {"head": 2}}}},
            "`optim_wrapper.paramwise_cfg.custom_keys.head` = 2 must be a dict such as dict(lr_mult=0.1)",
        ),
        (
            {"optim_wrapper": {**SGD, "paramwise_cfg": {"custom_keys": ["head"]}}},
            "`optim_wrapper.paramwise_cfg.custom_keys` must be a dict of parts of parameters' names",
        ),
        (
            {"optim_wrapper": {"head": {**SGD, "paramwise_cfg": {"bias_mult": 2}}}},
            "`optim_wrapper.head.paramwise_cfg.bias_mult` = 2 is no key of `optim_wrapper.head.paramwise_cfg`: did you "
            "mean `bias_lr_mult`?",
        ),
        (
            {"optim_wrapper": {**SGD, "constructor": "DefaultOptimWraperConstructor"}},
            "`optim_wrapper.constructor` = 'DefaultOptimWraperConstructor' is no optim wrapper constructor",
        ),
        (
            {"optim_wrapper": {**SGD, "constructor": "DefaultOptimWrapperConstructor", "clip": 1}},
            "`optim_wrapper.clip` = 1 is not an argument of the optim wrapper `OptimWrapper`: did you mean "
            "`clip_grad`?",
        ),
        (
            {"param_scheduler": [{"type": "CosineAnnealingMomentum", "T_mx": 1}]},
            "`param_scheduler.0.T_mx` = 1 is not an argument of the parameter scheduler `CosineAnnealingMomentum`: did "
            "you mean `T_max`?",
        ),
        (
            {"param_scheduler": {"type": "ReduceOnPlateau"}},
            "`param_scheduler.type` = 'ReduceOnPlateau' is no parameter scheduler in the registry of scope `lockstep`: "
            "did you mean `ReduceOnPlateauLR`?",
        ),
        (
            {"param_scheduler": {"type": "StepLR"}},
            "`param_scheduler` must have the key `step_size`, which the parameter scheduler `StepLR` needs",
        ),
    ],
)
def test_a_fault_is_named(changes, says):
    (fault,) = found(**changes)
    assert fault.startswith(says)


def test_what_is_right_is_left_alone():
    schedules = [
        {"type": "LinearLR", "start_factor": 0.01, "by_epoch": False, "end": 5},
        {"type": "OneCycleLR", "eta_max": 1, "begin": 1, "convert_to_iter_based": True},
        {"type": "ReduceOnPlateauLR", "monitor": "acc", "rule": "greater"},
        {"type": "torch.optim.lr_scheduler.CosineAnnealingLR", "eta_min": 0.1},
        {"type": "CosineAnnealingParamScheduler", "param_name": "weight_decay", "eta_min_ratio": 0.1},
    ]
    amp = {
        "type": "AmpOptimWrapper", **SGD, "dtype": "bfloat16", "loss_scale": {"init_scale": 8}, "use_fsdp": True,
        "accumulative_counts": 2, "clip_grad": {"max_norm": 1}, "constructor": None,
        "paramwise_cfg": {"norm_decay_mult": 0, "custom_keys": {"a.b": {"lr_mult": 1}}, "bypass_duplicate": True},
    }  # fmt: skip
    assert found(optim_wrapper=amp, param_scheduler=schedules) == []
    assert found(optim_wrapper={**SGD, "constructor": dict, "anything": 1}, param_scheduler={"a": schedules}) == []
