"""On what a program runs: Python, torch, devices, versions."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from collections import defaultdict

import numpy as np
import torch

from mmengine.version import __version__, lockstep

__all__ = ["collect_env"]


def collect_env() -> dict[str, str]:
    """Return facts about Python, compilers, devices, torch, OpenCV and this package, by name, for a log."""
    found = {
        "sys.platform": sys.platform,
        "Python": sys.version.replace("\n", ""),
        "CUDA available": str(torch.cuda.is_available()),
        "MUSA available": "False",
        "numpy_random_seed": str(np.random.get_state()[1][0]),  # type: ignore[index]
    }
    if torch.cuda.is_available():
        devices = defaultdict(list)
        for index in range(torch.cuda.device_count()):
            devices[torch.cuda.get_device_name(index)].append(str(index))
        found.update({f"GPU {','.join(ids)}": name for name, ids in devices.items()})
        found["CUDA version"] = str(torch.version.cuda)
    found["GCC"] = _first_line("gcc", "--version") if platform.system() != "Windows" else "n/a"
    found["PyTorch"] = torch.__version__
    found["PyTorch compiling details"] = torch.__config__.show()
    for name, module in (("TorchVision", "torchvision"), ("OpenCV", "cv2")):
        try:
            found[name] = importlib.import_module(module).__version__
        except (ImportError, RuntimeError):  # not installed, or built for another torch
            continue
    found["MMEngine"] = f"{__version__} (names of; run by lockstep {lockstep})"
    return found


def _first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "n/a"
