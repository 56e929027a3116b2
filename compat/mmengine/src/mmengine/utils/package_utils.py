"""Packages that are installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

__all__ = ["call_command", "get_installed_path", "install_package", "is_installed"]


def is_installed(package: str) -> bool:
    """Return whether there is a distribution or a module of this name."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return find_spec(package) is not None
    return True


def get_installed_path(package: str) -> str:
    """Return the folder of a package, by the name of its distribution or of its module.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    names = [package]
    try:
        lines = (distribution(package).read_text("top_level.txt") or "").split()
        names = [*lines, package.replace("-", "_"), package]
    except PackageNotFoundError:
        pass
    for name in names:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            return str(Path(next(iter(spec.submodule_search_locations))))
    raise PackageNotFoundError(f"{package} is not installed, or is not a package")


def call_command(cmd: list[str]) -> None:
    """Run a command; it ends the program if it fails."""
    try:
        subprocess.check_call(cmd)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


def install_package(package: str) -> None:
    """Install a package with pip, if it is not installed."""
    if not is_installed(package):
        call_command([sys.executable, "-m", "pip", "install", package])
