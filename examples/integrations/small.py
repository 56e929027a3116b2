"""The same small training by a Runner and by a loop by hand, for whatever starts the ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session


def parts() -> tuple[nn.Module, DataLoader]:
    torch.manual_seed(0)  # so that all ranks make the same data
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    return nn.Linear(4, 1), DataLoader(data, batch_size=8, shuffle=True)


def by_runner(work_dir: str, hooks: tuple = (), checkpoint: str | None = None) -> None:
    model, loader = parts()
    Runner(
        model, work_dir, loss=nn.MSELoss(), train_dataloader=loader, train_cfg=dict(max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)), custom_hooks=list(hooks),
        load_from=checkpoint, resume=checkpoint is not None, randomness=dict(seed=0),
    ).train()  # fmt: skip


def by_hand(work_dir: str, hooks: tuple = (), checkpoint: str | None = None) -> None:
    session = Session(
        work_dir, custom_hooks=list(hooks), load_from=checkpoint, resume=checkpoint is not None,
        randomness=dict(seed=0),
    )  # fmt: skip
    model, loader = parts()
    model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in session.epochs(3):
        for inputs, targets in loader:
            session.step(nn.functional.mse_loss(model(inputs), targets))
