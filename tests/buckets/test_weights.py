"""Weights in a bucket: of a real server that speaks S3, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from safetensors.torch import load_file

from lockstep.errors import ConfigError
from lockstep.location import locate
from lockstep.weights import export_checkpoint, load_checkpoint

from ..weights.test_export import Tied, content, equal, train
from ..weights.test_safetensors_file import write
from .conftest import run_job

FORMS = [("safetensors", "one.safetensors"), ("torch", "net.pth"), ("safetensors", "a/b")]


def test_a_model_is_saved_to_a_bucket_and_loaded_from_it(tmp_path: Path) -> None:
    run_job("weights_job.py", tmp_path / "work", "save", "s3://weights/saved")
    names = sorted(path.rpartition("/")[2] for path in s3fs.S3FileSystem().ls("weights/saved"))
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) > 2
    export_checkpoint(tmp_path / "work", tmp_path / "exported")
    assert equal(content(locate("s3://weights/saved")), content(tmp_path / "exported"))
    run_job("weights_job.py", tmp_path / "again", "load", "s3://weights/saved")
    export_checkpoint(tmp_path / "again", tmp_path / "unchanged")
    assert equal(content(tmp_path / "unchanged"), content(tmp_path / "exported"))


@pytest.mark.parametrize(("to", "name"), FORMS)
def test_a_checkpoint_is_exported_to_a_bucket(to: Any, name: str, tmp_path: Path) -> None:
    train(tmp_path / "work")
    export_checkpoint(tmp_path / "work", f"s3://weights/{name}", to)
    export_checkpoint(tmp_path / "work", tmp_path / name, to)
    model, local = Tied(), Tied()
    load_checkpoint(model, f"s3://weights/{name}", strict=True)
    load_checkpoint(local, tmp_path / name, strict=True)
    assert equal(dict(model.state_dict()), dict(local.state_dict()))
    with pytest.raises(ConfigError, match=rf"what is written must go to a new .*, but s3://weights/{name} is a "):
        export_checkpoint(tmp_path / "work", f"s3://weights/{name}", to)


def test_large_tensors_are_sent_and_read_in_parts(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(20_000_000), "b": torch.arange(7)}  # 80 MB: an upload in two parts
    write(tmp_path / "x", tensors, single=True)
    s3fs.S3FileSystem().put(str(tmp_path / "x"), "weights/put.safetensors")
    assert equal(content(locate("s3://weights/put.safetensors")), tensors)
    write("s3://weights/large.safetensors", tensors, single=True)
    s3fs.S3FileSystem().get("weights/large.safetensors", str(tmp_path / "y"))
    assert equal(load_file(tmp_path / "y"), tensors)


def test_what_cannot_be_reached_is_named(tmp_path: Path) -> None:
    train(tmp_path / "work")
    with pytest.raises(ConfigError, match=r"s3://weights/none.pth does not exist"):
        load_checkpoint(Tied(), "s3://weights/none.pth")
    with pytest.raises(ConfigError, match=r"s3://nobucket/out cannot be written"):
        export_checkpoint(tmp_path / "work", "s3://nobucket/out")
