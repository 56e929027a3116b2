"""A second backward pass through the gradients: a classifier whose outputs change slowly with its inputs."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session

session = Session("work_dirs/gradient_penalty", strategy=sys.argv[1] if sys.argv[1:] else None, randomness=dict(seed=0))
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, val = torch.utils.data.random_split(data, [1500, 297], generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(64, 128), nn.Softplus(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = session.prepare(model, optimizer, DataLoader(train, batch_size=50, shuffle=True))
val_loader = session.prepare_evaluation(DataLoader(val, batch_size=50))

for _ in session.epochs(5):
    for inputs, targets in loader:
        inputs.requires_grad_()
        logits = model(inputs)
        (slopes,) = torch.autograd.grad(logits.logsumexp(1).sum(), inputs, create_graph=True)
        penalty = slopes.square().sum(1).mean()
        session.step(nn.functional.cross_entropy(logits, targets) + 0.1 * penalty, penalty=penalty)
    with torch.no_grad():
        hits = [session.gather(model(inputs).argmax(1) == targets) for inputs, targets in val_loader]
    session.log_metrics(accuracy=torch.cat(hits).float().mean().item())
