"""The page in a real browser: its script runs without a complaint, and reads values out.

These tests need Chromium. Where it is missing they are skipped, or fail where CI=true, which installs it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.report import page_html, read_run

from .chromium import Chromium
from .samples import train_record, write_run, write_whole_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
Browse = Callable[..., str]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("chromium is not installed")
    browser = Chromium(CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browse(tmp_path: Path, chromium: Chromium) -> Browse:
    """Return a function that opens the report of a run, runs a script in it and returns the page as it is then."""

    def browse(script: str = "", write: Callable[[Path], Path] = write_whole_run) -> str:
        folder = write(tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        html = page_html(read_run(folder), folder)
        page = tmp_path / "page.html"
        page.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
        dom, complaints = chromium.page(page.as_uri())
        assert not complaints, "\n".join(complaints)
        return dom

    return browse


def write_long_run(folder: Path) -> Path:
    """Write a run of so many records that groups of them are drawn, with a loss that is not finite once."""
    records = [train_record(step, loss="nan" if step == 500 else 1 / step) for step in range(1, 1001)]
    return write_run(folder, records)


def move_to(figure: str, x: float, y: float) -> str:
    """Return a script that moves the pointer to a place in a plot, in shares of its width and height."""
    return (
        f"const over = document.querySelector('{figure} .u-over'), box = over.getBoundingClientRect();"
        f"over.dispatchEvent(new MouseEvent('mousemove', {{"
        f"clientX: box.left + {x} * box.width, clientY: box.top + {y} * box.height}}));"
    )


def press(figure: str, key: str, times: int) -> str:
    """Return a script that presses a key some times while a plot has the focus."""
    return (
        f"for (let i = 0; i < {times}; i++) document.querySelector('{figure} .plot')"
        f".dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}));"
    )


def legend_of(dom: str) -> list[str]:
    """Return the values of the curves."""
    return re.findall(r'<tr class="u-series">.*?<td class="u-value">(.*?)</td></tr>', dom)


def test_the_script_draws_all_figures(browse: Browse):
    dom = browse()
    assert '<html lang="en" data-ready="yes">' in dom
    assert dom.count("<canvas") == dom.count("<figure")
    assert legend_of(dom)[:2] == ["0.3", "97.5"]


def test_all_plots_read_out_the_iteration_under_the_pointer(browse: Browse):
    dom = browse(move_to(".chart", 0.41, 0.5))
    assert 'data-place="iteration 40, epoch 1"' in dom
    loss, accuracy, _, compute, exchange, data, *_ = legend_of(dom)
    assert (loss, accuracy) == ("0.75", "91.25")
    assert (compute, exchange, data) == ("13", "5", "2")


def test_the_iteration_of_a_long_run_is_read_out_to_its_last_digit(browse: Browse):
    def write(folder: Path) -> Path:
        return write_run(folder, [train_record(step) for step in (123_456, 123_457)])

    assert 'data-place="iteration 123,456, epoch' in browse(move_to(".chart", 0.01, 0.5), write)


def test_leaving_shows_the_latest_values_again(browse: Browse):
    leave = "over.dispatchEvent(new MouseEvent('mouseleave'));"
    dom, before = browse(move_to(".chart", 0.41, 0.5) + leave), browse()
    assert legend_of(dom) == legend_of(before)


def test_keys_move_the_cursor_too_and_leave_a_point_of_a_curve_with_few_of_them(browse: Browse):
    assert 'data-place="iteration 90, epoch 2"' in browse(press(".chart", "ArrowLeft", 12))


def test_long_curves_can_be_seen_in_logarithms(browse: Browse):
    dom = browse("document.querySelector('.chart button').click();", write_long_run)
    assert 'aria-pressed="true"' in dom
    assert dom.count("<canvas") == dom.count("<figure")


def test_a_click_in_the_legend_hides_a_curve_with_its_band(browse: Browse):
    dom = browse("document.querySelector('.u-series:not(.helper) th').click();", write_long_run)
    assert dom.count('class="u-series u-off"') == 1
    assert dom.count('class="u-series helper u-off"') == 2


def test_dragging_zooms_in_on_all_plots(browse: Browse):
    drag = (
        "const over = document.querySelector('.chart .u-over'), box = over.getBoundingClientRect();"
        "const at = (kind, x) => new MouseEvent(kind, {bubbles: true, movementX: 1, "
        "clientX: box.left + x * box.width, clientY: box.top + 9});"
        "over.dispatchEvent(at('mousemove', 0.5)); over.dispatchEvent(at('mousedown', 0.5));"
        "over.dispatchEvent(at('mousemove', 1)); over.dispatchEvent(at('mouseup', 1));"
    )
    look = move_to(".chart:nth-of-type(3)", 0.01, 0.5)
    dom = browse(f"{drag} Promise.resolve().then(() => {{ {look} }});")
    assert 'data-place="iteration 50, epoch 1"' in dom


def test_the_policy_of_the_page_is_in_force(browse: Browse):
    ask = "fetch('data:,').then(() => 'loaded', () => 'refused').then((t) => document.body.dataset.asked = t)"
    with pytest.raises(AssertionError, match="violates the following Content Security Policy"):
        browse(ask)
