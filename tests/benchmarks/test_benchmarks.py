"""The benchmarks run, in a few rounds; what they measure then is of no use, and is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.__main__ import NO_GPU
from benchmarks.gpu.models import workloads
from benchmarks.gpu.report import section
from benchmarks.gpu.trainings import STRATEGIES, TRAININGS
from benchmarks.gpu.watch import Watch
from benchmarks.page import SPEED, marks, write_section

from lockstep.device import get_device

ROOT = Path(__file__).parents[2]
OWN = ("by hand", "Runner", "Session")  # the others have an environment of their own


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True)


def test_calls_beside_bare_torch(tmp_path: Path):
    done = run("benchmarks", "--rounds", 1, "--json", tmp_path / "rows.json", "tensors", "nested", "objects")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    goals = {row["case"]: row["goal"] for row in rows if row["goal"]}
    assert goals["all_reduce, 4 B, checks off"] == "<= 1.20"
    assert goals["all_gather(x, uneven=False), 64 KiB, checks off"] == "<= 1.10"
    assert all(row["ratio"] > 0 for row in rows)
    assert all(case in done.stdout for case in goals)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    path = tmp_path_factory.mktemp("gpu") / "figures.json"
    done = run("benchmarks.gpu", "--device", "cpu", "--small", "--nproc", 2, "--json", path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_the_trainings_of_the_gpu_benchmark_in_small(figures):
    rows = figures["trainings"]
    assert [(row["model"], row["strategy"], row["by"]) for row in rows] == [
        (model, strategy, name) for model in ("GPT", "ResNet") for strategy in STRATEGIES for name in TRAININGS
    ]
    assert [row["error"] for row in rows if row["by"] in OWN] == [""] * len(OWN) * 4
    assert all(row["rate"] > 0 for row in rows if row["by"] in OWN)
    assert all(row["rate"] or row["error"] for row in rows)


def test_the_calls_of_the_gpu_benchmark_in_small(figures):
    names = [row["name"] for row in figures["calls"]]
    assert {"all_reduce, 4 B", "all_reduce, 4 MiB", "all_gather_object, 1 KiB"} <= set(names)
    assert all(row[one] > 0 for row in figures["calls"] for one in ("off", "sample", "torch"))


def test_a_page_gets_the_figures_in_place_of_the_old_ones(figures, tmp_path: Path):
    page, (begin, end) = tmp_path / "page.md", marks("bench-gpu")
    page.write_text(f"before\n{begin}old\n{end}after\n")
    for _ in range(2):
        write_section(page, "bench-gpu", section(figures))
    text = page.read_text()
    assert text.startswith(f"before\n{begin}")
    assert text.endswith(f"{end}after\n")
    assert "old" not in text
    assert text.count("| GPT, ddp, 2 | by hand | ") == 1


@pytest.mark.parametrize("word", ["bench", "bench-gpu"])
def test_the_page_has_a_place_for_the_figures(word: str):
    begin, end = marks(word)
    assert 0 < SPEED.read_text().find(begin) < SPEED.read_text().find(end)


@pytest.mark.skipif(get_device() != "cpu", reason="this machine has an accelerator")
def test_without_a_gpu_the_word_says_so_in_one_sentence():
    done = run("benchmarks.gpu")
    assert (done.returncode, done.stderr.strip(), done.stdout) == (1, NO_GPU, "")


def test_the_models_have_the_sizes_of_the_known_ones():
    with torch.device("meta"):
        sizes = [sum(x.numel() for x in workload.make().parameters()) for workload in workloads(small=False)]
    assert sizes == [124_475_904, 25_557_032]


def test_waits_are_found_with_their_lines():
    watch = Watch(small=True)
    for _ in range(watch.steps):
        warnings.filterwarnings("ignore")  # as a framework may do
        watch.step()
        if watch.seconds is not None and not watch.where:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp)", stacklevel=1)
    watch.close()
    assert watch.where.startswith(f"{__file__}:")
