from __future__ import annotations

from typing import Annotated, TypeAlias

import pytest
import typer
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.cli.options import CfgOptions, CfgOptionsCommand, ScriptCommand

Nproc: TypeAlias = Annotated[int | None, typer.Option()]


def invoke(function, cls, words):
    """Run a command line on a command of that class; return what it printed."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command(cls=cls)(function)
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output.strip()


def configured(config: str, nproc: Nproc = None, cfg_options: CfgOptions = None):
    print(config, nproc, cfg_options)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["c.py"], "c.py None None"),
        (["c.py", "--cfg-options", "a.b=1"], "c.py None ['a.b=1']"),
        (["c.py", "--cfg-options", "a=1", "b=[1,2]", "c=", "--nproc", "2"], "c.py 2 ['a=1', 'b=[1,2]', 'c=']"),
        (["--cfg-options", "a=1", "b=2", "c.py"], "c.py None ['a=1', 'b=2']"),
        (["--cfg-options", "a=1", "c.py", "--cfg-options", "b=2"], "c.py None ['a=1', 'b=2']"),
        (["--cfg-options=a=1", "c.py"], "c.py None ['a=1']"),
    ],
)
def test_cfg_options_take_many(words, shown):
    assert invoke(configured, CfgOptionsCommand, words) == shown


def scripted(
    script: Annotated[list[str], typer.Argument()],
    module: Annotated[bool, typer.Option("-m")] = False,
    nproc: Nproc = None,
    log_dir: Annotated[str, typer.Option()] = "",
    max_restarts: Annotated[int, typer.Option()] = 0,
):
    print(script, module, nproc)


def test_an_option_that_the_script_might_have_too_is_told(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import options")  # which may have any
    said = f"lockstep: `lockstep launch` takes --log-dir; after --, {script} would\n"
    shown = f"['{script}'] False 2"
    assert invoke(scripted, ScriptCommand, [str(script), "--nproc", "2", "--log-dir", "x"]) == said + shown
    assert invoke(scripted, ScriptCommand, ["--log-dir", "x", str(script), "--nproc", "2"]) == shown
    script.write_text('"""Run it by: lockstep launch s.py --nproc 2 --max-restarts 1"""')
    assert invoke(scripted, ScriptCommand, [str(script), "--nproc", "2", "--max-restarts", "1"]) == shown
    script.write_text('parser.add_argument("--nproc")')
    said = said.replace("--log-dir", "--nproc")
    assert invoke(scripted, ScriptCommand, [str(script), "--nproc", "2"]) == said + shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["s.py"], "['s.py'] False None"),
        (["--nproc", "2", "s.py", "x"], "['s.py', 'x'] False 2"),
        (["s.py", "x", "--nproc", "2", "--lr", "1"], "['s.py', 'x', '--lr', '1'] False 2"),
        (["s.py", "--nproc=2", "-m"], "['s.py', '-m'] False 2"),
        (["-m", "pkg.mod", "-m", "--help"], "['pkg.mod', '-m', '--help'] True None"),
        (["s.py", "--", "--nproc", "2"], "['s.py', '--nproc', '2'] False None"),
        (["--nproc", "2", "--", "-odd.py", "--"], "['-odd.py', '--'] False 2"),
    ],
)
def test_a_script_keeps_its_own_arguments(words, shown):
    assert invoke(scripted, ScriptCommand, words) == shown


def test_an_option_that_is_nearly_one_of_the_commands_is_refused_unless_the_script_has_it(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("class Options: nprocs: int = 1")
    for name in ("--nproc-per-node", "--nproc_per_node", "--nprok"):
        said = invoke(scripted, ScriptCommand, [str(script), name, "2"])
        assert f"`{name}` is no option of" in said
        assert "did you mean `--nproc`?" in " ".join(said.replace("│", "").split())
    for words in (["--nprocs", "2"], ["--lr", "2"], ["--", "--nprok", "2"], ["--log_dir", "x"]):
        given = [one for one in words if one != "--"]
        assert invoke(scripted, ScriptCommand, [str(script), *words]) == f"{[str(script), *given]} False None"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nprok", "2", "s.py"], "No such option: --nprok"),
        (["--nproc"], "requires an argument"),
        (["s.py", "--nproc", "none"], "--nproc"),
        ([], "Missing argument"),
        (["--help"], "Usage:"),
    ],
)
def test_what_cannot_be_read_is_told(words, says):
    assert says in invoke(scripted, ScriptCommand, words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["launch", "s.py", "--nproc", "0"],
            "'--nproc': must be a whole number, 1 or more, or a range MIN:MAX of them, but is 0",
        ),
        (["launch", "s.py", "--nproc", "two"], "1 or more, or a range MIN:MAX of them, but is two"),
        (["launch", "s.py", "--nproc", "3:2"], "1 or more, or a range MIN:MAX of them, but is 3:2"),
        (["train", "c.py", "--nproc", "1:2"], "`--nproc` 1:2 must come with --max-restarts"),
        (["train", "c.py", "--nnodes", "1:2"], "`--nnodes` 1:2 must come with --max-restarts"),
        (["train", "c.py", "--max-restarts", "-1"], "Invalid value for '--max-restarts'"),
        (["export", "run", "out", "--to", "onnx"], "'onnx' is not one of 'safetensors', 'hf', 'torch'"),
        (["checkpoints", "prune", ".", "--keep", "0.5"], "Invalid value for '--keep'"),
    ],
)
def test_a_value_that_an_option_can_not_take_is_told(words, says):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
