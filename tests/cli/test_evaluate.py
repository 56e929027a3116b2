from __future__ import annotations

import sys
from textwrap import dedent

import pytest
import torch

SCORED = """
    import torch
    from torch import nn
    from toy import Points
    from lockstep.evaluator import BaseMetric

    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x, y, mode="tensor"):
            return self.layer(x), y

    class Error(BaseMetric):
        units = {"error": "m"}

        def process(self, data_batch, data_samples):
            out, wanted = data_samples
            self.results += (out - wanted).abs().flatten().tolist()

        def compute_metrics(self, results):
            return {"error": sum(results) / len(results), "samples": len(results)}

    points = dict(dataset=dict(type=Points), batch_size=3)
    model = dict(type=Doubling)
    val_dataloader = points
    val_evaluator = dict(type=Error)
"""


@pytest.fixture
def weights(folder):
    """Return the file of a model that is wrong by 0.5 everywhere, beside a config with validation data alone."""
    (folder / "scored.py").write_text(dedent(SCORED))
    (folder / "tested.py").write_text(
        "_base_ = 'scored.py'\ntest_dataloader = dict(_base_.points)\ntest_evaluator = dict(_base_.val_evaluator)\n"
    )
    path = folder / "weights.pth"
    torch.save({"layer.weight": torch.tensor([[2.0]]), "layer.bias": torch.tensor([0.5])}, path)
    return path


def rows(out):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


@pytest.mark.parametrize(("config", "data"), [("scored.py", "validation data"), ("tested.py", "test data")])
def test_metrics_are_shown_as_a_table(here, weights, config, data):
    code, out, err = here("test", config, "--checkpoint", str(weights))
    assert (code, err) == (0, "")
    assert f"┃ metric  ┃ {data}" in out
    assert rows(out) == [["error", "0.5 m"], ["samples", "8"]]
    assert str(weights) in out


def test_two_ranks_give_the_same_table_once(lockstep, weights):
    code, out, err = lockstep("test", "tested.py", "--checkpoint", weights.name, "--nproc", "2")
    loading = "lockstep: loading torch to check tested.py"
    assert (code, err) == (0, f"{loading}\nlockstep: starting 2 ranks\n")
    assert "2 ranks on" in out
    assert rows(out) == [["error", "0.5 m"], ["samples", "8"]]


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_table_that_is_lost_is_an_error(lockstep, weights, nproc):
    to_full_disk = ("sh", "-c", f'"{sys.executable}" -m lockstep "$@" >/dev/full', "sh")
    code, _, err = lockstep("test", "tested.py", "--checkpoint", weights.name, "--nproc", nproc, before=to_full_disk)
    assert (code, "must take what is printed, but does not: No space left on device" in err) == (1, True), err


def test_predictions_are_written_for_each_sample(here, lockstep, weights):
    code, out, err = lockstep(
        "predict", "scored.py", "--checkpoint", weights.name, "--out", "new/out.pt", "--nproc", "2"
    )
    assert (code, "written new/out.pt" in out) == (0, True), err
    predicted = torch.load("new/out.pt")
    assert len(predicted) == 8
    assert here("predict", "tested.py", "--checkpoint", weights.name, "--out", "folder")[0] == 0
    assert torch.equal(torch.load("folder/00000007.pt")[0], predicted[7][0])
    code, _, err = here("predict", "tested.py", "--checkpoint", weights.name, "--out", "new/out.pt/more.pt")
    assert (code, "`--out` must be a folder that can be created and written to, but new/out.pt" in err) == (1, True)
    code, _, err = here("predict", "tested.py", "--checkpoint", "best", "--out", "folder")
    assert (code, "only where a run has kept its best one" in err) == (1, True)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["scored.py"], 2, "--checkpoint"),
        (["scored.py", "--checkpoint", "none"], 1, "or a folder or a file of weights, but none does not exist"),
        (["scored.py", "--checkpoint", "."], 1, "but . is a folder without a complete checkpoint in it"),
        (["line.py", "--checkpoint", "weights.pth"], 1, "`test_dataloader` must be given"),
        (["scored.py", "--checkpoint", "weights.pth", "val_evaluator.unit=m"], 1, "is not an argument of the metric"),
    ],
)
def test_what_is_wrong_is_told_before_ranks_are_started(here, weights, words, code, says):
    got, _, err = here("test", *words, "--nproc", "2")
    assert (got, "starting" in err) == (code, False)
    assert says in err
