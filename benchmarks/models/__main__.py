"""Train many kinds of models under every strategy, and compare each training with a loop by hand in plain torch."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.models import matrix
from benchmarks.models.columns import COLUMNS, ENGINES
from benchmarks.models.matrix import ROOT
from benchmarks.models.report import versions, write_report
from benchmarks.models.rows import ROWS
from benchmarks.models.verdicts import Results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--rows", nargs="*", metavar="ROW", help="names of models, or how they begin; default: all")
    parser.add_argument("--columns", nargs="*", metavar="COLUMN", help="names of strategies, likewise; default: all")
    parser.add_argument("--update", action="store_true", help="put what is found beside what the page has already")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one training, default: 120")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "models.json", help="where the figures go")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md", help="where the page goes")
    for engine, folder in zip(ENGINES, (".venv-models", ".venv-deepspeed", ".venv-colossalai"), strict=True):
        parser.add_argument(
            f"--{engine}-python", default=str(ROOT / folder / "bin" / "python"), help=f"a Python that has {engine}"
        )
    arguments = parser.parse_args()
    rows = [row for row in ROWS if _is_chosen(row.name, arguments.rows)]
    columns = [column for column in COLUMNS if _is_chosen(column.name, arguments.columns)]
    cells = {(row.name, column.name) for row in rows for column in columns}
    print(f"{len(cells)} of {len(ROWS) * len(COLUMNS)} cells", flush=True)
    pythons = {engine: getattr(arguments, f"{engine}_python") for engine in ENGINES}
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        found = matrix.run(cells, pythons, Path(folder), arguments.timeout)
    found.made = versions(pythons)
    bad = found.bad()
    print("\n".join(bad) or "the same numbers everywhere, or a sentence that says why not")
    if arguments.update or len(cells) == len(ROWS) * len(COLUMNS):
        results = Results.read(arguments.json) if arguments.update else Results()
        results.update(found)
        results.write(arguments.json)
        write_report(results, arguments.out)
        print(f"figures in {arguments.json}, tables in {arguments.out}")
    sys.exit(bool(bad))


def _is_chosen(name: str, beginnings: list[str] | None) -> bool:
    return beginnings is None or any(name.startswith(beginning) for beginning in beginnings)


if __name__ == "__main__":
    main()
