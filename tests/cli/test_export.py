"""`lockstep export`, as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import save_state
from lockstep.weights import open_source

NAMES = {"net.layer.weight", "net.layer.bias", "scale"}


@pytest.fixture
def trained(folder):
    """Return the folder of a run with one checkpoint, in the folder of the config."""
    weights = {"net.layer.weight": torch.ones(2, 3), "net.layer.bias": torch.ones(2), "scale": torch.ones(1)}
    save_state(folder / "run" / "epoch_1", {"model": weights}, {"format": 1, "epoch": 1, "iter": 4})
    return "run"


@pytest.mark.parametrize(
    ("words", "names", "says"),
    [
        ([], NAMES, "out: 3 weights, 36 bytes, of run/epoch_1"),
        (["--prefix", "net", "--dtype", "float16"], {"layer.weight", "layer.bias"}, "not in it: 1 weight of scale"),
        (["--to", "torch"], NAMES, "out: 3 weights"),
        (["--max-shard-size", "8"], NAMES, "out: 3 weights"),
    ],
    ids=["whole", "a part", "torch", "shards"],
)
def test_what_is_written_is_said(here, trained, words, names, says):
    code, out, err = here("export", trained, "out", *words)
    assert (code, err) == (0, "")
    assert says in out
    assert open_source(Path("out")).tensors.keys() == names


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none", "out"], "`CKPT` must be a checkpoint, the folder of a run, or a work_dir, but none does not exist"),
        ([".", "out"], "but . has no last_checkpoint that leads to one. The newest one in it is run/epoch_1"),
        ([".", "out", "--best"], "but . holds no best checkpoint"),
        (["run", "run"], "what is written must go to a new or empty folder, but run is a folder that holds epoch_1"),
        (["run", "out", "--to", "hf"], "must have a config of HuggingFace's to be written for from_pretrained"),
        (["run", "out", "--ema"], "must have averaged weights, as EMAHook saves them, but has none"),
        (["run", "nosuch://bucket/out"], "nosuch://bucket/out must be a path or a URL that fsspec can open"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_one_line(here, trained, words, says):
    code, out, err = here("export", *words)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert says in err
    assert not Path("out").exists()


def test_on_a_terminal_without_arguments_its_help_says_what_it_takes(here):
    code, out, _ = here("export", "--help")
    assert code == 0
    assert all(word in out for word in ("CKPT", "OUT", "--to", "--max-shard-size", "--files-from"))
