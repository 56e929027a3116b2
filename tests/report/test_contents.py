"""The picture of a search for a learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.report import read_run

from .samples import search_record, train_record, write_run, write_search
from .test_page import Page, html_of, page_of


def test_a_search_has_a_picture_and_a_tile(tmp_path: Path):
    html = html_of(write_search(tmp_path / "run"))
    page = Page(html)
    assert "Search for a learning rate one update at each rate" in page.texts["h2"]
    assert ("aria-label", "Loss over learning rate: 0.01 is suggested") in page.attributes
    assert "suggested learning rate" in page.texts["dt"]
    search = page.values["search"]
    assert search["mark"] == [0.01, "0.01 suggested"]
    assert search["lines"][0]["x"] == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert search["range"] == [1.0, 2.0], "a loss that diverges leaves the axis"
    assert 'class="card chart search"><figcaption><h3>Loss over learning rate</h3><button' in html
    assert page.values["charts"] == []
    assert "Curves" not in html


def test_the_last_of_two_searches_is_shown_beside_the_training(tmp_path: Path):
    first = [search_record(step, lr=0.1 * step, loss=1.0, suggestion=0.1) for step in (1, 2)]
    second = [search_record(step, lr=0.01 * step, loss=1.0, suggestion=None) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "run", [*first, *second, train_record(10), train_record(20)])
    assert [record["lr"] for record in read_run(folder).lr_search] == pytest.approx([0.01, 0.02, 0.03])
    page = page_of(folder)
    assert ("aria-label", "Loss over learning rate: no rate is suggested") in page.attributes
    assert "suggested learning rate" not in page.texts["dt"]
    assert len(page.values["charts"]) > 0
    assert page.values["across"] == [0, 20]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [search_record(1, lr=0.1, loss=1.0)],
        [search_record(1, lr=0.0, loss=1.0), search_record(2, lr=-1.0, loss=1.0), search_record(3, lr=0.1, loss=1.0)],
        [search_record(step, lr=0.1 * step, loss="nan") for step in (1, 2)],
        [{"mode": "lr_search", "iter": 1, "lr": "x"}, {"mode": "lr_search", "iter": 2}],
        [search_record(1, lr=0.1, loss=1.0), search_record(2, lr=0.1, loss=1.0)],
    ],
)
def test_records_that_make_no_picture(tmp_path: Path, records: list):
    page = page_of(write_run(tmp_path / "run", [*records, train_record(10)]))
    assert page.values["search"] is None
