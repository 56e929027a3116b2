"""Runs that resume on other ranks, with other batches or workers: is every sample of each epoch trained on once?

Each case trains a small model in real processes, through a `Runner`. A hook notes the indices of the samples in each
training step. Before the stop and after the resume together, they must be the global orders of the epochs, sample by
sample.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import Runner
from lockstep.hooks import Hook
from lockstep.testing import run_ranks

SAMPLES, SEED = 40, 7
GLOBAL_BATCH, BATCH = 12, 3  # 40 is a multiple of neither: each epoch ends in a batch that is not full
STOPS = (1, 2, 3, 4, 5)
LOSS_TOLERANCE = 1e-6
RANKS = (1, 2, 3, 4)

X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(torch.arange(SAMPLES), X, 0.5 * X.sum(1, keepdim=True))


class Stream(IterableDataset[Any]):
    """All samples, in an order that depends on the epoch; says where it is."""

    def __init__(self) -> None:
        self.epoch = self.next = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        order = order_of(self.epoch)
        while self.next < SAMPLES:
            self.next += 1
            yield DATA[order[self.next - 1]]


class Forgetful(IterableDataset[Any]):
    """The same, but does not say where it is."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (DATA[index] for index in order_of(self.epoch))


def order_of(epoch: int) -> list[int]:
    """Return the global order of an epoch."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


@dataclass(frozen=True)
class Layout:
    """On how many ranks a run trains, with which batch on each, and with how many workers."""

    ranks: int
    batch_size: int
    workers: int = 0


@dataclass(frozen=True)
class Case:
    """A run that stops after each of `STOPS`, and resumes from each in another layout."""

    loop: str
    saved: Layout
    resumed: Layout
    keeps_global_batch: bool = False
    title: str = ""

    @property
    def is_comparable(self) -> bool:
        """Whether its losses must be those of a run in one process that never stopped.

        Three ranks that are rounded up repeat samples at the end of each epoch, where other numbers of them do not.
        """
        return self.keeps_global_batch and (
            "rounded" not in self.loop or 3 not in (self.saved.ranks, self.resumed.ranks)
        )


@dataclass
class Found:
    """What was found in one case.

    Attributes:
        passed: after how many of the stops the global orders were complete.
        faults: what was wrong otherwise.
        loss_difference: the largest difference of a loss from the run that never stopped.
    """

    passed: int = 0
    faults: list[str] = field(default_factory=list)
    loss_difference: float | None = None


LOOPS: dict[str, dict[str, Any]] = {
    "by epoch": {"dataset": DATA, "sampler": {"round_up": False}},
    "by epoch, rounded up": {"dataset": DATA},
    "by iteration": {"dataset": DATA, "sampler": {"round_up": False}},
    "`InfiniteSampler`": {"dataset": DATA, "sampler": {"type": "InfiniteSampler"}},
    "stream": {"dataset": Stream()},
    "stream without a state": {"dataset": Forgetful()},
}


def cases() -> list[Case]:
    """Return all cases, in the order of the table."""
    kept = [
        Case(loop, *(Layout(ranks, GLOBAL_BATCH // ranks) for ranks in pair), True, "global batch kept")
        for loop in LOOPS
        for pair in pairs()
    ]
    grown = [
        Case(loop, *(Layout(ranks, BATCH) for ranks in pair), title="batch per rank kept")
        for loop in LOOPS
        for pair in pairs()
    ]
    others = [
        case
        for loop in LOOPS
        for n, m in ((1, 1), (2, 2), (2, 3))
        for case in (
            Case(loop, Layout(n, 3), Layout(m, 5), title="another `batch_size`"),
            Case(loop, Layout(n, 3, 2), Layout(m, 3, 1), title="another number of workers"),
            Case(loop, Layout(n, 3), Layout(m, 3, 2), title="another number of workers"),
        )
    ]
    return kept + grown + others


def pairs() -> list[tuple[int, int]]:
    return [(n, m) for n in RANKS for m in RANKS]


def run(chosen: Sequence[Case]) -> dict[Case, Found]:
    """Run the cases, and return what was found in each."""
    saved: dict[tuple[str, Layout], tuple[list[Step], Path]] = {}
    wholes: dict[str, list[Step]] = {}
    found = {}
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        for case in chosen:
            if (case.loop, case.saved) not in saved:
                work_dir = Path(folder) / str(len(saved))
                steps = _together(run_ranks(case.saved.ranks, train, case.loop, case.saved, work_dir))
                saved[case.loop, case.saved] = steps, work_dir
            if case.is_comparable and case.loop not in wholes:
                (by_run,) = run_ranks(1, train_on, case.loop, Layout(1, GLOBAL_BATCH), Path(folder) / "whole", None)
                wholes[case.loop] = _together(by_run)
            whole = wholes[case.loop] if case.is_comparable else None
            found[case] = _tried(case, *saved[case.loop, case.saved], whole, Path(folder))
    return found


@dataclass
class Step:
    """What one rank, or all together, did in one iteration: indices of samples, their mean loss, the weights' sum."""

    iteration: int
    epoch: int
    indices: list[int]
    loss: float


class Noting(Hook):
    """Notes each step; ends the run after the last of the stops."""

    priority = "LOWEST"

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.steps: list[Step] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        own = data_batch[0].tolist() if runner.train_loop.samples else []
        self.steps.append(Step(runner.iter, runner.epoch, own, outputs["loss"].item()))
        if runner.iter + 1 == self.last:
            raise KeyboardInterrupt


class Net(nn.Module):
    """A linear model with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, index: Tensor, x: Tensor, y: Tensor, mode: str = "loss") -> Tensor:
        return (self.linear(x) - y).square().mean()


def train(loop: str, layout: Layout, work_dir: Path) -> list[Step]:
    """Train until the last stop, and save after each iteration. **Collective**."""
    return _trained(loop, layout, work_dir, Noting(STOPS[-1]), default_hooks={"checkpoint": EACH})


def train_on(loop: str, layout: Layout, work_dir: Path, checkpoints: Sequence[Path] | None) -> list[list[Step]]:
    """Resume from each of the checkpoints, or train from the beginning if there are none. **Collective**."""
    return [
        _trained(loop, layout, work_dir, Noting(), resume=path is not None, load_from=path)
        for path in checkpoints or [None]
    ]


EACH = {"by_epoch": False, "interval": 1}


def _trained(loop: str, layout: Layout, work_dir: Path, noting: Noting, **arguments: Any) -> list[Step]:
    torch.manual_seed(3)
    # By iteration, as many as see all samples twice in the slowest case.
    cfg = {"max_epochs": 3} if loop.startswith("by epoch") else {"max_iters": 5 + 2 * -(-SAMPLES // BATCH)}
    workers = {"num_workers": layout.workers, "multiprocessing_context": "fork"} if layout.workers else {}
    runner = Runner(
        Net(),
        work_dir,
        train_dataloader={**copy.deepcopy(LOOPS[loop]), "batch_size": layout.batch_size, **workers},
        train_cfg=cfg,
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.01}},
        randomness={"seed": SEED},
        custom_hooks=[noting],
        visualizer=[],
        log_level="ERROR",
        **{"default_hooks": {"checkpoint": None}, **arguments},
    )
    with suppress(KeyboardInterrupt), redirect_stdout(StringIO()):
        runner.train()
    return noting.steps


def _together(by_rank: Sequence[Sequence[Step]]) -> list[Step]:
    """Return the steps of all ranks together: samples in the order in which they were dealt."""
    return [_of_all(steps) for steps in zip(*by_rank, strict=True)]


def _of_all(steps: Sequence[Step]) -> Step:
    longest = max(len(step.indices) for step in steps)
    indices = [step.indices[i] for i in range(longest) for step in steps if i < len(step.indices)]
    loss = sum(step.loss * len(step.indices) for step in steps) / len(indices)
    return replace(steps[0], indices=indices, loss=loss)


def _tried(case: Case, before: list[Step], work_dir: Path, whole: list[Step] | None, folder: Path) -> Found:
    checkpoints = [next(work_dir.glob(f"*/iter_{stop}")) for stop in STOPS]
    by_rank = run_ranks(case.resumed.ranks, train_on, case.loop, case.resumed, folder / "resumed", checkpoints)
    found = Found()
    for stop, after in zip(STOPS, map(_together, zip(*by_rank, strict=True)), strict=True):
        fault = _fault(case, before[:stop], after)
        if fault is None:
            found.passed += 1
        else:
            found.faults.append(f"{case.loop}, {case.saved} to {case.resumed}, stopped after {stop}: {fault}")
        if whole is not None:
            losses = [abs(one.loss - two.loss) for one, two in zip(before[:stop] + after, whole, strict=False)]
            found.loss_difference = max(found.loss_difference or 0.0, *losses)
            if max(losses) > LOSS_TOLERANCE or stop + len(after) != len(whole):
                found.faults.append(
                    f"{case}, stopped after {stop}: losses differ by {max(losses):.1e}; {stop + len(after)} "
                    f"iterations, and {len(whole)} without a stop"
                )
    return found


def _fault(case: Case, before: list[Step], after: list[Step]) -> str | None:
    """Return what is wrong with the samples of a run that was resumed; None if they are the global orders."""
    steps = before + after
    if [step.iteration for step in steps] != list(range(len(steps))):
        return f"iterations {[step.iteration for step in steps]}"
    seen = [index for step in steps for index in step.indices]
    if case.loop == "by epoch, rounded up":
        layouts = [case.saved] * len(before) + [case.resumed] * len(after)
        return _fault_by_epoch(steps, [layout.ranks for layout in layouts])
    epochs = -(-len(seen) // SAMPLES)
    expected = list(chain.from_iterable(map(order_of, range(epochs))))
    if case.loop == "by epoch" and len(seen) != 3 * SAMPLES:
        return f"{len(seen)} samples in 3 epochs"
    if len(seen) < 2 * SAMPLES:
        return f"only {len(seen)} samples"
    return None if seen == expected[: len(seen)] else f"samples {seen}"


def _fault_by_epoch(steps: list[Step], ranks: list[int]) -> str | None:
    """Return what is wrong; each epoch is its order and, until all ranks have equally many, its beginning again."""
    for epoch in range(3):
        seen = [index for step in steps if step.epoch == epoch for index in step.indices]
        last = max(number for number, step in enumerate(steps) if step.epoch == epoch)
        begin = sum(len(step.indices) for step in steps[:last] if step.epoch == epoch)
        order = order_of(epoch)
        if seen != order + order[: -(SAMPLES - begin) % ranks[last]]:
            return f"samples {seen} in epoch {epoch + 1}"
    return None


def table(found: dict[Case, Found]) -> list[str]:
    """Return the table as lines of Markdown, and raise the limits that losses have to the faults."""
    lines = [
        "| loop | change | saved on 1 rank | on 2 | on 3 | on 4 | largest difference of a loss |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for title in dict.fromkeys(case.title for case in found):
        for loop in LOOPS:
            row = {case: one for case, one in found.items() if (case.title, case.loop) == (title, loop)}
            if not row:
                continue
            cells = []
            for ranks in RANKS:
                own = [one for case, one in row.items() if case.saved.ranks == ranks]
                cells.append(f"{sum(one.passed for one in own)} of {len(own) * len(STOPS)}" if own else "")
            losses = [one.loss_difference for one in row.values() if one.loss_difference is not None]
            difference = f"{max(losses):.1e}" if losses else ""
            lines.append(f"| {loop} | {title} | {' | '.join(cells)} | {difference} |")
    return lines
