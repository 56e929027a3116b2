"""Stop a training again and again: python tests/launch/soak_preemption.py --stops 50 --ranks 4.

A job is started, gets SIGTERM on one random rank at a random moment, must end with exit code 75 and a whole checkpoint
of one iteration on all ranks, and is started again to go on from there, until it has been stopped often enough. Its
losses, joined over all starts, must be those of a training that nothing stopped. On more than two ranks they agree to
1e-5: DDP arranges its buckets anew after the first iteration, so that gloo then adds in another order (torch 2.13).

Of each stop are measured: how many steps were begun after the signal, in addition to the one that was in progress; and
the seconds from the signal until all ranks have saved, and until the launcher has ended, beside a step and the save.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from math import isclose, nan
from pathlib import Path
from statistics import median
from typing import NamedTuple

from lockstep.checkpoint import find_last_checkpoint, read_meta, verify
from lockstep.errors import ConfigError

SCRIPT = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Runner
from lockstep.errors import Preempted
from lockstep.hooks import Hook

torch.manual_seed(0)
x = torch.randn(320, 4)
STEP = float(sys.argv[2])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    def forward(self, x):
        time.sleep(STEP)
        return self.layers(x)

class Tell(Hook):
    def before_train(self, runner):
        self.tell(runner, "begin", runner.iter, 0.0)
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.tell(runner, "iter", runner.iter + 1, float(outputs["loss"]))
    def before_save_checkpoint(self, runner, checkpoint):
        self.tell(runner, "save", runner.iter, 0.0)
    def tell(self, runner, *what):
        print(json.dumps([runner.rank, os.getpid(), time.time(), *what]), flush=True)

data = TensorDataset(x, x.sum(1, keepdim=True))
runner = Runner(
    Net(), "work_dir", loss=nn.MSELoss(), randomness=dict(seed=1), resume=True, log_level="ERROR",
    custom_hooks=[Tell()], optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01)), visualizer=[],
    train_dataloader=DataLoader(data, batch_size=8, shuffle=True), train_cfg=dict(max_epochs=int(sys.argv[1])),
    val_dataloader=DataLoader(data, batch_size=16),
    default_hooks=dict(checkpoint=dict(interval=1, max_keep_ckpts=2)),
)
try:
    runner.train()
except Preempted:
    Tell().tell(runner.run, "saved", runner.iter, 0.0)
    raise
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="the latest moment of a signal, after the first step"
    )
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a forward pass takes at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    epochs = str(10 * options.stops)
    faults: list[str] = []
    stops: list[Stop] = []
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        done = 0
        for number in range(1, options.stops + 1):
            moment = draw.uniform(0, options.seconds)
            told, code, sent, ended, rank = run(Path(folder), options, epochs, str(options.step), draw, moment)
            begun = min(number for *_, kind, number, _ in told if kind == "begin")
            iters = {(of, number): (when, loss) for of, _, when, kind, number, loss in told if kind == "iter"}
            last = {of: max((n for r, n in iters if r == of), default=begun) for of in range(options.ranks)}
            before = max((n for (r, n), (when, _) in iters.items() if when < sent), default=begun)
            losses |= {number: loss for (of, number), (_, loss) in iters.items() if of == 0}
            is_new, done = begun == done, max(last.values())
            saved = max((when for *_, when, kind, _, _ in told if kind == "saved"), default=ended)
            stop = Stop(max(0, done - before - 1), saved - sent, ended - sent, step_in(told), save_in(told))
            stops.append(stop)
            fault = fault_in_checkpoint(Path(folder, "work_dir"), done)
            if code != 75 or len(set(last.values())) > 1 or not is_new or fault:
                faults.append(
                    f"stop {number}: SIGTERM on rank {rank}: code {code}, iterations {last}, begun at {begun}. {fault}"
                )
            is_fault = bool(faults) and faults[-1].startswith(f"stop {number}:")
            print(
                f"stop {number}: rank {rank} after {moment:.2f} s, code {code}, iteration {done} saved, "
                f"{stop.steps} steps later, after {stop.saved:.2f} s, ended after {stop.ended:.2f}; a step "
                f"{stop.step:.2f}, the save {stop.save:.2f}{' FAULT' if is_fault else ''}",
                flush=True,
            )
    needed = -(-done // (320 // (8 * options.ranks)))
    with tempfile.TemporaryDirectory() as folder:
        told, code, *_ = run(Path(folder), options, str(needed), "0", draw, None)
    whole = {number: loss for of, _, _, kind, number, loss in told if of == 0 and kind == "iter" and number <= done}
    tolerance = 0.0 if options.ranks <= 2 else 1e-5
    wrong = [number for number, loss in whole.items() if not isclose(losses.get(number, nan), loss, rel_tol=tolerance)]
    if wrong or len(losses) != len(whole):
        faults.append(
            f"{len(wrong)} of {len(whole)} losses differ or are missing, the first in iteration {wrong[0]}: "
            f"{losses.get(wrong[0])} instead of {whole[wrong[0]]}"
        )
    print(
        f"{options.stops} stops of {options.ranks} ranks, {done} iterations with {len(losses)} losses\n"
        f"{told_of('steps begun after the signal', [stop.steps for stop in stops])}\n"
        f"{told_of('seconds from the signal to the checkpoint', [stop.saved for stop in stops])}\n"
        f"{told_of('seconds from the signal to the end', [stop.ended for stop in stops])}\n"
        f"{told_of('of these, beyond a step and the save', [stop.beyond for stop in stops])}\n"
        f"ended within a step, the save and a second: {sum(stop.beyond <= 1 for stop in stops)} of {len(stops)}\n"
        f"{len(faults)} faults"
    )
    print("\n".join(faults))
    return bool(faults)


class Stop(NamedTuple):
    """What a stop took.

    Attributes:
        steps: begun after the signal, in addition to the one that was in progress.
        saved: seconds from the signal until all ranks know that the checkpoint is complete.
        ended: seconds from the signal until the launcher has ended.
        step: seconds of a step.
        save: seconds from the beginning of the last save until each rank knows that it is complete.
    """

    steps: int
    saved: float
    ended: float
    step: float
    save: float

    @property
    def beyond(self) -> float:
        """Seconds in addition to a step and the save."""
        return self.ended - self.step - self.save


def step_in(told) -> float:
    """Return the seconds that a step of rank 0 took, as a median."""
    times = [when for of, _, when, kind, *_ in told if of == 0 and kind == "iter"]
    return median([after - before for before, after in itertools.pairwise(times)] or [0.0])


def save_in(told) -> float:
    """Return the seconds from the beginning of the save after the signal until all ranks have gone on."""
    begun = max((when for *_, when, kind, _, _ in told if kind == "save"), default=0.0)
    return max((when - begun for *_, when, kind, _, _ in told if kind == "saved"), default=0.0) if begun else 0.0


def fault_in_checkpoint(work_dir: Path, done: int) -> str:
    """Return what is wrong if the last checkpoint is not whole, or not that of the last iteration."""
    try:
        last = find_last_checkpoint(work_dir)
        if last is None:
            return "there is no checkpoint"
        verify(last)
        saved = read_meta(last)["iter"]
    except (ConfigError, OSError) as error:
        return f"no whole checkpoint: {error!r}"
    return "" if saved == done else f"the last checkpoint is of iteration {saved}"


def told_of(what: str, values: list[float]) -> str:
    return f"{what}: median {median(values):.2f}, at most {max(values):.2f}"


def run(folder, options, epochs, step, draw, moment):
    """Run the job; after `moment` seconds of training, send SIGTERM to a random rank. Return what the ranks told."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "launch", "--nproc", str(options.ranks), "train.py", epochs, step]
    told, sent, rank = [], 0.0, draw.randrange(options.ranks)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
        for line in job.stdout:
            if not line.startswith("["):
                continue
            told.append(json.loads(line))
            pids = {of: pid for of, pid, *_ in told}
            if moment is not None and not sent and len(pids) == options.ranks:
                time.sleep(moment)
                sent = time.time()
                os.kill(pids[rank], signal.SIGTERM)
        code = job.wait()
        return told, code, sent, time.time(), rank


if __name__ == "__main__":
    sys.exit(main())
