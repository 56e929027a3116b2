"""Configs that come with installed packages, and their models."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import load_checkpoint
from mmengine.utils import get_installed_path

__all__ = ["get_config", "get_model"]


def get_config(cfg_path: str, pretrained: bool = False) -> Config:
    """Return a config that comes with an installed package.

    Args:
        cfg_path: ``package::path``, such as ``mmdet::retinanet/retinanet_r18_fpn_1x_coco.py``.
        pretrained: also set `model_path` to the address of the weights that the package names for it.

    Raises:
        ValueError: `cfg_path` has another form, or the package names no weights for it.
        FileNotFoundError: the package has no such config.
    """
    package, colons, inner = cfg_path.partition("::")
    if not colons:
        raise ValueError(f"`cfg_path` must be package::path, but is {cfg_path!r}")
    folder = Path(get_installed_path(package)) / ".mim"
    cfg = Config.fromfile(folder / "configs" / inner)
    if pretrained:
        cfg.model_path = _weights(folder, inner)
    return cfg


def get_model(cfg_path: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return the model of a config that comes with an installed package.

    Args:
        cfg_path: as for `get_config`.
        pretrained: also load the weights that the package names for it.
        **kwargs: further arguments of the model.
    """
    package = cfg_path.partition("::")[0]
    cfg = get_config(cfg_path, pretrained)
    import_module(f"{package}.utils").register_all_modules(False)
    with MODELS.switch_scope_and_registry(package) as registry:
        model: nn.Module = registry.build({**kwargs, **cfg.model})
    if pretrained:
        load_checkpoint(model, cfg.model_path, map_location="cpu")
    return model


def _weights(folder: Path, config: str) -> str:
    """Return the address of the weights that the files of a package name for a config."""
    index = yaml.safe_load((folder / "model-index.yml").read_text(encoding="utf-8"))
    for name in index["Import"]:
        content = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
        models = content.get("Models", []) if isinstance(content, dict) else content
        for model in models:
            if str(model.get("Config", "")).removeprefix("configs/") == config and "Weights" in model:
                return str(model["Weights"])
    raise ValueError(f"the package names no weights for `{config}`; load the config without `pretrained`")
