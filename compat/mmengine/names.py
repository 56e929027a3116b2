"""Where is each public name of MMEngine: in lockstep, in lockstep-mmengine, or nowhere?

    python compat/mmengine/names.py /path/to/python/with/mmengine docs/mmengine-names.md

runs in an environment with lockstep-mmengine, and writes the table into the page. The public names are those of
`__all__` of MMEngine's packages, as the other Python gives them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

BEGIN, END = "<!-- names: begin -->\n", "<!-- names: end -->\n"
# Prints {package: [name, ...]} of MMEngine itself.
LIST = """
import json, pkgutil, mmengine, warnings
warnings.simplefilter("ignore")
names = {}
for info in pkgutil.iter_modules(mmengine.__path__):
    if info.ispkg:
        package = __import__("mmengine." + info.name, fromlist=["x"])
        names[info.name] = sorted(getattr(package, "__all__", []))
print("@@" + json.dumps(names))
"""
# What users of a name that is in neither take.
INSTEAD = {
    "_strategy": "`Runner(strategy=...)`: [Strategies](strategies.md)",
    "ActivationAnalyzer": "`activation_count`",
    "BaseOptimWrapper": "`OptimWrapper`",
    "FlopAnalyzer": "`flop_count`",
    "MemcachedBackend": "a storage backend of your own, registered by `register_backend`",
    "NPUProfilerHook": "`ProfilerHook`",
    "get_max_musa_memory": "`lockstep.device.peak_memory`",
    "is_dipu_available": "`lockstep.device.get_device`",
    "is_npu_support_full_precision": "`lockstep.device.get_device`",
    "parameter_count_table": "`parameter_count`",
    "turn_on_activation_checkpointing": "`torch.utils.checkpoint`, or a strategy's `activation_checkpointing`",
}
_OF_TABLES = "an address: names of MMEngine's tables of models are refused"
INSTEAD |= dict.fromkeys(
    ("get_deprecated_model_names", "get_external_models", "get_mmcls_models", "get_torchvision_models"), _OF_TABLES
)


def published(python: str) -> dict[str, list[str]]:
    """Return the public names of each package of MMEngine, as an environment with it has them."""
    done = subprocess.run([python, "-c", LIST], check=True, capture_output=True, text=True)
    names: dict[str, list[str]] = json.loads(done.stdout.rpartition("@@")[2])
    return names


def table(names: dict[str, list[str]]) -> str:
    """Return the table of the page, in Markdown."""
    lines = [
        "| package | in `lockstep.*`, too | in `lockstep-mmengine` alone | in neither: use instead |",
        "|---|---|---|---|",
    ]
    for package, of_package in sorted(names.items()):
        found = defaultdict[str, list[str]](list)
        for name in of_package:
            found[_place(package, name)].append(f"`{name}`")
        instead = ""
        if found["nowhere"]:
            remedies = defaultdict[str, list[str]](list)
            for name in found["nowhere"]:
                remedies[INSTEAD.get(package) or INSTEAD[name.strip("`")]].append(name)
            instead = "; ".join(f"{', '.join(of)}: {remedy}" for remedy, of in remedies.items())
        if of_package:
            lines.append(
                f"| `{package}` | {', '.join(found['lockstep'])} | {', '.join(found['mmengine'])} | {instead} |"
            )
    return "\n".join(lines) + "\n"


def _place(package: str, name: str) -> str:
    for root in ("lockstep", "mmengine"):
        try:
            if hasattr(import_module(f"{root}.{package}"), name):
                return root
        except ModuleNotFoundError:
            continue
    return "nowhere"


def written(page: str, text: str) -> str:
    """Return the page's text with another table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + text + END + rest.partition(END)[2]


if __name__ == "__main__":
    reference, path = sys.argv[1], Path(sys.argv[2])
    path.write_text(written(path.read_text(), table(published(reference))))
