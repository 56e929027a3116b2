"""A loop written by hand on a session, under the strategies of both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.dist import get_world_size

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


def losses_by_hand(work_dir: Path, strategy: Any, epochs: int = 2, **options: Any) -> tuple[list[float], list[Tensor]]:
    """Return the loss of the whole data after each epoch, and the outputs at the end, the same on every rank."""
    session = Session(work_dir, strategy=strategy, randomness={"seed": 0}, log_level="ERROR", **options)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4 // get_world_size(), shuffle=True)
    model, _, batches = session.prepare(model, optimizer, loader)
    val = session.prepare_evaluation(DataLoader(TensorDataset(X, Y), batch_size=3))
    losses, outputs = [], torch.empty(0)
    for _ in session.epochs(epochs):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
        with torch.no_grad():
            parts = [session.gather(model(x), y) for x, y in val]
        outputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        assert torch.equal(targets, Y)
        losses.append(F.cross_entropy(outputs.float(), targets).item())
    return losses, [outputs]


def losses_of_two_models(work_dir: Path, strategy: Any) -> list[float]:
    """Return the losses of two models that are trained in turn, each with its own optimizer."""
    session = Session(work_dir, strategy=strategy, randomness={"seed": 0}, log_level="ERROR")
    torch.manual_seed(0)
    parts = {"one": nn.Linear(6, 8), "two": nn.Linear(8, 2)}
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}
    model, optims, batches = session.prepare(
        parts, optimizers, DataLoader(TensorDataset(X, Y), batch_size=4 // get_world_size())
    )
    losses = []
    for _ in session.epochs(1):
        for x, y in batches:
            model["one"].requires_grad_(False)
            optims["two"].update_params(F.cross_entropy(model["two"](model["one"](x).tanh()), y))
            model["one"].requires_grad_(True)
            model["two"].requires_grad_(False)
            loss = F.cross_entropy(model["two"](model["one"](x).tanh()), y)
            optims["one"].update_params(loss)
            model["two"].requires_grad_(True)
            losses.append(loss.item())
    return losses


def losses_with_penalty(work_dir: Path, strategy: Any) -> list[float]:
    """Return the losses of this rank's batches, each with a penalty on gradients, which are differentiated again."""
    session = Session(work_dir, strategy=strategy, randomness={"seed": 0}, log_level="ERROR")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, _, batches = session.prepare(
        model, optimizer, DataLoader(TensorDataset(X, Y), batch_size=4 // get_world_size())
    )
    losses = []
    for _ in session.epochs(2):
        for inputs, targets in batches:
            inputs.requires_grad_()
            outputs = model(inputs)
            (slopes,) = torch.autograd.grad(outputs[:, 0].sum(), inputs, create_graph=True)
            loss = F.cross_entropy(outputs, targets) + slopes.square().sum(1).mean()
            session.step(loss)
            losses.append(loss.item())
    return losses
