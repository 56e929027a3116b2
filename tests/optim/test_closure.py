"""Optimizers that evaluate the loss themselves, by a closure, in a training step of the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lockstep.dist import all_reduce, get_rank, get_world_size
from lockstep.model import MMDistributedDataParallel, train_step
from lockstep.optim import OptimWrapper
from lockstep.testing import ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A line search makes large differences of small ones.
        self.body, self.head = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x).tanh()), y)

    def train_step(self, data: tuple[Tensor, Tensor], optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        def closure() -> Tensor:
            optim_wrapper.zero_grad()
            with torch.enable_grad():
                loss = self(*data)
            optim_wrapper.backward(loss)
            mean = loss.detach().clone()
            all_reduce(mean, "mean")
            return mean

        return {"loss": optim_wrapper.optimizer.step(closure)}


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(4, 4, 4, generator=generator, dtype=torch.float64)
    return [(batch[:, :3], batch[:, 3:]) for batch in made]


def by_hand() -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = lbfgs(model)
    for batch in batches():

        def closure(batch=batch):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = model(*batch)
                loss.backward()
            return loss

        optimizer.step(closure)
    return list(model.parameters())


@ranks(1, 2)
def test_all_ranks_decide_alike_by_the_mean_of_their_losses():
    torch.manual_seed(0)
    model = Net()
    wrapped, optim = MMDistributedDataParallel(model), OptimWrapper(lbfgs(model))
    for batch in batches():
        train_step(wrapped, tuple(part[get_rank() :: get_world_size()] for part in batch), optim)
    for mine, theirs in zip(model.parameters(), by_hand(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_a_loss_of_one_evaluation_is_refused():
    model = Net()
    with pytest.raises(TypeError, match=r"LBFGS evaluates the loss itself.*optimizer\.step\(closure\)"):
        OptimWrapper(lbfgs(model)).update_params(model(*batches()[0]))
