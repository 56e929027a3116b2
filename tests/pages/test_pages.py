"""Every code block of the README and the documentation runs; `make test-docs` starts this."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("blocks", Path(__file__).with_name("blocks.py"))
assert SPEC is not None
assert SPEC.loader is not None
blocks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(blocks)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(blocks.ROOT)) for page in pages]


def those_with(*languages: str) -> pytest.MarkDecorator:
    pages = [page for page in blocks.PAGES if any(block.language in languages for block in blocks.blocks_of(page))]
    return pytest.mark.parametrize("page", pages, ids=names(pages))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder, in which only the examples are to be found."""
    (tmp_path / "examples").symlink_to(blocks.ROOT / "examples")
    return tmp_path


def run(words: list[str], folder: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    told = done.stdout[-4000:] + done.stderr[-8000:]
    assert done.returncode == 0, told
    assert "warning" not in told.lower(), told


@those_with("python")
def test_its_python_runs_in_one_process(page: Path, folder: Path):
    blocks.write_files(page, folder)
    run([sys.executable, str(Path(blocks.__file__)), str(page)], folder)


@those_with("python")
def test_its_python_runs_on_two_ranks(page: Path, folder: Path):
    blocks.write_files(page, folder)
    run(["lockstep", "launch", str(Path(blocks.__file__)), "--nproc", "2", "--", str(page)], folder)


@those_with("bash")
def test_its_commands_run_on_the_files_that_it_shows(page: Path, folder: Path):
    for block in blocks.blocks_of(page):
        if block.title:
            blocks.write_file(block, folder)
        elif block.language == "bash":
            run(["bash", "-euo", "pipefail", "-c", block.code], folder)
