"""Outputs in which torch finds no tensors: under each wrapper their model trains as one that returns a tensor."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner
from lockstep.errors import ConfigError
from lockstep.model.hidden_outputs import hidden_tensors
from lockstep.testing import ranks

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
LABELS = (X.sum(1) > 0).long()
BLOCKS = {"type": "FSDPStrategy", "auto_wrap_policy": ["Block"]}


@dataclass
class Data:
    logits: Any


class Named(NamedTuple):
    logits: Any


class Slots:
    __slots__ = ("logits",)

    def __init__(self, logits: Any) -> None:
        self.logits = logits


def tensordict(logits: Tensor) -> TensorDict:
    return TensorDict({"logits": logits}, batch_size=[len(logits)])


HIDES: dict[str, Callable[[Tensor], Any]] = {
    "namespace": lambda logits: SimpleNamespace(logits=logits),
    "slots": Slots,
    "distribution": lambda logits: Categorical(logits=logits),
    "mapping": lambda logits: UserDict(logits=logits),
    "tensordict": tensordict,
}
SHOWS: dict[str, Callable[[Tensor], Any]] = {"dataclass": Data, "named": Named, "dict": lambda x: {"logits": [x]}}


@pytest.mark.parametrize("kind", HIDES)
def test_what_torch_does_not_look_into_hides_tensors(kind: str):
    logits = torch.ones(2, 3, requires_grad=True) * 2
    assert hidden_tensors((HIDES[kind](logits), logits)) == []  # torch finds one
    for output in (HIDES[kind](logits), (1, [HIDES[kind](logits)]), Data(HIDES[kind](logits))):
        found = hidden_tensors(output)
        assert found
        assert all(one.grad_fn is not None for one in found)
    assert hidden_tensors(HIDES[kind](logits.detach())) == []


@pytest.mark.parametrize("kind", SHOWS)
def test_what_torch_looks_into_hides_none(kind: str):
    assert hidden_tensors(SHOWS[kind](torch.ones(2, requires_grad=True) * 2)) == []


class OneSlot:
    __slots__ = "logits"


class PrivateSlot:
    __slots__ = ("__logits",)

    def __init__(self, logits: Tensor) -> None:
        self.__logits = logits


class Remade(Mapping[str, Any]):
    """Makes each of its values anew when it is asked for."""

    def __init__(self, logits: Tensor, depth: int) -> None:
        self.logits, self.depth = logits, depth

    def __getitem__(self, key: str) -> Any:
        return Remade(self.logits, self.depth - 1) if self.depth else self.logits * 1

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


@dataclass
class Unset:
    logits: Any = field(init=False)


def test_tensors_in_any_slot_in_deques_and_in_values_that_are_made_anew_are_found():
    logits = torch.ones(2, 3, requires_grad=True) * 2
    slotted = OneSlot()
    slotted.logits = logits
    for output in (slotted, PrivateSlot(logits), deque([logits])):
        assert hidden_tensors(output) == [logits]
    assert len(hidden_tensors(Remade(logits, depth=3))) == 2**4


def test_a_field_of_a_dataclass_that_is_not_set_is_passed_over():
    logits = torch.ones(2, 3, requires_grad=True) * 2
    assert hidden_tensors(SimpleNamespace(unset=Unset(), logits=logits)) == [logits]


def test_models_parameters_and_circles_are_passed_over():
    output = SimpleNamespace(model=nn.Linear(2, 2), weight=nn.Parameter(torch.ones(2)), text="text", size=3)
    output.itself = [output]
    assert hidden_tensors(output) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        return SimpleNamespace(x=given.x + self.linear(given.x).relu())


class Net(nn.Module):
    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        given = SimpleNamespace(x=x)
        for block in self.blocks:
            given = block(given)
        return self.returns(self.head(given.x))


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def loss_of_batch(outputs: Any, batch: Any) -> Tensor:
    logits = (
        outputs if isinstance(outputs, Tensor) else outputs["logits"] if hasattr(outputs, "keys") else outputs.logits
    )
    return nn.functional.cross_entropy(logits, batch[-1])


def train(work_dir: Path, returns: Callable[[Tensor], Any], strategy: Any, window: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    runner = Runner(
        Net(returns),
        work_dir,
        train_dataloader=DataLoader(TensorDataset(X, LABELS), batch_size=4),
        loss=loss_of_batch,
        train_cfg={"max_epochs": 2},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": window},
        strategy=strategy,
        visualizer=[],
    )
    runner.train()
    return [
        getattr(one, "full_tensor", lambda one=one: one)().clone() for one in runner.run.strategy.model_state().values()
    ]


@pytest.mark.parametrize("strategy", ["fsdp", BLOCKS, {"type": "DDPStrategy", "find_unused_parameters": True}])
@ranks(1, 2)
def test_a_model_that_hides_its_outputs_is_trained(strategy: Any, tmp_path: Path):
    expected = train(tmp_path, lambda logits: logits, "ddp")
    for returns in HIDES.values():
        torch.testing.assert_close(train(tmp_path, returns, strategy), expected)


@ranks(2)
def test_with_accumulation_and_checkpointing_too(tmp_path: Path):
    expected = train(tmp_path, lambda logits: logits, "ddp", window=2)
    strategy = {**BLOCKS, "activation_checkpointing": ["Block"]}
    torch.testing.assert_close(train(tmp_path, HIDES["namespace"], strategy, window=2), expected)


@ranks(2)
def test_a_loss_of_what_fsdp_does_not_find_is_refused(tmp_path: Path):
    def aside(logits: Tensor) -> dict[str, Any]:
        class Other(dict):
            pass

        found = Other(logits=logits.sum() * 0)
        found.logits = logits
        return found

    def loss(outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, batch[-1])

    with pytest.raises(ConfigError, match="must return the tensors that the loss depends on where FSDP finds them"):
        Runner(
            nn.Sequential(nn.Linear(4, 2), Lambda(aside)),
            tmp_path,
            train_dataloader=DataLoader(TensorDataset(X, LABELS), batch_size=4),
            loss=loss,
            strategy="fsdp",
            visualizer=[],
        ).train()


@ranks(2)
def test_a_static_graph_needs_outputs_that_torch_finds(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"`static_graph` must be False .* but Net returns a SimpleNamespace"):
        train(tmp_path, HIDES["namespace"], {"type": "DDPStrategy", "static_graph": True})
