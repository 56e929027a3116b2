from __future__ import annotations

import json
from pathlib import Path

RECORD = {"mode": "train", "epoch": 1, "iter": 10, "loss": 1.5}


def test_a_trained_run_becomes_a_page(lockstep, tmp_path: Path):
    assert lockstep("train", "line.py", "--nproc", "2")[0] == 0
    code, out, err = lockstep("report", "work_dirs/line")
    assert (code, err) == (0, "")
    (page,) = tmp_path.glob("work_dirs/line/*/report.html")
    assert out == f"{page.relative_to(tmp_path)}\n"
    text = page.read_text()
    for word in ("Loss", "Learning rate", "Line, 2 parameters", "toy.Points"):
        assert word in text


def test_a_resumed_run_is_shown_with_what_it_resumed(lockstep, tmp_path: Path):
    assert lockstep("train", "line.py")[0] == 0
    assert lockstep("train", "line.py", "--resume", "--cfg-options", "train_cfg.max_epochs=2")[0] == 0
    first, last = sorted((tmp_path / "work_dirs/line").glob("*/"))
    assert lockstep("report", "work_dirs/line", "--out", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert f'resumed after iteration 4 of <a href="work_dirs/line/{first.name}/">{first.name}</a>' in page
    assert '"epochs":[[1,4],[2,8]],"resumed":[4]' in page
    assert last.name in page


def test_the_page_goes_where_one_wants(lockstep, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(RECORD) + "\n{")
    code, out, err = lockstep("report", ".", "--out", "page.html")
    assert (code, out) == (0, "page.html\n")
    assert err == "warning: metrics.jsonl: 1 unreadable line left out (2)\n"
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_the_home_folder_may_be_named_within_the_option(lockstep, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(RECORD) + "\n")
    home = tmp_path / "home"
    home.mkdir()
    assert lockstep("report", ".", "--out=~/page.html", env={"HOME": str(home)}) == (0, f"{home}/page.html\n", "")
    assert (home / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_what_cannot_be_shown_is_told_in_one_line(lockstep, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("")
    for words, says in (
        (["nowhere"], "error: there is no folder `nowhere`\n"),
        (["toy.py"], "error: `RUN_DIR` must be the folder of a run, but `toy.py` is a file\n"),
        (["."], "error: `metrics.jsonl` has no record yet; there is nothing to show of this run\n"),
    ):
        assert lockstep("report", *words) == (1, "", says)


def test_a_page_that_cannot_be_written_tells_the_option(lockstep, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(RECORD) + "\n")
    code, out, err = lockstep("report", ".", "--out", "nowhere/page.html")
    assert (code, out) == (1, "")
    assert err == (
        "error: the report cannot be written to `nowhere/page.html`: No such file or directory. `--out` names another "
        "file\n"
    )
