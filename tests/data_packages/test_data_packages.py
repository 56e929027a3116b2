"""Data sets and streams of other packages, as a user writes them: each sample once per epoch, or a word about it.

Each case starts a whole job, which trains on all of them. The table in docs/data-packages.md says what comes of it:
`TABLE=write make test-data-packages` writes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "data-packages.md"
COLUMNS = [(ranks, workers) for ranks in (1, 2, 3) for workers in (0, 2)]
ALL = list(range(24))
WORDS = ("`split", "the config", "the same", "nodesplitter", "split")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    code = f"import recipes, pathlib; recipes.write_data(pathlib.Path({str(folder)!r}))"
    _run([sys.executable, "-W", "ignore", "-c", code])
    return folder


@pytest.mark.parametrize(("ranks", "workers"), COLUMNS)
def test_each_sample_is_trained_on_once_or_it_is_said_what_to_do(ranks, workers, data, tmp_path):
    result = tmp_path / "result.json"
    job = [str(HERE / "job.py"), str(data), str(result), str(workers)]
    _run([sys.executable, "-m", "lockstep", "launch", "--nproc", str(ranks), *job])
    found: dict[str, dict[str, str]] = {}
    for name, cell in json.loads(result.read_text()).items():
        title, _, loop = name.split("|")
        found.setdefault(title.strip(), {}).setdefault(loop, _outcome(cell, f"{name} on {ranks} ranks"))
    column = {title: _summary(loops) for title, loops in found.items()}
    text = PAGE.read_text()
    index = COLUMNS.index((ranks, workers))
    if os.environ.get("TABLE") == "write":
        text = re.sub(
            r"^\| (.+?) \|((?: [^|]+ \|){6})$", lambda row: _with(row, column, index), text, flags=re.MULTILINE
        )
        PAGE.write_text(text)
    assert column == {title: cells[index] for title, cells in _table(text).items()}


def _run(words: list[str]) -> None:
    done = subprocess.run(
        words, cwd=HERE, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:]


def _outcome(cell: dict[str, Any], name: str) -> str:
    """Return what came of a training; fail if samples are lost or repeated, and nothing is said."""
    if any(cell["errors"]):
        assert all(cell["errors"]), f"{name}: not an error on every rank: {cell['errors']}"
        assert any(word in cell["errors"][0] for word in WORDS), f"{name}: {cell['errors'][0]}"
        return "error"
    runs = cell["first_epoch"]
    trained_on = sorted(one for run in runs for one in run)
    if trained_on == ALL:
        return "once"
    said = " ".join(cell["said"])
    if len(runs) == 2 and sorted(runs[1]) == ALL:
        return "anew"
    assert any(word in said for word in WORDS), f"{name}: trained on {trained_on}, and said only {said}"
    return "warning"


def _summary(loops: dict[str, str]) -> str:
    """Return the cell of the table: a Runner and a Session must do the same."""
    assert loops["Runner"] == loops["Session"], loops
    resumed = loops.get("Runner resumed", "once")
    return loops["Runner"] + ("" if resumed == "once" else f"; resumed: {resumed}")


def _table(text: str) -> dict[str, list[str]]:
    rows = re.findall(r"^\| (.+?) \|((?: [^|]+ \|){6})$", text, re.MULTILINE)
    return {title: [one.strip() for one in cells.split("|")[:6]] for title, cells in rows if title in _titles()}


def _titles() -> set[str]:
    source = (HERE / "recipes.py").read_text()
    return {title.strip() for _, title in re.findall(r"^    (['\"])(.+?)\1: (?:\w|lambda)", source, re.MULTILINE)}


def _with(row: re.Match[str], column: dict[str, str], index: int) -> str:
    cells = [one.strip() for one in row[2].split("|")[:6]]
    if row[1] in column:
        cells[index] = column[row[1]]
    return f"| {row[1]} | {' | '.join(cells)} |"
