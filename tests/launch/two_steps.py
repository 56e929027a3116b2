"""What every launcher's ranks run: join, train two steps under DDP, compare with one process, print one JSON line.

The script then simply ends: leaving the group is lockstep's affair.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import (
    get_dist_info,
    get_local_rank,
    get_local_size,
    get_node_rank,
    get_num_nodes,
    infer_launcher,
    init_dist,
)

STEPS, SAMPLES_PER_RANK = 2, 3


def main() -> None:
    launcher = infer_launcher()
    init_dist(launcher, timeout=60)
    rank, world_size = get_dist_info()
    batches = _batches(world_size)
    model = _model(seed=rank)  # DDP starts all ranks from rank 0's parameters
    _train(model, DistributedDataParallel(model), [(x[rank::world_size], y[rank::world_size]) for x, y in batches])
    alone = _model(seed=0)
    _train(alone, alone, batches)
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    report = {
        "launcher": launcher,
        "rank": rank,
        "world_size": world_size,
        "local_rank": get_local_rank(),
        "local_size": get_local_size(),
        "node_rank": get_node_rank(),
        "num_nodes": get_num_nodes(),
        "parameters": _digest(model),
        "listening": _listening_addresses(),
    }
    # In one piece: launchers mix what their ranks write.
    sys.stdout.write(json.dumps(report) + "\n")


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _batches(world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the same batches on every rank; a rank trains on its share of each."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(STEPS, world_size * SAMPLES_PER_RANK, 4, generator=generator)
    return [(x, x.sum(dim=1, keepdim=True)) for x in inputs]


def _train(model: nn.Module, forward: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(inputs), targets).backward()
        optimizer.step()


def _digest(model: nn.Module) -> str:
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return sha256(parameters.numpy().tobytes()).hexdigest()


def _listening_addresses() -> list[str]:
    sockets = psutil.Process().net_connections("inet")
    return sorted({sock.laddr.ip for sock in sockets if sock.status == psutil.CONN_LISTEN})


if __name__ == "__main__":
    main()
