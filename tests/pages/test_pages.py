"""Every code block of the README and the documentation runs; `make test-docs` starts this."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
import typer
import yaml

from lockstep.cli.main import app

SPEC = importlib.util.spec_from_file_location("blocks", Path(__file__).with_name("blocks.py"))
assert SPEC is not None
assert SPEC.loader is not None
blocks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(blocks)

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Made by other commands, or records of what was.
PAGES = [page for page in PAGES if page.name not in ("models.md", "parity.md") and "decisions" not in page.parts]


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def those_with(*languages: str) -> pytest.MarkDecorator:
    pages = [page for page in PAGES if any(block.language in languages for block in blocks.blocks_of(page))]
    return pytest.mark.parametrize("page", pages, ids=names(pages))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder, in which only the examples are to be found."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
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


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_says_what_it_is(page: Path):
    assert [block.line for block in blocks.blocks_of(page) if block.language not in {*blocks.LANGUAGES, "setup"}] == []


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


@those_with("shell", "bash")
def test_the_arguments_of_its_commands_are_right(page: Path):
    for block in blocks.blocks_of(page):
        if block.language in ("shell", "bash"):
            for line in block.code.replace("\\\n", " ").splitlines():
                check_arguments(line)


def check_arguments(line: str) -> None:
    """Let the parser of the command line read what follows `lockstep` in a line, without running it."""
    words = shlex.split(line, comments=True)
    if "lockstep" not in words:
        return
    words = words[words.index("lockstep") + 1 :]
    words = words[: next((n for n, word in enumerate(words) if word in ("&&", "||", "|", ">", ";")), len(words))]
    command: click.Command = typer.main.get_command(app)
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if any(word in ("--help", "--install-completion", "--version") for word in words):
        return
    command.make_context("lockstep", words)


@those_with("yaml", "json")
def test_its_data_can_be_parsed(page: Path):
    for block in blocks.blocks_of(page):
        if block.language == "yaml":
            list(yaml.safe_load_all(block.code))
        elif block.language == "json":
            json.loads(block.code)


def test_the_messages_that_the_page_of_errors_explains_exist():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "messages.py")], capture_output=True, text=True, check=True, timeout=60
    )
    known = " ".join(done.stdout.split())
    rows = re.findall(r"^\| (.+?) \| .+ \|$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    rows = [row for row in rows if not row.startswith(("torch's", "a `"))]
    quoted = [code for row in rows for pair in re.findall(r"`` (.+?) ``|`([^`]+)`", row) for code in pair if code]
    parts = [part.strip() for text in quoted for part in text.split("...") if part.strip()]
    assert len(parts) > 20
    assert [part for part in parts if " ".join(part.split()) not in known] == []


def test_code_that_is_copied_from_a_file_is_that_of_the_file():
    copies = [copy for page in sorted((ROOT / "docs").glob("*.md")) for copy in blocks.copies_of(page)]
    assert len(copies) > 5
    for source, code in copies:
        file, _, name = source.partition(":")
        _, _, rest = (ROOT / file).read_text().partition(f"# [start:{name}]\n")
        assert textwrap.dedent(rest.partition(f"# [end:{name}]")[0]).strip() == code.strip(), source
