"""How progress is drawn; what is drawn of a run is in tests/runner/test_hooks.py."""

from __future__ import annotations

import logging
import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from lockstep import Session
from lockstep.errors import ConfigError
from lockstep.hooks.progress import Display, ProgressHook, _rates


def test_a_live_bar_can_be_shown_again_after_it_was_closed():
    console = Console(file=StringIO(), force_terminal=True, width=80)
    display = Display(console)
    for label in ("training", "validating"):
        display.begin(label, 3)
        display.show(1, ["text"])
    display.close()
    display.begin("testing", 2)
    display.close()
    assert all(label in console.file.getvalue() for label in ("training", "validating", "testing"))


def test_no_bar_is_drawn_into_a_pipe_though_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As notebooks and CI force them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=StringIO(), width=80)
    hook = ProgressHook()
    hook._begin(SimpleNamespace(console=console, args=SimpleNamespace(log_level="INFO")), "training", 3)
    hook.close()
    assert console.is_terminal
    assert console.file.getvalue() == ""


def test_a_pass_of_unknown_length_does_not_have_that_of_the_one_before():
    console = Console(file=StringIO(), width=80)
    display = Display(console, period_seconds=0.0)
    for label, total in (("training", 6), ("validating", None)):
        display.begin(label, total)
        display.show(1, [])
    assert console.file.getvalue() == "training  1/6\nvalidating  1\n"


def test_a_text_for_the_period_is_refused():
    with pytest.raises(ConfigError, match="`period_seconds` must be a finite number of at least 0, but is '1e1'"):
        ProgressHook(period_seconds="1e1")


def test_a_name_with_markup_is_shown_as_it_is() -> None:
    shown = StringIO()
    display = Display(Console(file=shown, force_terminal=True, width=80))
    display.begin("training", 2)
    display.show(1, ["acc[/top1] 0.5"])
    display.close()
    assert "acc[/top1] 0.5" in shown.getvalue()


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, r"epoch 2/3 ━+ 7/40 loss 1\.0884  ETA 0:00:03  130 samples/s  val/accuracy 37\.75 %"),
        (80, r"epoch 2/3 ━+ 7/40 loss 1\.0884  ETA 0:00:03  130 samples/s"),
        (45, r"epoch 2/3 ━{18} 7/40 loss 1\.0884"),
        (30, r"epoch 2/3 ━+ 7/40"),
    ],
)
def test_a_narrow_terminal_shows_the_first_values_beside_the_bar(width: int, shown: str) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=width, color_system=None)
    display = Display(console)
    display.begin("epoch 2/3", 40)
    display.show(7, ["loss 1.0884", "ETA 0:00:03", "130 samples/s", "val/accuracy 37.75 %"])
    line = next(line for line in re.split(r"\x1b\S*?[A-Zh-l]|\r|\n", console.file.getvalue()) if "7/40" in line)
    assert re.fullmatch(shown.replace("━", "[━╸╺ ]"), line.rstrip())
    display.close()


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ((None, None, None), []),
        ((5000.4, None, None), ["5,000 samples/s"]),
        ((0.3, None, None), ["0.3 samples/s"]),
        ((50.0, 51_200.0, 0.4321), ["50 samples/s", "51,200 tokens/s", "MFU 43.2 %"]),
    ],
)
def test_rates_that_are_known_are_shown(known, shown):
    assert _rates(*known) == shown


def test_what_a_function_counts_is_not_called_samples():
    assert _rates(51_200.0, None, None, counts="units") == ["51,200 units/s"]


def running(log_level: str = "INFO") -> SimpleNamespace:
    return SimpleNamespace(console=Console(file=StringIO(), width=80), args=SimpleNamespace(log_level=log_level))


@pytest.mark.parametrize(("log_level", "lines"), [("INFO", 1), ("WARNING", 0), (logging.ERROR, 0), (logging.DEBUG, 1)])
def test_progress_is_shown_as_messages_of_the_level_info_are(log_level, lines):
    hook, runner = ProgressHook(), running(log_level)
    hook._begin(runner, "training", 10)
    hook._show(3)
    assert runner.console.file.getvalue().count("training  3/10") == lines


def test_a_line_of_the_training_comes_also_where_validations_begin_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("lockstep.hooks.progress.perf_counter", lambda: now)
    hook, runner = ProgressHook(period_seconds=30.0), running()
    due = []
    for second in range(0, 100, 10):
        now = float(second)
        hook._begin(runner, "training", 100)
        due.append(hook._is_due())
    assert due == [second in (30, 60, 90) for second in range(0, 100, 10)]


def test_values_that_a_loop_gives_are_shown_the_loss_first(tmp_path: Path) -> None:
    session = Session(tmp_path, randomness={"seed": 0})
    parts = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 1)}
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.0) for name, part in parts.items()}
    models, own, batches = session.prepare(parts, optimizers, torch.utils.data.DataLoader(torch.ones(4, 2)))
    for _ in session.epochs(2):
        for x in batches:
            for name, part in models.items():
                own[name].update_params(part(x).mean())
            session.log(**dict(zip("abcdef", range(6), strict=True)), **({"loss": 0.5} if session.epoch else {}))
    lines = [
        line for line in (session.run_dir / "log.txt").read_text().splitlines() if "INFO" in line and "epoch " in line
    ]
    assert "epoch 1/2  a 0  b 1.0000  c 2.0000  d 3.0000  e 4.0000  " in lines[0]
    assert "epoch 2/2  loss 0.5000  a 0  b 1.0000  c 2.0000  d 3.0000  " in lines[1]
