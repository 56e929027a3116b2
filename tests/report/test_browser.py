"""The page in a real browser: its script runs without a complaint, and reads values out.

These tests need Chromium. Where it is missing they are skipped, or fail where CI=true, which installs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from lockstep.report import page_html, read_run

from .samples import write_search, write_whole_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = """
    --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update
    --disable-sync --disable-extensions --disable-default-apps --enable-logging=stderr --window-size=1200,900 --dump-dom
"""

Browse = Callable[..., str]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Return a function that opens the report of a run, runs a script in it and returns the page as it is then."""
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("chromium is not installed")

    def browse(script: str = "", write: Callable[[Path], Path] = write_whole_run) -> str:
        html = page_html(read_run(write(tmp_path / f"run{len(list(tmp_path.iterdir()))}")))
        page = tmp_path / "page.html"
        page.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
        done = subprocess.run(
            [CHROMIUM, *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not complaints, "\n".join(complaints)
        return done.stdout

    return browse


def move_to(plot: str, x: float, y: float) -> str:
    return (
        f"const area = document.querySelector('{plot}'), box = area.getBoundingClientRect();"
        f"area.dispatchEvent(new PointerEvent('pointermove', {{"
        f"clientX: box.left + {x} * box.width, clientY: box.top + {y} * box.height}}));"
    )


def outputs_of(dom: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<output>(.*?)</output>", dom)]


def test_the_script_runs_to_its_end(browse: Browse):
    dom = browse()
    assert '<html lang="en" data-ready="yes">' in dom
    assert outputs_of(dom)[:2] == ["0.3", "97.5"]


def test_all_plots_read_out_the_iteration_under_the_pointer(browse: Browse):
    dom = browse(move_to(".chart .plot", 0.41, 0.5))
    assert 'data-place="iteration 40, epoch 1"' in dom
    loss, accuracy, _, compute, exchange, data, *_ = outputs_of(dom)
    assert (loss, accuracy) == ("0.75", "91.25")
    assert (compute, exchange, data) == ("13", "5", "2")
    assert outputs_of(dom)[-4:] == ["rank 0: 20 ms", "rank 0: 13 ms", "rank 0: 5 ms", "rank 0: 2 ms"]


def test_a_heat_map_reads_out_the_rank_under_the_pointer(browse: Browse):
    dom = browse(move_to(".heatmap .plot", 0.955, 0.75))
    assert outputs_of(dom)[-4:] == ["rank 1: 30 ms", "rank 1: 23 ms", "rank 1: 5 ms", "rank 1: 2 ms"]


def test_leaving_shows_the_latest_values_again(browse: Browse):
    leave = "area.dispatchEvent(new PointerEvent('pointerleave'));"
    assert outputs_of(browse(move_to(".chart .plot", 0.41, 0.5) + leave)) == outputs_of(browse())


def test_keys_move_the_cursor_too(browse: Browse):
    press = "area.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));"
    script = "const area = document.querySelector('.heatmap .plot');" + 25 * press
    assert 'data-place="iteration 75, epoch 2"' in browse(script)


def test_keys_leave_a_point_of_a_curve_with_few_of_them(browse: Browse):
    press = "area.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));"
    script = "const area = document.querySelector('.chart .plot');" + 12 * press
    assert 'data-place="iteration 90, epoch 2"' in browse(script)


def test_a_search_reads_out_the_loss_at_the_rate_under_the_pointer(browse: Browse):
    dom = browse(move_to(".search .plot", 0.78, 0.5), write_search)
    assert 'data-place="learning rate 0.1"' in dom
    assert outputs_of(dom) == ["1", "1"]
    assert 'class="cursor" data-place="learning rate 0.1" style="left: 80%;"' in dom


def test_a_loss_that_leaves_the_axis_has_no_dot(browse: Browse):
    dom = browse(move_to(".search .plot", 1.0, 0.5), write_search)
    assert outputs_of(dom) == ["3,000", "3,000"]
    assert dom.count('class="dot" hidden=""') == 2


def test_the_policy_of_the_page_is_in_force(browse: Browse):
    ask = "fetch('data:,').then(() => 'loaded', () => 'refused').then((t) => document.body.dataset.asked = t)"
    with pytest.raises(AssertionError, match="violates the following Content Security Policy"):
        browse(ask)
