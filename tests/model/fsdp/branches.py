"""Models whose ranks need not take the same way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.dist import get_rank, get_world_size

WIDTH = 6
INPUTS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))


def own_inputs() -> Tensor:
    return INPUTS[get_rank() :: get_world_size()].clone()


class Twins(nn.Module):
    """Two layers of one shape, of which a rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left(x) if left else 0.1 * self.right(x)).mean()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Sends each sample to one of four experts; those which get none are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (mine := chosen == number).any():
                out[mine] = weights[mine, number, None] * expert(x[mine])
        return x + out


class Experts(nn.Module):
    """Two mixtures; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for mixture in self.mixtures:
            x = mixture(x)
        return x.square().mean()


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()
