"""A user's script, read by mypy and pyright in `make check`, and never run.

A comment `type: ignore` stands where a checker must find a mistake: it complains of a comment that is not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep import Runner, Session, init_dist
from lockstep.dist import (
    Handle,
    all_gather,
    all_reduce,
    broadcast,
    collect_results,
    infer_launcher,
    reduce,
    run_on_main,
)

init_dist("pytorch", backend="gloo")
init_dist(infer_launcher())
init_dist("pytorsch")  # type: ignore[arg-type]

x = torch.ones(3)
all_reduce(x, op="mean")
all_reduce(x, op="summ")  # type: ignore[call-overload]
reduce(x, dst=0).wait()  # type: ignore[attr-defined]
broadcast(x, async_op=True).wait()
handle: Handle = all_reduce(x, async_op=True)
total: Tensor = all_reduce(x, sync_grads=True)
all_reduce(x, async_op=False, sync_grads=False)
parts: list[Tensor] = all_gather(x)

names: list[str] | None = collect_results(["a.png"], size=1)
scores: list[float] | None = collect_results(["a.png"], size=1)  # type: ignore[list-item]
path: str = run_on_main(lambda: "epoch_3")

runner = Runner(nn.Linear(3, 1), work_dir="work")
runner.train()
print(runner.modle)  # type: ignore[attr-defined]

session = Session("work", strategy="fsdp", amp="bfloat16")
model = nn.Linear(3, 1)
model_of_rank, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters()), [x])
for _ in session.epochs(3):
    for batch in loader:
        session.step(model_of_rank(batch), accuracy=0.5)
        optimizer.update_params(x.sum())
session.epochs("3")  # type: ignore[arg-type]
session.stpe(x)  # type: ignore[attr-defined]
