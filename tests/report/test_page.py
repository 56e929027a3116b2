"""The page as text: what it says, and that it asks nobody for anything."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep import Session
from lockstep.errors import ConfigError
from lockstep.report import page_html, read_run, write_page
from lockstep.report.figures import best
from lockstep.report.page import highlighted

from .samples import train_record, val_record, write_run, write_whole_run

VOID = {"meta", "link"}


class Page(HTMLParser):
    """Headings, cells and attributes of a page, after a check that its elements are nested well."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    @property
    def values(self) -> dict[str, Any]:
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))


def html_of(folder: Path) -> str:
    return page_html(read_run(folder), folder)


def page_of(folder: Path) -> Page:
    return Page(html_of(folder))


def curves_of(chart: dict[str, Any]) -> list[tuple[list[float], list[float]]]:
    return [(line["x"], line["y"]) for line in chart["lines"]]


def test_the_page_shows_everything_that_is_recorded(tmp_path: Path):
    page = page_of(write_whole_run(tmp_path / "digits" / "20261121_120000"))
    assert page.texts["h1"] == ["20261121_120000"]
    assert [title.strip().split("  ")[0] for title in page.texts["h3"]] == [
        "Loss", "Accuracy %", "Throughput samples/s", "Time of a step ms", "Learning rate", "Peak memory MiB",
    ]  # fmt: skip
    assert (
        "2 ranks · DigitsNet, 18,490 parameters, DDPStrategy · 21 November 2026, 12:00 UTC" in page.texts["header"][0]
    )
    assert page.texts["td"] == ["val", "1", "50", "91.25", "val", "2", "100", "97.5"]
    assert page.texts["b"] == ["97.5"]
    terms = dict(zip(page.texts["dt"], page.texts["dd"][-len(page.texts["dt"]) :], strict=True))
    assert terms["seed"] == "3"
    assert terms["torch"] == "2.13.0"
    assert terms["ranks 0, 1"] == "node1, cpu (A fast one), 1 thread"
    assert page.texts["code"] == ["work_dir = 'runs'  # here\nlr = 1e-3\n"]


def test_the_values_of_all_curves_are_there(tmp_path: Path):
    values = page_of(write_whole_run(tmp_path / "run")).values
    assert values["across"] == [0, 100]
    assert values["epochs"] == [[1, 50], [2, 100]]
    steps = list(range(10, 101, 10))
    loss, accuracy, throughput, step, *_ = values["charts"]
    assert curves_of(loss) == [(steps, [float(f"{30 / step:.5g}") for step in steps])]
    assert curves_of(accuracy) == [([50, 100], [91.25, 97.5])]
    assert throughput["lines"][0]["y"] == [5000.0] * 10
    assert [line["y"][0] for line in step["lines"]] == pytest.approx([13, 5, 2])  # compute, gradients, data


def test_what_is_no_sample_is_not_called_one(tmp_path: Path):
    environment = {"counted_in": "units"}  # of a training with `batch_size_of`
    page = page_of(write_run(tmp_path / "run", environment=environment))
    assert "Throughput units/s" in [title.strip().split("  ")[0] for title in page.texts["h3"]]
    assert any("units, median" in text for text in page.texts["dd"])


def test_tokens_and_mfu_are_shown_if_they_are_recorded(tmp_path: Path):
    rates = {"samples_per_second": 50.0, "tokens_per_second": 51_200.0, "flops_per_second": 4e13, "mfu": 0.4321}
    records = [train_record(step, **rates) for step in (10, 20)]
    page = page_of(write_run(tmp_path / "run", records))
    titles = [title.strip().split("  ")[0] for title in page.texts["h3"]]
    assert titles[1:4] == ["Throughput samples/s", "Tokens tokens/s", "Model FLOPs utilization %"]
    assert not any("flops_per_second" in title for title in titles)
    assert page.values["charts"][3]["lines"][0]["y"] == [43.21, 43.21]
    assert {"tokens", "MFU"} <= set(page.texts["dt"])
    assert {"51,200/s", "43.2%"} <= {text.replace(" ", "") for text in page.texts["dd"]}


def test_without_a_known_peak_the_flops_of_a_second_are_shown(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", [train_record(step, flops_per_second=4.321e12) for step in (10, 20)]))
    titles = [title.strip().split("  ")[0] for title in page.texts["h3"]]
    assert page.values["charts"][titles.index("Model FLOPs GFLOP/s")]["lines"][0]["y"] == [4321, 4321]
    assert "model FLOPs" in page.texts["dt"]
    assert "4,320GFLOP/s" in {text.replace(" ", "") for text in page.texts["dd"]}


def test_the_page_needs_no_network(tmp_path: Path):
    html = html_of(write_whole_run(tmp_path / "run"))
    page = Page(html)
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert links == ["data:,"]
    assert "http:" not in html
    assert html.count("https:") == 1
    assert "/*! https://github.com/leeoniya/uPlot (v1.6.32) */" in html, "the library's notice"
    assert "@import" not in html
    assert "url(" not in html
    assert "default-src 'none'" in html
    assert len(html) < 100_000


def test_names_cannot_become_markup(tmp_path: Path):
    evil = "</script><script>alert(1)</script>"
    records = [train_record(10, **{evil: 1.0}), val_record(10, **{evil: 2.0})]
    environment = {"command": evil, "model": evil, "units": {evil: evil}, "ranks": [{"host": evil}], "started": evil}
    folder = write_run(tmp_path / "<b>" / "<i>", records, environment=environment, config=evil)
    page = page_of(folder)
    assert len(page.texts["script"]) == 3
    assert "i" not in page.texts
    assert page.texts["h1"] == ["<i>"]


def test_a_run_that_was_only_validated(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", [{"mode": "test", "epoch": 0, "iter": 0, "loss": 0.5, "acc": "nan"}]))
    assert page.texts["td"] == ["test", "0", "0", "0.5", "nan"]
    assert page.values["across"] == [0, 1]
    assert page.values["charts"][1]["lines"][0]["y"] == [None]


def test_the_page_of_a_run_that_has_failed_says_how(tmp_path: Path):
    session = Session(tmp_path / "work", log_level="CRITICAL")
    model = nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)

    def train() -> None:
        with session:
            for _ in session.epochs(1):
                for x in batches:
                    session.step(model(x).mean())
                    if session.iter == 2:
                        raise ValueError("<b>no</b> such file: password=abc")

    with pytest.raises(ValueError, match="such file"):
        train()
    (text,) = Page(page_html(read_run(session.run_dir), tmp_path)).texts["li"]
    assert re.fullmatch(
        r"failed after iteration 2 at test_page\.py:\d+: ValueError: <b>no</b> such file: password=\*\*\*", text
    )


def test_a_run_of_one_record(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", [{"mode": "train", "epoch": "nan", "iter": 7, "loss": "inf"}]))
    assert ("aria-label", "Loss by iteration: train ends at not finite") in page.attributes


def write_parts(folder: Path, *, gone: int = 0) -> Path:
    """Write a run of 50 iterations that was resumed after 20 and after 30; the first `gone` parts are removed."""
    parts = {}
    for name, begin, end in (("a b", 0, 40), ("<c>", 20, 40), ("d", 30, 50)):
        records = [train_record(step, loss=float(begin + step)) for step in range(begin + 10, end + 1, 10)]
        if parts:
            path = str(Path("/moved/since") / list(parts)[-1] / "epoch_1")
            records = [{"mode": "resumed", "epoch": 1, "iter": begin, "path": path}, val_record(begin, acc=2), *records]
        parts[name] = write_run(folder / name, [*records, val_record(end, acc=end)])
    for part in list(parts.values())[:gone]:
        shutil.rmtree(part)
    return folder / "d"


def test_a_run_that_was_resumed_twice_is_one_curve(tmp_path: Path):
    page = page_of(write_parts(tmp_path / "runs"))
    loss, accuracy, *_ = page.values["charts"]
    assert curves_of(loss) == [([10, 20, 30, 40, 50], [10.0, 20.0, 50.0, 70.0, 80.0])]
    assert curves_of(accuracy) == [([20, 30, 50], [2.0, 2.0, 50.0])]
    assert (page.values["across"], page.values["resumed"]) == ([0, 50], [20, 30])
    assert page.texts["p"][2] == "resumed after iteration 20 of a b, after iteration 30 of <c>"
    assert [value for name, value in page.attributes if name == "href"][1:] == ["../a%20b/", "../%3Cc%3E/"]


def test_a_part_in_a_folder_whose_name_is_not_utf8_is_linked(tmp_path: Path):
    last = write_parts(tmp_path / "runs")
    named = (last.parent / "<c>").rename(last.parent / os.fsdecode(b"caf\xe9"))
    records = last / "metrics.jsonl"
    records.write_text(records.read_text().replace("<c>", json.dumps(named.name)[1:-1]))
    write_page(read_run(last), last / "report.html")
    links = [value for name, value in Page((last / "report.html").read_text()).attributes if name == "href"]
    assert links[1:] == ["../a%20b/", "../caf%E9/"]


def test_a_part_that_is_gone_is_told(tmp_path: Path):
    page = page_of(write_parts(tmp_path / "runs", gone=1))
    assert page.values["across"] == [20, 50]
    assert "what came before iteration 20 is missing: `" in page.texts["header"][0]


def test_without_an_exchange_there_is_no_share_of_it(tmp_path: Path):
    records = [{"mode": "train", "epoch": 1, "iter": step, "time": 0.02, "data_time": 0.005} for step in (10, 20)]
    page = page_of(write_run(tmp_path / "run", records))
    assert curves_of(page.values["charts"][0]) == [([10, 20], [15.0, 15.0]), ([10, 20], [5.0, 5.0])]


def test_many_losses_have_charts_of_their_own(tmp_path: Path):
    losses = {f"loss_{index}": 1.0 for index in range(6)}
    titles = page_of(write_run(tmp_path / "run", [train_record(10, **losses)])).texts["h3"]
    assert [title for title in titles if title.startswith("train loss_")] == [
        f"train loss_{index}" for index in range(6)
    ]


def test_faults_are_told_on_the_page(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"mode": "tr')
    assert page_of(folder).texts["header"][0].endswith("metrics.jsonl: 1 unreadable line left out (13)")


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"cannot be written to `.*page.html`: No such file or directory"):
        write_page(run, tmp_path / "nowhere" / "page.html")


def test_an_installation_without_a_part_of_the_page_is_no_fault_of_the_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("lockstep.report.page.files", lambda package: tmp_path)
    with pytest.raises(FileNotFoundError, match="uPlot"):
        write_page(read_run(write_run(tmp_path / "run")), tmp_path / "page.html")


POINTS = [(1.0, 3.0), (2.0, float("nan")), (3.0, 1.0)]


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "top1_accuracy",
        "coco/bbox_mAP",
        "mIoU",
        "F1",
        "PCKAccuracy",
        "AR@100",
        "cert_acc",
        "mAP50",
        "macrof1",
    ],
)
def test_greater_may_be_better(name: str):
    assert best(name, POINTS) == (1.0, 3.0)


@pytest.mark.parametrize(
    "name", ["val_loss", "frechet_distance", "top1_error", "RMSE", "accuracy_loss", "valLoss", "sMAPE"]
)
def test_less_may_be_better(name: str):
    assert best(name, POINTS) == (3.0, 1.0)


def test_where_the_name_does_not_tell_nothing_is_best():
    assert best("speed", POINTS) is None
    assert best("fidelity", POINTS) is None
    assert best("accuracy", POINTS[1:2]) is None


def test_vals_and_tests_have_bests_of_their_own(tmp_path: Path):
    records = [
        val_record(50, acc=80, speed=7),
        val_record(100, acc=70, speed=9),
        {**val_record(100, acc=75), "mode": "test"},
    ]
    page = page_of(write_run(tmp_path / "run", records))
    assert page.texts["b"] == ["80", "75"]
    tiles = dict(zip(page.texts["dt"], page.texts["dd"][::2], strict=True))
    assert tiles == {"best acc": "80", "final speed": "9"}


def test_a_report_does_not_import_torch():
    code = "import sys, lockstep.cli.main, lockstep.report; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_colour_is_defined(tmp_path: Path):
    html = html_of(write_whole_run(tmp_path / "run"))
    style = html.partition("<style>")[2].partition("</style>")[0]
    used, defined = set(re.findall(r"var\((--[a-z]+\d?)\)", html)), set(re.findall(r"(--[a-z]+\d?):", style))
    assert used <= defined


def straggler(iteration: int, rank: int, part: str | None, **more: Any) -> dict[str, Any]:
    times = {"seconds": 0.095, "others": 0.015, "lost": 0.08} if part else {"seconds": 0.0, "others": 0.0, "lost": 0.0}
    place = {"mode": "straggler", "epoch": 1, "iter": iteration, "rank": rank, "part": part, "begin": iteration - 9}
    return {**place, **times, "host": "<node>", **more}


def test_slow_ranks_are_listed_with_their_times(tmp_path: Path):
    records = [train_record(step) for step in range(10, 101, 10)]
    records[5:5] = [straggler(50, 2, "compute"), straggler(70, 2, None), straggler(90, 1, "data", host="")]
    page = page_of(write_run(tmp_path / "run", records))
    rows = [text for text in page.texts["tr"] if "forward" in text or "data" in text]
    assert rows == ["forward and backward passes2 (<node>)41709515" + "80", "wait for data181the end951580"]
    assert any("Slow ranks" in text for text in page.texts["h2"])


def test_without_slow_ranks_there_is_no_list(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", [train_record(10), straggler(20, 1, None)]))
    assert not any("Slow ranks" in text for text in page.texts["h2"])


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("'x < y'  # & so", '<span class="s1">\'x &lt; y\'</span>  <span class="c1"># &amp; so</span>'),
        ("import os", '<span class="kn">import</span>'),
        ("[None, 2]", '<span class="kc">None</span><span class="p">,</span> <span class="mi">2</span>'),
    ],
)
def test_source_is_coloured(source: str, html: str):
    assert html in highlighted(source)


@given(st.text(st.characters(exclude_characters="\r\ufeff")))  # files are read with line ends of one kind
def test_any_text_can_be_shown(text: str):
    assert unescape(re.sub(r"</?span[^>]*>", "", highlighted(text))).rstrip("\n") == text.rstrip("\n")
