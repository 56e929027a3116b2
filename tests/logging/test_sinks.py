"""Records of a run in a file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

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
