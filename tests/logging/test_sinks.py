"""Records of a run in a file."""

from __future__ import annotations

import json
import logging
import math
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.logging import JsonLinesSink


def test_a_full_disk_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonLinesSink(path)
    with caplog.at_level(logging.WARNING, "lockstep"):
        for _ in range(3):
            sink.write({"loss": 1.0})
        sink.close()
    (record,) = caplog.records
    assert "metrics.jsonl: [Errno 28] No space left on device. The run goes on without them" in record.getMessage()


def test_a_file_that_is_removed_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    sink = JsonLinesSink(tmp_path / "run" / "metrics.jsonl")
    sink.path.parent.mkdir()
    sink.write({"loss": 1.0})
    shutil.rmtree(sink.path.parent)
    for _ in range(2):
        sink.write({"loss": 1.0})
    sink.close()
    assert len(caplog.messages) == 1
    assert "metrics.jsonl: it has been removed. The run goes on without them" in caplog.text


def test_records_are_written_again_when_there_is_room(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonLinesSink(path)
    sink.write({"iter": 1})
    sink.close()
    path.unlink()
    sink.write({"iter": 2})
    assert json.loads(path.read_text()) == {"iter": 2}
    sink.close()


def test_values_of_any_form_are_written(tmp_path: Path):
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink.write({
        "curve": {"precision": np.array([0.5, 1.0]), "recall": torch.tensor([[1, 2]])},
        ("a", 1): np.float32(0.25), "long": np.longdouble(2), "odd": math.nan, "object": range(2),
    })  # fmt: skip
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "curve": {"precision": [0.5, 1.0], "recall": [[1, 2]]},
        "('a', 1)": 0.25, "long": "2.0", "odd": "nan", "object": "range(0, 2)",
    }  # fmt: skip


def test_a_record_says_when_it_was_written_unless_it_has_such_a_value(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", has_times=True)
    before = datetime.now(UTC).replace(microsecond=0)
    sink.write({"mode": "val", "iter": 1})
    sink.write({"mode": "val", "iter": 2, "utc": 0.5})
    sink.close()
    first, second = map(json.loads, sink.path.read_text().splitlines())
    assert before <= datetime.fromisoformat(first.pop("utc")) <= datetime.now(UTC)
    assert (first, second) == ({"mode": "val", "iter": 1}, {"mode": "val", "iter": 2, "utc": 0.5})
