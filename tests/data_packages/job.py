"""Train on each recipe, on each rank of a job; rank 0 writes which samples were trained on, and what was said.

`job.py FOLDER RESULT WORKERS ...`
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import recipes
import torch
from torch import nn

from lockstep import Runner, Session
from lockstep.dataset import length_of
from lockstep.dist import all_gather_object, barrier, get_rank, get_world_size, init_dist
from lockstep.hooks import Hook

STOP = 3


class Net(nn.Module):
    """One weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(recipes.SAMPLES))

    def forward(self, n: Any, mode: str = "loss", **others: Any) -> Any:
        return self.weight[torch.as_tensor(n)].mean()


class Noting(Hook):
    def __init__(self, seen: dict[int, list[int]]) -> None:
        self.seen = seen

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.train_loop.samples:
            self.seen.setdefault(runner.epoch, []).extend(torch.as_tensor(data_batch["n"]).tolist())


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(
    loop: str, loader: Any, folder: Path, iterations: int, saves: bool = False, resume: bool = False
) -> dict[int, list[int]]:
    """Train; return the samples of each epoch on this rank."""
    seen: dict[int, list[int]] = {}
    if loop == "Runner":
        runner = Runner(
            Net(),
            folder,
            train_dataloader=loader,
            train_cfg=dict(by_epoch=False, max_iters=iterations),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
            custom_hooks=[Noting(seen)],
            default_hooks=dict(checkpoint=dict(by_epoch=False, interval=STOP) if saves else None),
            resume=resume,
            log_level="WARNING",
            randomness=dict(seed=1),
        )
        runner.train()
        return seen
    model = Net()
    with Session(folder, randomness=dict(seed=1), log_level="WARNING") as session:
        model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for batch in batches_of(session, loader, iterations):
            numbers = session.gather(torch.as_tensor(batch["n"])).tolist()
            seen.setdefault(session.epoch, []).extend(numbers if session.is_main else [])
            session.step(model(**batch))
    return seen


def batches_of(session: Session, loader: Any, iterations: int) -> Iterator[Any]:
    """Yield batches past the end of the first epoch: counted in epochs if the loader has a length."""
    if length_of(loader) is None:
        yield from session.iterations(iterations)
    else:
        yield from (batch for _ in session.epochs(2) for batch in loader)


def cell(make: Any, data: Path, folder: Path, workers: int, loop: str, resumes: bool) -> dict[str, Any]:
    said, seen, error = Said(), [], ""
    logging.getLogger("lockstep").addHandler(said)
    ends = 12 // get_world_size() + 2  # past the end of the first epoch
    try:
        if resumes:
            seen.append(trained(loop, make(data, workers), folder, STOP, saves=True))
        seen.append(trained(loop, make(data, workers), folder, ends, resume=resumes))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        logging.getLogger("lockstep").removeHandler(said)
    gc.collect()  # loaders of torchdata end their workers when they are collected
    ranks = all_gather_object({"seen": seen, "said": said.lines, "error": error})
    barrier()
    if get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    first = [[one for rank in ranks for one in rank["seen"][run].get(0, [])] for run in range(len(ranks[0]["seen"]))]
    return {
        "first_epoch": first,
        "errors": [rank["error"] for rank in ranks],
        "said": sorted({line for rank in ranks for line in rank["said"]}),
    }


def main() -> None:
    data, result, *counts = sys.argv[1:]
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # else each worker imports all packages
    init_dist()
    cells: dict[str, Any] = {}
    for title, make in {**recipes.RECIPES, **recipes.MISTAKES}.items():
        for workers in map(int, counts):
            for loop, resumes in (("Runner", False), ("Session", False), ("Runner", True)):
                if resumes and title in recipes.MISTAKES:
                    continue
                name = f"{title}|{workers}|{loop}{' resumed' if resumes else ''}"
                folder = Path(result).parent / f"run-{get_world_size()}-{len(cells)}"
                print(name, flush=True)
                cells[name] = cell(make, Path(data), folder, workers, loop, resumes)
    if get_rank() == 0:
        Path(result).write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
