"""Models in: what transformers and safetensors have written, loaded by a run under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Model

from lockstep.errors import ConfigError
from lockstep.testing import run_ranks
from lockstep.weights import load_checkpoint
from lockstep.weights.safetensors_file import SafetensorsFile

from ..weights.test_safetensors_file import DTYPES, same, write
from .training import make, trained, whole_state


def theirs(kind: str = "gpt2") -> nn.Module:
    """Return a model whose weights are not those that a run begins with."""
    model = make(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def load(path: Path, work_dir: Path, kind: str, strategy: Any) -> dict[str, Tensor]:
    still = {"optimizer": {"type": "SGD", "lr": 0.0}}
    return whole_state(trained(make(kind), work_dir, strategy, load_from=str(path), optim_wrapper=still))


@pytest.mark.parametrize(
    ("form", "kind", "strategy", "size"),
    [
        ("one", "gpt2", "ddp", 2),
        ("shards", "bert", "fsdp", 2),
        ("bin", "gpt2", "fsdp", 2),
        ("base", "gpt2", "fsdp", 2),
        ("shards", "llama", {"type": "fsdp", "tensor_parallel": 2}, 4),
    ],
    ids=str,
)
def test_a_folder_of_transformers_is_loaded(form: str, kind: str, strategy: Any, size: int, tmp_path: Path) -> None:
    model, folder = theirs(kind), tmp_path / "theirs"
    if form == "bin":
        folder.mkdir()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    elif form == "base":
        model.transformer.save_pretrained(folder)
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if form == "shards" else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == (form == "shards")
    for state in run_ranks(size, load, folder, tmp_path / "work", kind, strategy):
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    log = next((tmp_path / "work").glob("*/log.txt")).read_text()
    assert "do not fit" not in log
    assert ("lack the prefix `transformer.`" in log) == (form == "base")


def test_experts_that_lie_by_themselves_are_refused(tmp_path: Path) -> None:
    """They would keep the values that they began with."""
    theirs("mixtral").save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"each expert by itself.* begin with from_pretrained"):
        load(tmp_path / "theirs", tmp_path / "work", "mixtral", "ddp")


def test_a_base_model_is_loaded_from_one_with_a_head(tmp_path: Path) -> None:
    model = theirs()
    model.save_pretrained(tmp_path / "theirs")
    base = GPT2Model(model.config)
    load_checkpoint(base, tmp_path / "theirs", strict=True)
    assert torch.equal(base.wte.weight, model.lm_head.weight)


def test_the_package_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    tensors = {}
    for n, dtype in enumerate(DTYPES):
        for m, shape in enumerate([(), (3,), (2, 5), (0, 2)]):
            tensors[f"{n}.{m}"] = torch.randint(0, 2, shape).to(dtype)
    write(tmp_path / "ours.safetensors", tensors, single=True)
    save_file(tensors, tmp_path / "theirs.safetensors")
    read, source = load_file(tmp_path / "ours.safetensors"), SafetensorsFile(tmp_path / "theirs.safetensors")
    assert read.keys() == source.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(read[name], tensor)
        assert same(source.read(name), tensor)
