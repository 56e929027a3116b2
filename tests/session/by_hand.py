"""A loop as users write it, with its model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.dist import get_world_size

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
X8 = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
STRATEGIES = ["ddp", "fsdp"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), **{"batch_size": 4 // get_world_size(), "shuffle": True, **options})


def session_of(work_dir: Path, **options: Any) -> Session:
    return Session(work_dir, **{"randomness": {"seed": 0}, "log_level": "ERROR", **options})


class Trained:
    """What a loop by hand has trained: as users write it."""

    def __init__(
        self, work_dir: Path, epochs: int = 2, *, save_after: int = 0, data: Any = None, **options: Any
    ) -> None:
        self.losses: dict[int, float] = {}
        self.session = session = session_of(work_dir, **options)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, batches = session.prepare(model, optimizer, data or loader(), schedulers=[self.schedule])
        for _ in session.epochs(epochs):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                session.step(loss)
                self.losses[session.iter] = loss.item()
                if session.is_update:
                    self.schedule.step()
                if session.iter + 1 == save_after:
                    session.save()
                    session.save("again")
        self.model, self.state = model, session.run.strategy.model_state()

    def weights(self) -> list[Tensor]:
        return [getattr(value, "full_tensor", lambda value=value: value)() for value in self.state.values()]


def assert_equal(one: Trained, other: Trained) -> None:
    for a, b in zip(one.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
