"""Refusing to run beside the real MMEngine, whose files would be mixed with these."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def refuse_mmengine() -> None:
    """Raise an ImportError if MMEngine itself is installed, too."""
    for name in ("mmengine", "mmengine-lite"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        raise ImportError(
            f"lockstep-mmengine cannot run beside {name} {found}: both are the package `mmengine`, and the files of "
            "one replace those of the other. Keep one of them. For lockstep:\n"
            "    pip uninstall mmengine mmengine-lite lockstep-mmengine\n"
            "    pip install lockstep-mmengine"
        )
