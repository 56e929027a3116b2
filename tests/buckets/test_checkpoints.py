"""Whole checkpoints in a bucket, of a real server that speaks S3: a run goes on from there, on another machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from typer.testing import CliRunner

from lockstep.checkpoint import find_checkpoints, load_state, save_state, verify
from lockstep.cli.main import app
from lockstep.errors import ConfigError
from lockstep.location import locate
from lockstep.weights import export_checkpoint

from .conftest import run_job, serving
from .training_job import train


def called(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def names(url: str) -> list[str]:
    s3 = s3fs.S3FileSystem()
    s3.invalidate_cache()
    root = url.removeprefix("s3://")
    return sorted(path.removeprefix(f"{root}/") for path in s3.find(root))


def test_a_run_that_is_killed_in_a_save_goes_on_from_the_bucket(tmp_path: Path):
    whole = train(tmp_path / "whole" / "net", None, 5)
    run_job("training_job.py", tmp_path / "one" / "net", "s3://runs", 5, code=None, DIE_IN="epoch_4")
    left = names("s3://runs/net")
    assert sum(".draft." in name for name in left) == 1
    assert {name.partition("/")[2] for name in left if name.endswith("manifest.json")} == {
        "epoch_2/manifest.json",
        "epoch_3/manifest.json",
    }
    # On one rank instead of two, where the folder of the work_dir is empty; and now asynchronous.
    work_dir = tmp_path / "two" / "net"
    second = train(work_dir, "s3://runs", 5, resume=True, async_save=True)
    assert sorted(second) == list(range(24, 40))
    assert second == pytest.approx({i: whole[i] for i in second}, rel=1e-6, abs=1e-6)
    (run,) = (path.name for path in work_dir.iterdir())
    kept = [f"{run}/epoch_{n}/{file}" for n in (4, 5) for file in ("manifest.json", "rank_0.safetensors")]
    assert names("s3://runs/net") == [*kept, "last_checkpoint"]
    code, shown = called("checkpoints", "s3://runs/net", "--verify")
    assert code == 0, shown
    assert f"{run}/epoch_5 (last)" in shown
    third = train(tmp_path / "three", None, 6, resume=True, load_from="s3://runs/net")
    assert sorted(third) == list(range(40, 48))


def test_large_checkpoints_are_sent_in_parts_and_read_by_ranges():
    torch.manual_seed(0)
    state = {"model": {"a": torch.randn(9_000_000), "b": torch.randn(5_000_000), "c": torch.arange(5)}}  # 56 MB
    directory = locate("s3://runs/large/epoch_1")
    for _ in range(2):  # the second takes the place of the first
        save_state(directory, state, {"n": 1}, last_of=locate("s3://runs/large"))
        verify(directory)
        wanted = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
        loaded = load_state(directory, wanted)["model"]
        assert all(torch.equal(loaded[name], value) for name, value in state["model"].items())
    assert names("s3://runs/large") == ["epoch_1/manifest.json", "epoch_1/rank_0.2.safetensors", "last_checkpoint"]


@pytest.mark.parametrize("url", ["s3://runs/a b[1]*?ü%20#x", "s3://runs//deep//er/", "s3://runs/"])
def test_any_name_will_do(url: str, tmp_path: Path):
    first = train(tmp_path / "one" / "n[e]t", url, 1, resume=True)
    assert sorted(first) == list(range(8))
    second = train(tmp_path / "two" / "n[e]t", url, 2, resume=True, max_keep_ckpts=1)
    assert sorted(second) == list(range(8, 16))
    root = locate(url) / "n[e]t"
    assert [one.name for one in find_checkpoints([root])] == ["epoch_2"]
    assert len(names(str(root))) == 3


def test_the_commands(tmp_path: Path):
    root = locate("s3://runs/commands")
    for number in (1, 2, 3):
        state = {"model": {"w": torch.full((30,), float(number))}}
        save_state(root / "run" / f"epoch_{number}", state, {"epoch": number, "iter": number}, last_of=root)
    assert called("checkpoints", "prune", root, "--keep", 1, "--yes")[0] == 0
    assert [one.name for one in find_checkpoints([root])] == ["epoch_3"]
    assert len(names("s3://runs/commands")) == 3
    code, shown = called("export", root, tmp_path / "out.safetensors")
    assert code == 0, shown
    done = export_checkpoint("s3://runs/commands", "s3://runs/exported")
    assert str(done.checkpoint) == "s3://runs/commands/run/epoch_3"
    code, shown = called("checkpoints", "s3://no-such-bucket/runs")
    assert code == 1
    assert "s3://no-such-bucket/runs does not exist" in shown


def test_a_server_that_goes_away_in_a_run_is_said_on_every_rank(tmp_path: Path):
    with serving() as (url, process):
        env: dict[str, Any] = {"AWS_ENDPOINT_URL": url, "SERVER": str(process.pid), "BREAK_AFTER": "2"}
        s3fs.S3FileSystem(endpoint_url=url).mkdir("elsewhere")
        words = (tmp_path / "net", "s3://elsewhere/runs", 3)
        said = run_job("training_job.py", *words, code=1, ON_SAVE_ERROR="warn", **env)
    assert "rank 0 raised OSError" in said  # no training is left that could go on without the last one
    for name in ("log.txt", "log_rank1.txt"):
        (log,) = (tmp_path / "net").glob(f"*/{name}")
        for epoch in (2, 3):
            says = f"epoch_{epoch} could not be written: rank 0: s3://elsewhere/runs/net/"
            assert says in log.read_text()
        assert "Training goes on without it" in log.read_text()


def test_a_server_that_goes_away_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serving() as (url, process):
        for name, value in {"AWS_ENDPOINT_URL": url, "SERVER": str(process.pid), "BREAK_AFTER": "1"}.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # which know the other server
        s3fs.S3FileSystem().mkdir("elsewhere")
        with pytest.raises(OSError, match=r"epoch_1 could not be written: rank 0: s3://elsewhere/runs/net/.* can"):
            train(tmp_path / "net", "s3://elsewhere/runs", 2)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("url", "env", "says"),
    [
        (
            "s3://no-such-bucket/runs",
            {},
            r"The specified bucket does not exist.* Check that the bucket exists, and",
        ),
        ("s3://runs/x", {"AWS_ACCESS_KEY_ID": ""}, r"s3://runs/x/.* Unable to locate credentials.* has credentials to"),
        ("gs://runs/x", {}, r"gs://runs/x must be .*pip install 'lockstep-engine\[gs\]'"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_named_at_the_start(
    url: str, env: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=says):
        train(tmp_path / "net", url, 1)
    s3fs.S3FileSystem.clear_instance_cache()
    assert os.listdir(tmp_path) == []
