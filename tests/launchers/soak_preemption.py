"""Stop a training again and again: python tests/launchers/soak_preemption.py --stops 50 --ranks 4.

A job is started, gets SIGTERM on one random rank at a random moment, must end with exit code 75 and a checkpoint of one
iteration on all ranks, and is started again to go on from there, until it has been stopped often enough. Its losses,
joined over all starts, must be those of a training that nothing stopped. On more than two ranks they agree to 1e-5: DDP
arranges its buckets anew after the first iteration, so that gloo then adds in another order (torch 2.13).
"""

from __future__ import annotations

import argparse
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

SCRIPT = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Runner
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
    def tell(self, runner, *what):
        print(json.dumps([runner.rank, os.getpid(), time.time(), *what]), flush=True)

data = TensorDataset(x, x.sum(1, keepdim=True))
Runner(
    Net(), "work_dir", loss=nn.MSELoss(), randomness=dict(seed=1), resume=True, log_level="ERROR",
    custom_hooks=[Tell()], optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01)), visualizer=[],
    train_dataloader=DataLoader(data, batch_size=8, shuffle=True), train_cfg=dict(max_epochs=int(sys.argv[1])),
    val_dataloader=DataLoader(data, batch_size=16),
    default_hooks=dict(checkpoint=dict(interval=1, max_keep_ckpts=2)),
).train()
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
    faults, latest, waits = [], [], []
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        done = 0
        for stop in range(options.stops):
            moment = draw.uniform(0, options.seconds)
            told, code, sent, rank = run(Path(folder), options, epochs, str(options.step), draw, moment)
            begun = min(number for *_, kind, number, _ in told if kind == "begin")
            iters = {(of, number): (when, loss) for of, _, when, kind, number, loss in told if kind == "iter"}
            last = {of: max((n for r, n in iters if r == of), default=begun) for of in range(options.ranks)}
            before = max((n for (r, n), (when, _) in iters.items() if when < sent), default=begun)
            losses |= {number: loss for (of, number), (_, loss) in iters.items() if of == 0}
            waits.append(time.time() - sent)
            latest.append(max(last.values()) - before)
            if code != 75 or len(set(last.values())) > 1 or begun != done:
                faults.append(f"stop {stop}: SIGTERM on rank {rank}: code {code}, iterations {last}, begun at {begun}")
            done = max(last.values())
            print(
                f"stop {stop + 1}: rank {rank} after {moment:.2f} s, code {code}, iteration {done}, {waits[-1]:.1f} s",
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
        f"iterations completed after the signal: at most {max(latest)}\n"
        f"seconds from the signal to the end: median {median(waits):.1f}, at most {max(waits):.1f}\n"
        f"{len(faults)} faults"
    )
    print("\n".join(faults))
    return bool(faults)


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
        return told, job.wait(), sent, rank


if __name__ == "__main__":
    sys.exit(main())
