"""The first things a run does: joining the other ranks, and making its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch

from lockstep.dist import infer_launcher, init_dist, is_distributed, is_main_process, run_on_main
from lockstep.errors import ConfigError
from lockstep.runner.arguments import checked_keys
from lockstep.topology import LauncherName

_logger = logging.getLogger(__name__)


def join_ranks(launcher: str | None, env_cfg: Mapping[str, Any] | None) -> None:
    """Make sure that the ranks of this job form a group, where there are others.

    Args:
        launcher: who started the ranks; None asks the environment.
        env_cfg: `dist_cfg` with arguments of `init_dist`, in which the backend nccl, as configs for GPUs have it, gives
            way to the usual one where there is no GPU; `cudnn_benchmark`; `mp_cfg`, in which only `mp_start_method`
            means something; `resource_limit`, the number of files that may be open at once.
    """
    options = checked_keys("env_cfg", env_cfg)
    torch.backends.cudnn.benchmark = bool(options.get("cudnn_benchmark", False))
    start_method = (options.get("mp_cfg") or {}).get("mp_start_method")
    if start_method is not None:
        torch.multiprocessing.set_start_method(start_method, force=True)
    if options.get("resource_limit") is not None:
        _allow_files(int(options["resource_limit"]))
    if is_distributed():
        return
    launcher = launcher or infer_launcher()
    if launcher == "none":
        return
    arguments = dict(options.get("dist_cfg") or {})
    lacks_gpu = arguments.get("backend") == "nccl" and not torch.cuda.is_available()
    if lacks_gpu:
        del arguments["backend"]
    init_dist(cast(LauncherName, launcher), **arguments)  # which it checks
    if lacks_gpu and is_main_process():
        _logger.warning("`env_cfg.dist_cfg.backend` is nccl, which needs a GPU, and there is none: the ranks use gloo")


def _allow_files(count: int) -> None:
    """Raise the number of files that this process may open, as far as it may do so."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def make_run_dir(work_dir: Path, experiment_name: str | None) -> Path:
    """Make a new folder for this run, named after the time, and return it on every rank.

    **Collective**: every rank; rank 0 makes it.

    Raises:
        ConfigError: it cannot be made; PeerError on the other ranks.
    """
    prefix = "" if experiment_name is None else f"{experiment_name}_"
    return run_on_main(lambda: _new_folder(work_dir, f"{prefix}{datetime.now():%Y%m%d_%H%M%S}"))


def save_config(cfg: Any, run_dir: Path) -> None:
    """Write the config, where there is one, into the run's folder."""
    if cfg is not None and hasattr(cfg, "dump"):
        cfg.dump(run_dir / "config.py")


def make_folder(folder: Path, *, anew: bool = False) -> None:
    """Make a folder in the work_dir; `anew` says that it must not be there yet.

    Raises:
        FileExistsError: it is there, and was to be made anew.
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=not anew)
    except OSError as error:
        if anew and isinstance(error, FileExistsError):
            raise
        raise ConfigError(
            f"`work_dir` must be a folder that can be created and written to, but {folder} cannot be created: {error}. "
            "Choose another folder, for instance with --work-dir, or change its permissions"
        ) from error


def _new_folder(parent: Path, name: str) -> Path:
    # Two runs may begin within one second.
    for attempt in range(1000):
        folder = parent / (name if attempt == 0 else f"{name}_{attempt}")
        with suppress(FileExistsError):
            make_folder(folder, anew=True)
            return folder
    raise FileExistsError(f"{parent / name} and a thousand like it exist already")
