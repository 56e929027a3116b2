"""Batches on their way to a device: which copies let the host go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.dataset import build_dataloader
from lockstep.model import BaseDataPreprocessor, ImgDataPreprocessor
from lockstep.model.preprocessor import move_to_device
from lockstep.model.steps import preprocess

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Notes of each copy to another device whether the host goes on while it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self.non_blocking.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


def copies_of(move: Any, batch: Any) -> list[bool]:
    with Copies() as copies:
        move(batch)
    return copies.non_blocking


@dataclass
class Record:
    image: Tensor


class Edge(NamedTuple):
    begin: Tensor
    to: Tensor


@dataclass
class DirectedEdge:
    begin: Tensor
    to: Tensor


class Graph:
    """Of another library: takes `non_blocking`."""

    def __init__(self) -> None:
        self.x = torch.ones(1)

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor:
        return self.x.to(device, non_blocking=non_blocking)


class Masks:
    """Takes a device only."""

    def to(self, device: torch.device) -> Tensor:
        return torch.ones(1).to(device)


class Sample:
    """A node of a tree."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def tree_children(self) -> dict[str, Any]:
        return self.fields

    def tree_rebuild(self, children: dict[str, Any]) -> Sample:
        return Sample(**children)


class MovingSample(Sample):
    def to(self, device: torch.device) -> Any:
        return "moved by itself"


BATCHES: dict[str, tuple[Any, list[bool]]] = {
    "a tensor": (torch.ones(1), [True]),
    "a list": ([torch.ones(1), torch.ones(2)], [True, True]),
    "nested": ({"a": (torch.ones(1), "x"), "b": [Record(torch.ones(1))]}, [True, True]),
    "nodes of a tree": ([Sample(boxes=torch.ones(2, 4), masks=Masks())], [True, False]),
    "with a field `to`": ([Edge(torch.ones(1), torch.ones(1)), DirectedEdge(torch.ones(1), torch.ones(1))], [True] * 4),
    "an object with non_blocking": ([Graph()], [True]),
    "an object without": ([Masks()], [False]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_copied_without_waiting_where_its_parts_can_be(name: str) -> None:
    batch, copies = BATCHES[name]
    assert copies_of(lambda x: move_to_device(x, META), batch) == copies


def test_a_node_with_a_method_of_its_own_is_moved_by_it() -> None:
    assert move_to_device([MovingSample(boxes=torch.ones(1))], META) == ["moved by itself"]
    assert move_to_device(MovingSample, META) is MovingSample


def test_every_preprocessing_copies_without_waiting_unless_told_otherwise() -> None:
    images = [torch.ones(2, 3, 4, 4)]
    plain, own = nn.Linear(2, 1).to(META), nn.Linear(2, 1).to(META)
    own.data_preprocessor = BaseDataPreprocessor(non_blocking=False).to(META)
    assert copies_of(lambda x: preprocess(plain, x, training=True), images) == [True]
    assert copies_of(lambda x: preprocess(own, x, training=True), images) == [False]
    assert copies_of(BaseDataPreprocessor().to(META), images) == [True]
    assert copies_of(ImgDataPreprocessor([1.0], [1.0]).to(META), images) == [True]


class FromDevice(torch.Tensor):
    """A tensor that notes how it is copied to the CPU."""

    noted: bool | None = None
    device = META  # type: ignore[assignment]

    def to(self, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        FromDevice.noted = non_blocking
        return torch.zeros(1)


def test_a_copy_to_the_cpu_ends_before_it_is_read() -> None:
    BaseDataPreprocessor()([torch.ones(1).as_subclass(FromDevice)])
    assert FromDevice.noted is False


def test_a_loader_made_from_a_config_pins_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def pins(**options: Any) -> bool:
        return build_dataloader({"dataset": list(range(4)), "num_workers": 1, **options}, seed=0).pin_memory

    assert not pins()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    assert pins()
    assert not pins(pin_memory=False)
    assert not pins(num_workers=0)  # samples may be on the accelerator already
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert not pins()  # torch's loader would only warn


class Pinned:
    def __init__(self) -> None:
        self.is_pinned = False

    def pin_memory(self) -> Pinned:
        self.is_pinned = True
        return self


def test_of_a_stream_the_batch_alone_is_pinned() -> None:
    from lockstep.dataset.stream import _Made

    batch, position = {"a": [Pinned()], "b": "name"}, Pinned()
    made = _Made(batch, 1, {"0": position}, []).pin_memory()
    assert made.batch["a"][0].is_pinned
    assert not position.is_pinned
    assert made.samples == 1


def test_a_packed_sequence_keeps_on_the_cpu_what_torch_needs_there() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_to_device({"x": packed, "y": [packed]}, torch.device("meta"))
    for one in (moved["x"], moved["y"][0]):
        assert isinstance(one, PackedSequence)
        assert (one.data.device.type, one.batch_sizes.tolist()) == ("meta", [2, 2, 1])
