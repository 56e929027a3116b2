"""Reads every config of an installed package, in the environment of the Python that runs it, and writes the values.

    python read_configs.py mmpretrain out.json

A config that cannot be read has its error in their place. Values are in a form that two environments can compare: a
tuple is ``{"tuple": [...]}``, a class or a function its import path, and paths lead to where the packages are.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SITE_PACKAGES = str(Path(find_spec("torch").origin).parents[1])


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, str):
        return value.replace(SITE_PACKAGES, "")
    if isinstance(value, int | float | bool | None):
        return value
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else str(value)


def read(package: str) -> dict[str, Any]:
    from mmengine.config import Config

    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / ".mim" / "configs"
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.py")):
        name = str(file.relative_to(folder))
        try:
            values = plain(Config.fromfile(file).to_dict())
            json.dumps(values)
            found[name] = {"values": values}
        except BaseException as error:
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import_module("stubs")  # beside this file
    package, target = sys.argv[1:]
    Path(target).write_text(json.dumps(read(package)), encoding="utf-8")
