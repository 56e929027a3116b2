"""Two models and two optimizers: a generator and a discriminator on points of a circle."""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.dist import all_reduce

session = Session("work_dirs/gan", strategy=sys.argv[1] if sys.argv[1:] else None, randomness=dict(seed=0))
angles = torch.rand(2048, generator=torch.Generator().manual_seed(0)) * 6.28
loader = DataLoader(TensorDataset(torch.stack([angles.cos(), angles.sin()], 1)), batch_size=64, shuffle=True)
model = {
    "generator": nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
    "critic": nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1)),
}
optimizers = {name: torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.99)) for name, part in model.items()}
model, optimizers, loader = session.prepare(model, optimizers, loader)

for _ in session.epochs(10):
    for (real,) in loader:
        drawn = model["generator"](torch.randn(len(real), 4, device=real.device))
        loss_critic = softplus(-model["critic"](real)).mean() + softplus(model["critic"](drawn.detach())).mean()
        optimizers["critic"].update_params(loss_critic)
        model["critic"].requires_grad_(False)  # used for the generator's loss, but not trained by it
        loss_generator = softplus(-model["critic"](drawn)).mean()
        optimizers["generator"].update_params(loss_generator)
        model["critic"].requires_grad_(True)
        session.log(loss_critic=loss_critic, loss_generator=loss_generator)
    with torch.no_grad():
        points = model["generator"](torch.randn(512, 4, device=real.device))  # on every rank: FSDP needs them all
        radius = points.norm(dim=1).mean()
        all_reduce(radius, op="mean")  # each rank has drawn its own
    session.log_metrics(radius=radius.item())  # that of real points is 1
