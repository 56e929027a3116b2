"""Configs and models of installed packages, by `package::path`."""

from __future__ import annotations

import pytest

SCRIPT = """
from mmengine.config import Config
from mmengine.hub import get_config, get_model
cfg = get_config("mmpretrain::resnet/resnet18_8xb16_cifar10.py", pretrained=True)
answers["weights"] = cfg.model_path
answers["model"] = cfg.model.to_dict() if hasattr(cfg.model, "to_dict") else dict(cfg.model)
model = get_model("mmpretrain::resnet/resnet18_8xb16_cifar10.py")
answers["parameters"] = sum(one.numel() for one in model.parameters())
with open("child.py", "w") as file:
    file.write("_base_ = 'mmpretrain::resnet/resnet18_8xb16_cifar10.py'\\nmodel = dict(head=dict(num_classes=3))\\n")
child = Config.fromfile("child.py")
answers["child"] = [child.model.head.num_classes, child.model.backbone.depth, child.train_dataloader.batch_size]
"""


def test_configs_and_models_of_a_package_are_those_of_mmengine(both):
    ours, theirs = both(SCRIPT)
    assert ours == theirs
    assert ours["child"] == [3, 18, 16]


def test_wrong_names_are_told():
    from mmengine.hub import get_config

    with pytest.raises(ValueError, match="package::path"):
        get_config("a.py")
    with pytest.raises(FileNotFoundError):
        get_config("mmpretrain::nothing.py")
