from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.report import find_run, read_run, write_page
from lockstep.report.records import number

from .samples import train_record, val_record, write_run


def test_a_run_is_found_by_its_folder(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    assert find_run(folder) == folder


def test_of_several_runs_the_last_is_taken(tmp_path: Path):
    runs = [write_run(tmp_path / name) for name in ("20260101_1", "20260101_2", "20260101_0")]
    for age, run in enumerate(reversed(runs)):
        os.utime(run / "metrics.jsonl", (1000 - age, 1000 - age))
    (tmp_path / "ranks").mkdir()
    assert find_run(tmp_path) == runs[-1]
    for run in runs:
        os.utime(run / "metrics.jsonl", (1000, 1000))
    assert find_run(tmp_path) == runs[1]


def test_the_last_training_is_taken_though_a_test_came_after_it(tmp_path: Path):
    training = write_run(tmp_path / "20260101_1")
    evaluation = tmp_path / "20260101_2"
    evaluation.mkdir()
    record = '{"mode": "val", "epoch": 1, "iter": 0, "split": {"mode": "train"}, "accuracy": 1.0}'
    (evaluation / "metrics.jsonl").write_text(record + "\n")
    assert find_run(tmp_path) == training
    assert find_run(evaluation) == evaluation


def test_where_there_is_no_run_that_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no folder `.*nothing`"):
        find_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"holds no run: there is no metrics.jsonl in it or in a folder of it"):
        find_run(tmp_path)
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "log.txt").touch()
    with pytest.raises(ConfigError, match=r"or in a folder of it\. See .*failed/log\.txt"):
        find_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"must be the folder of a run, but `.*file` is a file"):
        find_run(tmp_path / "file")


def test_an_empty_run_is_told(tmp_path: Path):
    folder = write_run(tmp_path / "run", records=[])
    with pytest.raises(ConfigError, match=r"has no record yet; there is nothing to show"):
        read_run(folder)
    (folder / "metrics.jsonl").write_text("no json\n")
    with pytest.raises(ConfigError, match=r"has no record yet, only what cannot be read \(metrics.jsonl: 1 unreadable"):
        read_run(folder)


def test_records_are_sorted_by_what_they_are(tmp_path: Path):
    records = [train_record(10), {"mode": "epoch", "epoch": 1, "iter": 10, "loss": 3}, val_record(10, acc=1)]
    run = read_run(write_run(tmp_path / "run", [*records, {"mode": "test", "epoch": 1, "iter": 10, "acc": 2}]))
    assert [record["mode"] for record in run.train] == ["train"]
    assert [record["mode"] for record in run.evaluations] == ["val", "test"]
    assert (run.environment, run.config, run.faults) == ({}, "", [])


def test_what_cannot_be_read_is_left_out_and_told(tmp_path: Path):
    folder = write_run(tmp_path / "run", environment={})
    broken = ["{", "[1]", "", '{"mode": "train"}', '{"mode": "train", "iter": "one"}', "\x00", '{"mode": "train", "it']
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(broken))
    (folder / "environment.json").write_bytes(b"\xff{")
    run = read_run(folder)
    assert len(run.train) == 10
    assert run.faults == [
        "metrics.jsonl: 6 unreadable lines left out (13, 14, 16, 17, 18 and 1 more)",
        "environment.json: unreadable, left out",
    ]


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), (0.5, 0.5), ("inf", math.inf), ("-inf", -math.inf)])
def test_numbers(value: object, expected: float):
    assert number(value) == expected


@pytest.mark.parametrize("value", [None, True, "seven", "Infinity", [1.0], {}])
def test_what_is_no_number(value: object):
    assert number(value) is None


def test_nan_is_a_number():
    assert math.isnan(number("nan"))


@pytest.mark.parametrize(
    "line",
    [
        '{"mode": "train", "loss": 1, "iter": %s}' % ("9" * 400),
        '{"mode": "resumed", "iter": 5, "path": "\\u0000/x"}',
        '{"mode": "resumed", "iter": 5, "path": "\\ud800/x/y"}',
        json.dumps({"mode": "resumed", "iter": 5, "path": "a" * 5000 + "/x"}),
        '{"mode": "straggler", "iter": 5, "part": ["data"]}',
        '{"mode": "failed", "iter": 5, "error": ["x"], "at": {}}',
        '{"mode": "train", "iter": 200, "time": "nan"}',
        '{"mode": "train", "iter": 200, "loss": 1.7976931348623157e+308}',
    ],
)  # fmt: skip
def test_a_page_of_somebody_elses_records_is_written_whatever_they_hold(line: str, tmp_path: Path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as records:
        records.write(line + "\n")
    run = read_run(folder)
    assert (len(run.evaluations), run.resumed) == (2, [])
    write_page(run, tmp_path / "page.html")


def test_a_line_that_no_run_writes_is_left_out(tmp_path: Path):
    folder, line = write_run(tmp_path / "run"), "[" * 100_000
    (folder / "environment.json").write_text(line)
    with (folder / "metrics.jsonl").open("a") as records:
        records.write(line + "\n")
    before = len(read_run(write_run(tmp_path / "other")).train)
    run = read_run(folder)
    assert len(run.train) == before
    assert [fault.partition(":")[0] for fault in run.faults] == ["metrics.jsonl", "environment.json"]
    write_page(run, tmp_path / "page.html")


def test_of_two_runs_of_one_name_the_recorded_one_was_resumed(tmp_path: Path):
    """A sweep's trainings may begin within the same second, each in a work_dir of its own."""
    former = write_run(tmp_path / "one" / "20260101_000000")
    other = write_run(tmp_path / "two" / "20260101_000000")
    resumed = write_run(tmp_path / "two" / "20260102_000000")
    place = json.dumps({"mode": "resumed", "epoch": 1, "iter": 5, "path": str(former / "epoch_1")})
    records = resumed / "metrics.jsonl"
    records.write_text(f"{place}\n{records.read_text()}")
    assert read_run(resumed).resumed == [(former, 5)]
    former.rename(tmp_path / "one" / "moved")
    assert read_run(resumed).resumed == [(other, 5)]
