"""What a model says of its weights, by the names that they have in its state."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from lockstep.weights import describe_model, sized_on_loading


class Sized(nn.Module):
    """Sizes a buffer at the first batch, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.empty(0))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


class Pretrained(nn.Module):
    """As a model of transformers, with a head that shares its weight with the embedding."""

    config = SimpleNamespace(to_json_string=lambda: json.dumps({"size": 4}))

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.words.weight
        self.observer = Sized()

    @classmethod
    def from_pretrained(cls) -> Pretrained:
        return cls()

    def can_generate(self) -> bool:
        return False


def test_names_are_those_of_the_state_also_where_parts_are_wrapped() -> None:
    def make(*, wrapped: bool) -> nn.Module:
        inner = Pretrained()
        if wrapped:
            inner.head = checkpoint_wrapper(inner.head)
            inner.observer = checkpoint_wrapper(inner.observer)
        return nn.ModuleDict({"net": torch.compile(inner, backend="eager") if wrapped else inner})

    plain, wrapped = make(wrapped=False), make(wrapped=True)
    state = get_model_state_dict(wrapped)
    assert state.keys() == get_model_state_dict(plain).keys()
    described = describe_model(wrapped, state)
    assert described == describe_model(plain, state)
    assert described["tied"] == [["net.words.weight", "net.head.weight"]]
    assert [one["prefix"] for one in described["pretrained"]] == ["net."]
    assert sized_on_loading(wrapped) == sized_on_loading(plain) == {"net.observer.least"}


def test_two_names_in_one_module_are_tied_too() -> None:
    model = nn.Module()
    model.weight = model.alias = nn.Parameter(torch.ones(2))
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("center", model.mean)
    assert describe_model(model, model.state_dict())["tied"] == [["weight", "alias"], ["mean", "center"]]
