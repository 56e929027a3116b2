"""What is registered, and the default scope of a program."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep import registry as core
from mmengine.registry.default_scope import DefaultScope


def traverse_registry_tree(registry: core.Registry, verbose: bool = True) -> list[dict[str, Any]]:
    """Return what each registry of a family has registered: its number, and names by scope and package.

    Args:
        registry: any registry of the family.
        verbose: also print it.
    """
    found = []
    for one in registry.root._family():
        row: dict[str, Any] = {"num_modules": len(one.module_dict), "scope": one.scope}
        for name, entry in one.module_dict.items():
            package = getattr(entry, "__module__", one.scope).split(".")
            row.setdefault("/".join([one.scope, *package[1:-1]]), []).append(name)
        found.append(row)
    if verbose:
        print(json.dumps(found, indent=2))
    return found


def count_registered_modules(save_path: str | Path | None = None, verbose: bool = True) -> dict[str, Any]:
    """Return what all of MMEngine's registries have registered, and write it as JSON to a folder if one is given."""
    from mmengine.registry import root

    families = {name: traverse_registry_tree(getattr(root, name), verbose) for name in root.__all__}
    found = {"scan_date": datetime.now().strftime("%Y-%m-%d %H:%M:%S"), "registries": families}
    if save_path is not None:
        Path(save_path, "modules_statistic_results.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    return found


def init_default_scope(scope: str) -> None:
    """Make every registry look up names first in the registry of its family with this scope."""
    DefaultScope.get_instance(f"{scope}-{len(DefaultScope._instance_dict)}", scope_name=scope)
