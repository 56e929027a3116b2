"""Optimizers that evaluate the loss themselves, by a closure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lockstep.dist import get_rank, get_world_size
from lockstep.model import MMDistributedDataParallel, train_step
from lockstep.optim import AmpOptimWrapper, OptimWrapper
from lockstep.testing import ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A line search makes large differences of small ones.
        self.body, self.head = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x).tanh()), y)


class SharpnessAware(torch.optim.SGD):
    """Climbs before it descends, as in Foret et al., Sharpness-Aware Minimization, 2021."""

    needs_closure = True

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        climbs = [0.05 * param.grad for param in params]
        for param, climb in zip(params, climbs, strict=True):
            param.add_(climb)
        closure()
        for param, climb in zip(params, climbs, strict=True):
            param.sub_(climb)
        super().step()
        return loss


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def sharpness_aware(model: nn.Module) -> torch.optim.Optimizer:
    return SharpnessAware(model.parameters(), lr=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(4, 4, 4, generator=generator, dtype=torch.float64)
    return [(batch[:, :3], batch[:, 3:]) for batch in made]


def by_hand(make) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    for batch in batches():

        def closure(batch=batch):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = model(*batch)
                loss.backward()
            return loss

        optimizer.step(closure)
    return list(model.parameters())


def by_steps(make, wrap) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    wrapped, optim = wrap(model), OptimWrapper(make(model))
    for batch in batches():
        train_step(wrapped, tuple(part[get_rank() :: get_world_size()] for part in batch), optim)
    assert optim.inner_count == 4
    return list(model.parameters())


@pytest.mark.parametrize("make", [lbfgs, sharpness_aware])
def test_a_closure_trains_as_by_hand(make):
    for mine, theirs in zip(by_steps(make, lambda model: model), by_hand(make), strict=True):
        assert torch.equal(mine, theirs)


@ranks(2)
@pytest.mark.parametrize("make", [lbfgs, sharpness_aware])
def test_all_ranks_decide_alike_by_the_mean_of_their_losses(make):
    for mine, theirs in zip(by_steps(make, MMDistributedDataParallel), by_hand(make), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_what_contradicts_a_closure_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="`accumulative_counts` must be 1 for LBFGS"):
        OptimWrapper(lbfgs(model), accumulative_counts=2)
    with pytest.raises(TypeError, match=r"LBFGS evaluates the loss itself.*update_by_closure"):
        OptimWrapper(lbfgs(model)).update_params(model(*batches()[0]))
    with pytest.raises(TypeError, match=r"LBFGS evaluates the loss itself.*bfloat16"):
        train_step(model, batches()[0], AmpOptimWrapper(dtype="float16", optimizer=lbfgs(model)))
