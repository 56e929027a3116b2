"""What the pages of the documentation quote is so: commands, data, messages, code; `make test-docs` runs their code."""

from __future__ import annotations

import importlib.util
import json
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

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("blocks", ROOT / "tests" / "pages" / "blocks.py")
assert SPEC is not None
assert SPEC.loader is not None
blocks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(blocks)

each_page = pytest.mark.parametrize("page", blocks.PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_every_block_says_what_it_is(page: Path):
    assert [block.line for block in blocks.blocks_of(page) if block.language not in {*blocks.LANGUAGES, "setup"}] == []


@each_page
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


@each_page
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
