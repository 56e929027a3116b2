"""`lockstep find-lr` and `lockstep find-batch-size`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from lockstep.report.figures import shown

# Models that fail from some batch size on.
LIMITED = """
    import os
    import signal
    import torch
    from toy import Line

    class OutOfMemory(Line):
        def forward(self, x, y=None, mode="tensor"):
            if len(x) > 2 and os.environ.get("RANK") == "1":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().forward(x, y, mode)

    class Large(Line):
        def forward(self, x, y=None, mode="tensor"):
            held = torch.empty(len(x) * 2**30, dtype=torch.uint8)  # address space alone: it is not written to
            del held
            return super().forward(x, y, mode)

    class Killed(Line):
        def forward(self, x, y=None, mode="tensor"):
            if len(x) > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x, y, mode)

    class Wrong(Line):
        def forward(self, x, y=None, mode="tensor"):
            raise ValueError("the shapes do not fit")
"""

# All data in one batch, so that no loss is above another by chance.
WHOLE, HALF = "train_dataloader.batch_size=8", "train_dataloader.batch_size=4"


def the_search(folder: Path, work_dir: str = "work_dirs/line") -> dict:
    return json.loads((folder / work_dir / "batch_size_search.json").read_text())


@pytest.fixture
def limited(folder):
    (folder / "limited.py").write_text(dedent(LIMITED))
    return folder


def test_a_rate_is_found_and_drawn(here, folder):
    code, out, err = here("find-lr", "line.py", "--start", "1e-6", "--end", "0.1", WHOLE)
    assert code == 0, err
    rate = re.search(r"^rate +(\S+), where the loss falls most steeply$", out, re.MULTILINE).group(1)
    assert f"use     --cfg-options optim_wrapper.optimizer.lr={rate}\n" in out
    picture = Path(re.search(r"^picture (.+)$", out, re.MULTILINE).group(1))
    assert f'"{shown(float(rate))} suggested"' in picture.read_text()
    lines = [json.loads(line) for line in (picture.parent / "metrics.jsonl").read_text().splitlines()]
    assert {line["mode"] for line in lines} == {"lr_search"}
    assert here("train", "line.py", f"optim_wrapper.optimizer.lr={rate}")[0] == 0


def test_a_rate_for_the_default_optimizer_and_no_rate(here, folder):
    lines = (folder / "line.py").read_text().splitlines()
    (folder / "plain.py").write_text("\n".join(line for line in lines if not line.startswith("optim_wrapper")))
    _, out, _ = here("find-lr", "plain.py", "--start", "1e-3", "--end", "10", WHOLE)
    (use,) = re.findall(r"^use +--cfg-options (.+)$", out, re.MULTILINE)
    assert use.startswith("optim_wrapper.optimizer.type=AdamW optim_wrapper.optimizer.lr=")
    code, out, err = here("train", "plain.py", *use.split())
    assert code == 0, err
    _, out, _ = here("find-lr", "line.py", "--start", "1e-20", "--end", "1e-19", "randomness.seed=0")
    assert "rate    none: the loss does not fall between 1e-20 and 1e-19. See the picture\n" in out
    assert "--cfg-options" not in out


def test_two_ranks_search_a_rate_together(lockstep, folder):
    code, out, err = lockstep("find-lr", "line.py", HALF, "--nproc", "2", "--strategy", "fsdp", "--work-dir", "runs")
    assert (code, err.count("lockstep: starting 2 ranks\n")) == (0, 1)
    assert out.count("where the loss falls most steeply") == 1
    assert len(list(folder.glob("runs/*/report.html"))) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["line.py", "--start", "1", "--end", "0.1"], "`end` must be a rate above `start`, which is 1.0, but is 0.1"),
        (["line.py", "--steps", "1"], "`steps` must be an int of at least 10, but is 1"),
        (["line.py", "train_dataloader=None"], "`train_dataloader` = None must be given"),
        (["none.py"], "there is no config file"),
    ],
)
def test_bad_input_for_a_rate(here, words, says):
    code, _, err = here("find-lr", *words)
    assert (code, err.count("error: ")) == (1, 1)
    assert says in err


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_that_runs_out_of_memory_decides_for_all(lockstep, limited, strategy):
    words = ("find-batch-size", "line.py", "model.type=limited.OutOfMemory", "train_dataloader.batch_size=1")
    code, out, err = lockstep(*words, "--nproc", "2", "--strategy", strategy)
    assert (code, err.count("lockstep: starting 2 ranks\n")) == (0, 3)
    assert "Traceback" not in err
    assert re.findall(r"^ +(\d+)  (fits|out of memory)", out, re.MULTILINE) == [
        ("1", "fits"),
        ("2", "fits"),
        ("4", "out of memory"),
    ]
    assert "found    2 per rank, 4 on 2 ranks: a larger one runs out of memory\n" in out
    assert "use      --cfg-options train_dataloader.batch_size=2\n" in out
    assert "note     the config's learning rate is meant for 1 per rank, and stays as it is\n" in out
    assert the_search(limited)["batch_size"] == 2
    assert sorted(path.name for path in (limited / "work_dirs/line").iterdir()) == ["batch_size_search.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit no process's data")
def test_memory_that_is_really_not_there(lockstep, limited):
    words = ("find-batch-size", "line.py", "model.type=limited.Large", "--memory", "7GiB")
    assert lockstep(*words, "--bisect", "--work-dir", "runs")[0] == 0
    found = the_search(limited, "runs")
    assert [(trial["batch_size"], trial["outcome"]) for trial in found["trials"]] == [
        (2, "fits"),
        (4, "fits"),
        (8, "out of memory"),
        (6, "fits"),
        (7, "out of memory"),
    ]
    assert "can't allocate memory" in found["trials"][2]["message"]


def test_a_rank_that_the_system_ends(lockstep, limited):
    code = lockstep("find-batch-size", "line.py", "model.type=limited.Killed")[0]
    assert (code, the_search(limited)["batch_size"]) == (0, 2)
    assert "ended by SIGKILL" in the_search(limited)["trials"][1]["message"]


def test_other_errors_end_the_search(lockstep, limited):
    code, out, err = lockstep("find-batch-size", "line.py", "model.type=limited.Wrong", "--nproc", "2")
    assert (code, out) == (1, "batch size per rank\n")
    assert "ValueError: the shapes do not fit" in err
    assert not (limited / "work_dirs/line/batch_size_search.json").exists()


@pytest.mark.parametrize(
    ("more", "size", "why"),
    [
        ([], 4, "all samples that a rank has"),
        (["--max-batch-size", "3", "auto_scale_lr={'enable':True,'base_batch_size':4}"], 3, "the limit"),
        (["train_dataloader.drop_last=True"], 4, "all samples that a rank has"),
    ],
)
def test_a_search_ends_with_the_data_or_at_its_limit(lockstep, folder, more, size, why):
    code, out, _ = lockstep("find-batch-size", "line.py", "--nproc", "2", *more)
    assert code == 0
    assert f"found    {size} per rank, {2 * size} on 2 ranks: {why}\n" in out
    assert ("`auto_scale_lr` multiplies the learning rate" in out) == ("auto_scale_lr" in str(more))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["line.py", "--memory", "much"], "`--memory` must be a size as 5GB, 500MB or 2GiB, but is 'much'"),
        (["line.py", "--nnodes", "2", "--rdzv", "a:1"], "`--nnodes` must be 1 to search a batch size, but is 2"),
        (
            [
                "line.py",
                "train_dataloader.batch_sampler.type=BatchSampler",
                "train_dataloader.batch_sampler.drop_last=True",
            ],
            "but `batch_sampler` does",
        ),
        (["line.py", "--max-batch-size", "0"], "`max_batch_size` must be an int of at least 1, but is 0"),
        (["line.py", "model.widht=1"], "did you mean `width`?"),
    ],
)
def test_bad_input_for_a_batch_size(here, words, says):
    code, _, err = here("find-batch-size", *words)
    assert (code, err.count("error: ")) == (1, 1)
    assert says in err


def test_ranks_can_search_no_batch_size(here, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, _, err = here("find-batch-size", "line.py")
    assert code == 1
    assert "`lockstep find-batch-size` must be started once" in err
    assert "or give --launcher none" in err
