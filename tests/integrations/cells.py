from functools import partial

from torch import nn

from lockstep.dist import all_gather_object, get_dist_info, init_dist
from lockstep.launch import JobSpec, launch


class Found:
    def __init__(self, rank):
        self.rank = rank


def work(factor):
    init_dist()
    found = all_gather_object(Found(get_dist_info()[0] * factor))
    print("found", [one.rank for one in found])


# %%
launch(partial(work, 10), JobSpec(2))


# %%
def check(rank):
    if rank == 1:
        raise ValueError("bad luck")


def fails():
    init_dist()
    check(get_dist_info()[0])


launch(fails, JobSpec(2))
# %%
from small import parts

from lockstep import Session


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)


def train():
    import torch

    session = Session("work_dirs/notebook")
    model, loader = Net(), parts()[1]
    model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in session.epochs(2):
        for inputs, targets in loader:
            session.step(nn.functional.mse_loss(model(inputs), targets))


launch(train, JobSpec(2))
# %%
import threading

lock = threading.Lock()
launch(lambda: lock, JobSpec(2))
# %%
import sys

sys.modules["cloudpickle"] = None
launch(train, JobSpec(2))
