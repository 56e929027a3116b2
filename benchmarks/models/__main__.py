"""Train many kinds of models under every strategy, and compare each training with a loop by hand in plain torch."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.models import matrix
from benchmarks.models.columns import COLUMNS, ENGINES
from benchmarks.models.matrix import ROOT
from benchmarks.models.processes import DEVICE
from benchmarks.models.report import versions, write_report
from benchmarks.models.rows import ROWS
from benchmarks.models.verdicts import Results

# The simulated accelerator lacks some operators that torch has for a device.
_LACKS = {"sparse embedding": "sparse tensors", "truncated backpropagation": "an LSTM's", "recurrent PPO": "a GRU's"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--rows", nargs="*", metavar="ROW", help="names of models, or how they begin; default: all")
    parser.add_argument("--columns", nargs="*", metavar="COLUMN", help="names of strategies, likewise; default: all")
    parser.add_argument("--update", action="store_true", help="put what is found beside what the page has already")
    parser.add_argument(
        "--device", choices=("cpu", "sim"), default="cpu",
        help="sim: the simulated accelerator of tests/device, under torch's own strategies",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one training, default: 120")
    parser.add_argument("--json", type=Path, help="where the figures go, default: benchmarks/models[-sim].json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md", help="where the page goes")
    for engine, folder in zip(ENGINES, (".venv-models", ".venv-deepspeed", ".venv-colossalai"), strict=True):
        parser.add_argument(
            f"--{engine}-python", default=str(ROOT / folder / "bin" / "python"), help=f"a Python that has {engine}"
        )
    arguments = parser.parse_args()
    pythons = {engine: getattr(arguments, f"{engine}_python") for engine in ENGINES}
    figures = {device: ROOT / "benchmarks" / f"models{end}.json" for device, end in (("cpu", ""), ("sim", "-sim"))}
    if arguments.device == "sim":
        pythons = {"torch": pythons["torch"]}
        _compile_device(pythons["torch"])
    os.environ[DEVICE] = arguments.device
    lacking = _LACKS if arguments.device == "sim" else {}
    rows = [row for row in ROWS if _is_chosen(row.name, arguments.rows) and row.name not in lacking]
    present = [column for column in COLUMNS if column.engine in pythons]
    columns = [column for column in present if _is_chosen(column.name, arguments.columns)]
    cells = {(row.name, column.name) for row in rows for column in columns}
    most = (len(ROWS) - len(lacking)) * len(present)
    print(f"{len(cells)} of {most} cells", flush=True)
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        found = matrix.run(cells, pythons, Path(folder), arguments.timeout)
    found.made = versions(pythons)
    bad = found.bad()
    print("\n".join(bad) or "the same numbers everywhere, or a sentence that says why not")
    if arguments.update or len(cells) == most:
        file = arguments.json or figures[arguments.device]
        results = Results.read(file) if arguments.update else Results()
        results.update(found)
        results.write(file)
        on_cpu = results if arguments.device == "cpu" else Results.read(figures["cpu"])
        on_device = results if arguments.device == "sim" else Results.read(figures["sim"])
        write_report(on_cpu, on_device, arguments.out)
        print(f"figures in {file}, tables in {arguments.out}")
    sys.exit(bool(bad))


def _compile_device(python: str) -> None:
    """Compile the simulated accelerator, so that ranks find it."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))
    os.environ["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])  # of ninja
    Path(os.environ["TORCH_EXTENSIONS_DIR"]).mkdir(parents=True, exist_ok=True)
    subprocess.run([python, ROOT / "tests" / "device" / "sim.py"], check=True)


def _is_chosen(name: str, beginnings: list[str] | None) -> bool:
    return beginnings is None or any(name.startswith(beginning) for beginning in beginnings)


if __name__ == "__main__":
    main()
