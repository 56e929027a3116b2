"""Are the models of packages for MMEngine the same on lockstep and on MMEngine? One of each family of configs.

    python compat/mmengine/families.py --ours .venv-mmengine/bin/python --theirs .venv-mmengine-reference/bin/python

A family is a folder of a package's configs, in some packages of a kind of task. Both environments build a model of it
from the same seed, and take one step on a batch of noise (`tests/build_models.py`); parameters, initial weights, losses
and gradients must be equal, bit by bit. Writes docs/mmengine-models.md. With ``--share K/N``, every N-th family is
tried, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "mmengine-models.md"
FOUND = HERE / "tests" / "reference" / "families.json"
PACKAGES = ("mmpretrain", "mmdet", "mmseg", "mmpose", "mmaction", "mmocr", "mmyolo")
_BY_TASK = ("mmpose", "mmaction", "mmocr")  # their families are in folders of tasks
_NO_FAMILIES = {"_base_", "__pycache__", "common", "deploy", "razor"}
_AT_ONCE = 4  # families that one process builds, so that what is found is kept if a run is cut
BAD = ("differ", "fails here only")

_HEAD = """# Models of packages that were written for MMEngine

`make mmengine-models` builds one model of each family of mmpretrain 1.2.0, mmdet 3.3.0, mmseg 1.2.2, mmpose 1.3.2,
mmaction2 1.2.0, mmocr 1.0.1 and mmyolo 0.6.0 on lockstep, and with MMEngine 0.10.7, from the same seed, and compares
them bit by bit. A family is a folder of configs; in mmpose, mmaction2 and mmocr it is in the folder of a task. The
table names the config that was taken: of the first two, the first that could be built here in 15 seconds and 6 GB.
Those whose names say that the model is small come first. Weights behind addresses are left out. What could be built
takes one step: the losses of a batch of noise, or else the mean squares of the outputs, or of the features, and their
gradients.

What a model leaves as it was in memory is zero in both. Operators of mmcv are not built for the CPU here: `nms` and
`roi_align` are stand-ins in plain torch (`compat/mmengine/tests/stubs.py`), the others raise.

{tried} of {all} families have been tried.

"""


def main() -> None:
    """Try the families, and exit with 1 if a model is not MMEngine's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, help="a Python that has lockstep and the packages")
    parser.add_argument("--theirs", required=True, help="a Python that has MMEngine and the packages")
    parser.add_argument("--share", metavar="K/N", help="every N-th family, from the K-th on")
    parser.add_argument("--only", nargs="*", metavar="FAMILY", help="such as mmseg/unet; put beside what was found")
    parser.add_argument("--missing", action="store_true", help="what was not tried yet; put beside what was found")
    arguments = parser.parse_args()
    known = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    every = families(arguments.ours)
    wanted = arguments.only or every
    if arguments.missing:
        wanted = [one for one in wanted if one not in known]
    if arguments.share:
        k, n = map(int, arguments.share.split("/"))
        wanted = [_named(one, known) for one in wanted[k - 1 :: n]]
    found = {}
    for start in range(0, len(wanted), _AT_ONCE):
        new = compare(arguments.ours, arguments.theirs, wanted[start : start + _AT_ONCE])
        for family, one in new.items():
            print(f"{family}: weights {one['weights']}; step {one['step']}", flush=True)
        found |= new
        if not arguments.share:
            known |= new
            FOUND.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
            PAGE.write_text(page(known, len(every)))
    bad = [family for family, one in found.items() if one["weights"].startswith(BAD) or one["step"].startswith(BAD)]
    print(f"{len(found)} families, of which {len(bad)} differ", *bad)
    sys.exit(bool(bad))


def families(python: str) -> list[str]:
    """Return the families of all packages, as ``package/folder``."""
    names = []
    for package in PACKAGES:
        script = f"from importlib.util import find_spec; print(find_spec({package!r}).origin)"
        origin = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        root = Path(origin).parent / ".mim" / "configs"
        folders = [one.relative_to(root) for one in root.glob("*/*" if package in _BY_TASK else "*") if one.is_dir()]
        names += sorted(f"{package}/{one}" for one in folders if _NO_FAMILIES.isdisjoint(one.parts))
    return names


def _named(family: str, known: dict[str, Any]) -> str:
    config = known.get(family, {}).get("config")
    return f"{family}={config}" if config else family


def compare(ours: str, theirs: str, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """Build the models of families in both environments at once, and return what is equal."""
    with tempfile.TemporaryDirectory() as folder:
        targets, running = [], []
        for name, python in (("ours", ours), ("theirs", theirs)):
            targets.append(Path(folder, f"{name}.json"))
            # What glibc allocates is zero then, as in both weights that a model itself leaves as they are (TridentNet).
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": "255"}
            if name == "theirs":
                environ.pop("PYTHONPATH", None)
            command = [python, "-W", "ignore", str(HERE / "tests" / "build_models.py"), str(targets[-1]), *wanted]
            running.append(subprocess.Popen(command, env=environ))
        codes = [one.wait() for one in running]  # of both, before the folder goes
        if any(codes):
            raise SystemExit("an environment could not import the packages; its message is above")
        a, b = ({one["family"]: one for one in map(json.loads, file.open())} for file in targets)
    return {family: verdict(a[family], b[family]) for family in b}


def verdict(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return in words what both environments say of one family."""
    result = {"config": theirs["config"] or next(iter(theirs["failed"]), None), "parameters": theirs.get("parameters")}
    if ours["config"] != theirs["config"]:
        here_only = theirs["config"] in ours["failed"] or not ours["config"]
        why = ours["failed"].get(theirs["config"]) or theirs["failed"].get(ours["config"]) or "another config was built"
        return result | {"weights": f"fails {'here' if here_only else 'in MMEngine'} only: {why}", "step": ""}
    if theirs["config"] is None:
        return result | {"weights": f"fails in both: {_reason(theirs['failed'])}", "step": ""}
    a, b = ours["weights"], theirs["weights"]
    unlike = [name for name in {**b, **a} if a.get(name) != b.get(name)]
    weights = f"differ: {len(unlike)} of {len(b)}, such as {unlike[0]}" if unlike else "equal"
    if list(a) != list(b) and not unlike:
        weights = "differ: in their order"
    return result | {"weights": weights, "step": _step(ours["step"], theirs["step"])}


def _step(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    if "error" in ours and "error" in theirs:
        return f"fails in both: {theirs['error']}"
    if "error" in ours:
        return f"fails here only: {ours['error']}"
    if "error" in theirs:
        return f"fails in MMEngine only: {theirs['error']}"
    what = theirs["of"].replace("loss of", "losses of")
    if ours["of"] != theirs["of"]:
        why = next(iter((ours["before"] or theirs["before"]).values()))
        return f"differ: {ours['of']} here, {theirs['of']} there: {why}"
    for part in ("values", "gradients"):
        if ours[part] != theirs[part]:
            return f"differ: {part} of the {what}"
    left_out = next(iter(theirs["before"].values()), "")
    return f"equal: {what}" + (f"; no losses: {left_out}" if left_out and "loss" not in what else "")


def _reason(failed: dict[str, str]) -> str:
    return next(iter(failed.values()), "no config of the folder has a model")


def page(found: dict[str, dict[str, Any]], total: int) -> str:
    """Return the page: how many families have which outcome, then every family."""
    columns = ("families", "weights equal", "and losses", "and outputs or features", "no step in both",
               "not built in both", "built here only", "differ")  # fmt: skip
    lines = [f"| package | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for package in PACKAGES:
        count = Counter(_kind(one) for family, one in found.items() if family.startswith(package + "/"))
        equal = count["losses"] + count["outputs"] + count["no step"]
        numbers = (count.total(), equal, count["losses"], count["outputs"], count["no step"],
                   count["not built"], count["here"], count["differ"])  # fmt: skip
        lines.append(f"| {package} | " + " | ".join(map(str, numbers)) + " |")
    for package in PACKAGES:
        lines += ["", f"## {package}", "", "| config | parameters | weights | step |", "|---|---|---|---|"]
        for family, one in sorted(found.items()):
            if family.startswith(package + "/"):
                size = f"{one['parameters'] / 1e6:.1f} M" if one["parameters"] else ""
                cells = (f"`{one['config'] or family.partition('/')[2] + '/'}`", size, one["weights"], one["step"])
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return _HEAD.format(tried=len(found), all=total) + "\n".join(lines) + "\n"


def _kind(one: dict[str, Any]) -> str:
    if one["weights"].startswith(BAD) or one["step"].startswith(BAD):
        return "differ"
    if one["weights"] != "equal":
        return "not built" if "both" in one["weights"] else "here"
    if one["step"].startswith("equal"):
        return "losses" if one["step"].startswith("equal: losses") else "outputs"
    return "no step"


if __name__ == "__main__":
    main()
