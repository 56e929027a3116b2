"""Optimizers that wrap another one, as published ones do: saved, resumed, or refused before the training."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.testing import ranks

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


class Slow(torch.optim.Optimizer):
    """Every second step goes half of the way back. As timm's Lookahead, it has no state but that of the inner one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("slow_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for group in self.param_groups:
            group["slow_step"] += 1
            for parameter in group["params"]:
                held = self.inner.state[parameter]
                slow = held.setdefault("slow", parameter.detach().clone())
                if group["slow_step"] % 2 == 0:
                    slow.add_(parameter - slow, alpha=0.5)
                    parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Apart(Slow):
    """Keeps a state beside that of the inner one."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "own": {}}


INNER = {"AdamW": {"lr": 0.1}, "SGD": {"lr": 0.1, "momentum": 0.9}}


def train(work_dir: Path, epochs: int, kind: type[Slow], inner: str, strategy: str, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    session = Session(work_dir, strategy=strategy, randomness={"seed": 0}, log_level="ERROR", **options)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    loader = DataLoader(TensorDataset(X), batch_size=4 // get_world_size())
    optimizer = kind(getattr(torch.optim, inner)(model.parameters(), **INNER[inner]))
    model, _, batches = session.prepare(model, optimizer, loader)
    for _ in session.epochs(epochs):
        for (x,) in batches:
            session.step(model(x).square().mean())
    weights = session.run.strategy.model_state().values()
    return [getattr(weight, "full_tensor", lambda weight=weight: weight)().clone() for weight in weights]


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("inner", INNER)
@ranks(1, 2)
def test_a_wrapped_optimizer_goes_on_from_its_checkpoint(tmp_path, inner, strategy):
    strategy = "ddp" if strategy == "single" and get_world_size() > 1 else strategy
    straight = train(tmp_path / "straight", 3, Slow, inner, strategy)
    train(tmp_path / "halves", 1, Slow, inner, strategy)
    resumed = train(tmp_path / "halves", 3, Slow, inner, strategy, resume=True)
    for one, other in zip(straight, resumed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_state_that_a_checkpoint_would_lack_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"by parameter, but Apart also keeps 'inner'.*save_optimizer=False"):
        train(tmp_path, 1, Apart, "AdamW", "single")
    options = {"default_hooks": {"checkpoint": {"save_optimizer": False}}}
    assert train(tmp_path, 1, Apart, "AdamW", "single", **options)


class Paired(torch.optim.SGD):
    """Keeps a state for a pair of parameters, under a name, as peft's LoRA-FA does; or an object with a parameter's."""

    steps = 0
    kept: Any = None

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        type(self).steps += 1
        self.state["pair" if self.kept is None else self.param_groups[0]["params"][0]] = {"kept": self.kept or 1}


@pytest.mark.parametrize(("kept", "told"), [(None, "Paired also keeps 'pair'"), (object(), r"optimizer.*kept.*object")])
def test_a_state_that_no_checkpoint_holds_is_refused_after_the_first_update(tmp_path, monkeypatch, kept, told):
    monkeypatch.setattr(Paired, "steps", 0)
    monkeypatch.setattr(Paired, "kept", kept)
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, 1, Paired, "SGD", "single", accumulative_counts=2)
    assert Paired.steps == 1
    train(tmp_path, 1, Paired, "SGD", "single", default_hooks={"checkpoint": {"save_optimizer": False}})
