"""Builds one model of each family of a package's configs, in the environment of the Python that runs it.

    python build_models.py out.json mmseg/unet mmdet/yolox=yolox/yolox_tiny_8xb8-300e_coco.py ...

A family is a folder of configs. Its first config whose model can be built is taken, or the one that is named; those
whose names say that the model is small come first. Weights behind addresses are left out. Each model has a process of
its own, with limits of time and memory, one after another.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BUILD_SECONDS, STEP_SECONDS = 15, 30  # of one core
MEMORY = 6 << 30  # in bytes, for weights, gradients and activations
SMALL = re.compile(r"r18|[-_](tiny|nano|mini|xxs|t|s|small|pico|atto|b0)(?![a-z0-9])|b0[-_]|[-_]18|r50(?!x)|resnet50")
ATTEMPTS = 2  # configs of a family


def folder_of(package: str) -> Path:
    """Return the folder with a package's tools and configs."""
    return Path(find_spec(package).origin).parent / ".mim"


def configs(package: str, family: str) -> list[str]:
    """Return the configs of a family, which may be in folders of the folder."""
    root = folder_of(package) / "configs"
    files = sorted((root / family).rglob("*.py"), key=lambda file: (len(file.parts), not SMALL.search(file.name), file))
    return [
        str(file.relative_to(root)) for file in files if "model" in file.read_text() or "_base_" in file.read_text()
    ]


def try_family(package: str, family: str, named: str | None) -> dict[str, Any]:
    """Return what the first config whose model can be built has given, and why those before it could not be built."""
    failed = {}
    for config in [named] if named else configs(package, family)[:ATTEMPTS]:
        found = _in_a_process(package, config)
        if "weights" in found:
            return {"config": config, **found, "failed": failed}
        failed[config] = found.get("error", "its process ended")
    return {"config": None, "failed": failed}


def _in_a_process(package: str, config: str) -> dict[str, Any]:
    """Return what a process has said of a model: all of it, or what it had said before it was ended."""
    reading, writing = os.pipe()
    gc.freeze()
    if (child := os.fork()) == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as out, open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            code = 1
            try:
                for found in _observe(package, config):
                    out.write(json.dumps(found) + "\n")
                    out.flush()
                code = 0
            finally:
                os._exit(code)
    os.close(writing)
    found: dict[str, Any] = {}
    with os.fdopen(reading) as said:
        for line in said:
            found |= json.loads(line)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended:
        why = "it takes too long" if ended == -signal.SIGPROF else f"its process ended with {ended}"
        found["step" if "weights" in found else "error"] = {"error": why} if "weights" in found else why
    return found


def _observe(package: str, config: str) -> Iterator[dict[str, Any]]:
    signal.setitimer(signal.ITIMER_PROF, BUILD_SECONDS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    try:
        cfg, model = _build(package, config)
        weights = {name: _digest(one) for name, one in model.state_dict().items()}
    except Exception as error:
        yield {"error": _sentence(error)}
        return
    yield {"parameters": sum(one.numel() for one in model.parameters()), "weights": weights}
    signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS)
    yield {"step": _step(package, cfg, model)}


def _build(package: str, config: str) -> tuple[Any, Any]:
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import init_default_scope
    from mmengine.runner import set_random_seed

    os.chdir(folder_of(package))  # configs name others from there
    cfg = Config.fromfile(f"configs/{config}")
    if "model" not in cfg:
        raise ValueError("the config has no model")
    init_default_scope(package)
    if "data_preprocessor" in cfg:
        cfg.model.setdefault("data_preprocessor", cfg.data_preprocessor)  # as the Runner does
    _without_weights_behind_addresses(cfg.model)
    set_random_seed(0)
    model = import_module(f"{package}.registry").MODELS.build(cfg.model)
    model.init_weights()
    model = revert_sync_batchnorm(model)
    model.train()  # that of some models returns nothing
    return cfg, model


def _without_weights_behind_addresses(cfg: Any) -> None:
    for value in cfg.values() if isinstance(cfg, dict) else cfg if isinstance(cfg, list) else ():
        _without_weights_behind_addresses(value)
    if not isinstance(cfg, dict):
        return
    for key in ("pretrained", "teacher_ckpt"):
        if isinstance(cfg.get(key), str):
            cfg[key] = None
    init = cfg.get("init_cfg")
    if isinstance(init, dict) and _is_pretrained(init):
        cfg["init_cfg"] = None
    elif isinstance(init, list):
        cfg["init_cfg"] = [one for one in init if not _is_pretrained(one)] or None


def _is_pretrained(cfg: Any) -> bool:
    kind = cfg.get("type")
    return getattr(kind, "__name__", str(kind)).endswith("Pretrained") or "checkpoint" in cfg


def _step(package: str, cfg: Any, model: Any) -> dict[str, Any]:
    """Return the losses, or else the outputs or the features, of one batch, and the gradients."""
    from batches import batches

    from mmengine.logging import MessageHub
    from mmengine.runner import set_random_seed

    for key, value in {"iter": 1, "epoch": 0, "max_iters": 100, "max_epochs": 10}.items():
        MessageHub.get_current_instance().update_info(key, value)  # some models ask for them
    # Batches keep their small size, whatever the config pads its own to.
    if package in ("mmdet", "mmyolo"):
        model.data_preprocessor.batch_augments = None
    state = {name: value.clone() for name, value in model.state_dict().items()}
    errors: dict[str, str] = {}
    for mode in ("loss", "tensor", "features"):
        for what, make in batches(package, cfg, model):
            try:
                set_random_seed(1)
                data = make()
                if package == "mmseg":
                    model.data_preprocessor.size, model.data_preprocessor.size_divisor = (
                        data["inputs"][0].shape[-2:],
                        None,
                    )
                data = model.data_preprocessor(data, training=True)
                set_random_seed(2)
                model.load_state_dict(state)
                values = _forward(model, data, mode)
                sum(values.values()).backward()
            except Exception as error:
                errors[f"{mode} of {what}"] = _sentence(error)
                model.zero_grad()
                continue
            return {
                "of": f"{mode} of {what}",
                "values": {name: float(one).hex() for name, one in values.items()},
                "gradients": {
                    name: _digest(one.grad) for name, one in model.named_parameters() if one.grad is not None
                },
                "before": errors,
            }
    return {"error": next(iter(errors.values())), "before": errors}


def _forward(model: Any, data: dict[str, Any], mode: str) -> dict[str, Any]:
    if mode == "loss":
        return {"loss": model.parse_losses(model(**data, mode="loss"))[0]}
    found = model(**data, mode="tensor") if mode == "tensor" else model.extract_feat(data["inputs"])
    return {f"output {index}": one.float().square().mean() for index, one in enumerate(_tensors(found))}


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _digest(value: Any) -> str:
    data = value.detach().contiguous().flatten()
    return hashlib.sha1(memoryview(data.view(-1).numpy()).cast("B")).hexdigest()[:12] if data.numel() else "empty"


def _sentence(error: BaseException) -> str:
    """Return the innermost cause, since registries wrap what constructors raise, in words that hold everywhere."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = re.sub(r"/\S*/site-packages/", "", str(error))
    lines = said.strip().splitlines() or ["without a message"]
    return f"{type(error).__name__}: {lines[0][:200]} ({Path(where.filename).name})"


def main() -> None:
    target, wanted = Path(sys.argv[1]).absolute(), sys.argv[2:]
    os.environ.update(HF_HUB_OFFLINE="1", http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    import_module("stubs")  # beside this file
    for package in {one.partition("/")[0] for one in wanted} | {"mmpretrain"}:
        import_module(f"{package}.models")
    import torch

    torch.set_num_threads(1)
    with target.open("w") as out:
        for one in wanted:
            name, _, named = one.partition("=")
            package, _, family = name.partition("/")
            found = try_family(package, family, named or None)
            out.write(json.dumps({"family": name, **found}) + "\n")
            out.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    main()
