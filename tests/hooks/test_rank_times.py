from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.hooks.rank_times import RankTimes


def share(seconds: float, **more: float) -> dict[str, float]:
    return {"time": seconds, "data_time": seconds / 4, "memory_mib": 100.0, "loss": 1.0, **more}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_for_each_record(tmp_path: Path):
    times = RankTimes(tmp_path / "ranks.jsonl")
    times.add(10, 10, [share(0.0123456), share(0.5)])
    times.add(13, 3, [share(0.25, comm_time=0.1), share(0.5, comm_time=0.0)])
    times.close()
    assert rows_of(tmp_path / "ranks.jsonl") == [
        {"iter": 10, "count": 10, "time": [0.01235, 0.5], "data_time": [0.003086, 0.125], "memory_mib": [100, 100]},
        {
            "iter": 13,
            "count": 3,
            "time": [0.25, 0.5],
            "data_time": [0.0625, 0.125],
            "comm_time": [0.1, 0.0],
            "memory_mib": [100, 100],
        },
    ]


def test_a_column_that_some_ranks_lack_is_left_out(tmp_path: Path):
    times = RankTimes(tmp_path / "ranks.jsonl")
    times.add(10, 10, [share(1.0, comm_time=0.5), share(1.0)])
    times.close()
    (row,) = rows_of(tmp_path / "ranks.jsonl")
    assert "comm_time" not in row


def test_many_ranks_share_rows(tmp_path: Path):
    times = RankTimes(tmp_path / "ranks.jsonl")
    for record in range(1, 6):
        times.add(10 * record, 10, [share(float(record))] * 128)
    times.close()
    rows = rows_of(tmp_path / "ranks.jsonl")
    assert [(row["iter"], row["count"], row["time"][0]) for row in rows] == [(20, 20, 1.5), (40, 20, 3.5), (50, 10, 5)]


def test_without_records_there_is_no_file(tmp_path: Path):
    RankTimes(tmp_path / "ranks.jsonl").close()
    assert list(tmp_path.iterdir()) == []
