"""Two models, of which one is frozen: a small student learns from a larger teacher."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


session = Session("work_dirs/teacher", strategy=sys.argv[1] if sys.argv[1:] else None, randomness=dict(seed=0))
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, val = torch.utils.data.random_split(data, [1500, 297], generator=torch.Generator().manual_seed(0))

teacher, student = network(256), network(16)
optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
for _ in range(100):  # a teacher usually comes from a file; it is the same on every rank, and no strategy sees it
    nn.functional.cross_entropy(teacher(data.tensors[0]), data.tensors[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
teacher.requires_grad_(False).to(session.device)

optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
student, optimizer, loader = session.prepare(student, optimizer, DataLoader(train, batch_size=50, shuffle=True))
val_loader = session.prepare_evaluation(DataLoader(val, batch_size=50))
for _ in session.epochs(5):
    for inputs, _ in loader:
        wanted = teacher(inputs).softmax(1)
        session.step(nn.functional.cross_entropy(student(inputs), wanted))
    with torch.no_grad():
        hits = [session.gather(student(inputs).argmax(1) == targets) for inputs, targets in val_loader]
    session.log_metrics(accuracy=torch.cat(hits).float().mean().item())
