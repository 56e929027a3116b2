"""What the benchmark of many ranks counts, and which law it finds in counts."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.scale.laws import law_of

ROOT = Path(__file__).parents[2]
SIZES = (12, 16, 24, 32)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("0", lambda n: 0),
        ("1", lambda n: 4192),
        ("log n", lambda n: 144 * math.log2(n)),
        ("n", lambda n: 24 * n - 24),
        ("n log n", lambda n: 3 * n * math.log2(n)),
        ("n^2", lambda n: 6 * n * (n - 1)),
        ("n^2", lambda n: n * n + 100 * n),
        ("n^2", lambda n: 1600 * n * n + 10_000 * n - 90_000),
    ],
    ids=["none", "constant", "logarithm", "line", "n-log-n", "each to each", "a small square", "mixed"],
)
def test_a_law_is_found_and_says_what_more_ranks_take(name: str, count):
    law = law_of({n: count(n) for n in SIZES}, noise=0.005)
    assert law.name == name
    assert law.at(1024) == pytest.approx(count(1024), rel=1e-6)


def test_noise_is_no_law():
    noisy = {n: 35 * n * (1.1 if n in (12, 24) else 0.95) for n in SIZES}
    assert law_of(noisy, noise=0.15).name == "n"
    assert law_of({n: n * count for n, count in noisy.items()}, noise=0.15).name == "n^2"


def test_the_jumps_of_a_tree_are_no_square():
    for jumps in ((2688, 2688, 3360, 4432), (2984, 2984, 3656, 5024)):
        assert law_of(dict(zip(SIZES, jumps, strict=True)), noise=0.04).name in ("log n", "n")


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_what_two_ranks_send_is_counted_and_a_page_written(tmp_path: Path):
    files = "--json", tmp_path / "counts.json", "--page", tmp_path / "page.md"
    words = [sys.executable, "-m", "benchmarks.scale", "--nproc", "2", *map(str, files)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads((tmp_path / "counts.json").read_text())["rows"]
    sent = {(row["by"], row["what"]): row for row in rows}
    bare = sent["torch", "a small all_reduce"]
    assert bare["writes"] > 0
    assert sent["lockstep", "a small all_reduce"] | {"by": "torch", "files": 0} == bare | {"files": 0}
    assert sent["torch", "init_dist"]["requests"] > 0
    assert [row["codes"] for row in rows if row["what"] == "one rank killed"] == [[1, -9]] * 3
    assert "| one rank stopped | 1 | 1 of 1 |" in (tmp_path / "page.md").read_text()
