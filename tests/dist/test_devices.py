"""Where data lives, and moving it; the machine that runs this needs no accelerator: `meta` is a second device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lockstep.dist import cast_data_device, get_comm_device, get_data_device
from lockstep.testing import ranks


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    label: int


def test_the_device_of_data_is_that_of_the_tensors_in_it_at_any_depth() -> None:
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    assert get_data_device(cpu) == torch.device("cpu")
    assert get_data_device([{"a": (1, Pair(cpu, None))}, Sample(cpu, 3), "text"]) == torch.device("cpu")
    assert get_data_device(Sample(meta, 3)) == torch.device("meta")


def test_tensors_on_different_devices_are_refused_by_path_and_device() -> None:
    mixed = {"images": [Sample(torch.zeros(1), 0), Sample(torch.zeros(1, device="meta"), 1)]}
    message = r"`images\[0\].image` is on cpu and `images\[1\].image` on meta. Move it with cast_data_device\(\)"
    with pytest.raises(ValueError, match=message):
        get_data_device(mixed)


@pytest.mark.parametrize("data", [3, None, "text", [], {"a": [1, "b"]}, range(200)])
def test_data_without_tensors_has_no_device(data: Any) -> None:
    with pytest.raises(TypeError, match=r"`data` must hold a tensor, but holds none: .{1,80}$"):
        get_data_device(data)


def test_casting_moves_every_tensor_and_keeps_every_type() -> None:
    counts = defaultdict(list, {"a": [torch.zeros(2), 1]})
    data = {
        "pair": Pair(torch.zeros(1), "x"),
        "sample": Sample(torch.zeros(3), 7),
        "row": (torch.ones(1),),
        "c": counts,
    }
    moved = cast_data_device(data, "meta")
    assert type(moved["pair"]) is Pair
    assert moved["pair"].second == "x"
    assert type(moved["sample"]) is Sample
    assert moved["sample"].label == 7
    assert type(moved["row"]) is tuple
    assert moved["c"].default_factory is list
    assert get_data_device(moved) == torch.device("meta")
    assert get_data_device(data) == torch.device("cpu")


def test_casting_to_where_the_data_are_copies_nothing() -> None:
    data = {"a": torch.zeros(1)}
    assert cast_data_device(data, torch.device("cpu"))["a"] is data["a"]


def test_casting_with_out_fills_its_tensors_and_returns_it() -> None:
    data = {"a": torch.ones(2), "b": [torch.arange(3), 5]}
    out = {"b": [torch.zeros(3), 0], "a": torch.zeros(2, requires_grad=True)}
    assert cast_data_device(data, "cpu", out) is out
    assert out["a"].tolist() == [1.0, 1.0]
    assert out["a"].is_leaf
    assert out["b"][0].tolist() == [0.0, 1.0, 2.0]


def test_values_go_where_their_keys_are_in_out() -> None:
    data = {1: torch.tensor(1.0), "1": torch.tensor(2.0), "a.b": torch.tensor(3.0), "a": {"b": torch.tensor(4.0)}}
    out = {"a": {"b": torch.zeros(())}, "a.b": torch.zeros(()), "1": torch.zeros(()), 1: torch.zeros(())}
    cast_data_device(data, "cpu", out)
    assert out == data


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"a": torch.zeros(1)}, r"`out` must have the leaves of `data`, \['a', 'b'\], but has \['a'\]"),
        ({"a": torch.zeros(1), "c": torch.zeros(2)}, r"but has \['a', 'c'\]"),
        ({"a": torch.zeros(1), "b": torch.zeros(3)}, r"`out` at `b` must be a tensor of shape \(2,\), but is \(3,\)"),
        ({"a": torch.zeros(1), "b": None}, r"`out` at `b` must be a tensor of shape \(2,\), but is NoneType"),
        ({"a": torch.zeros(1), "b": torch.zeros(2, device="meta")}, "`out` at `b` must live on cpu, but is on meta"),
        (
            {"a": torch.zeros(1), "b": torch.zeros(2, dtype=torch.uint8)},
            "`out` at `b` must have a dtype that torch.float32",
        ),
    ],
)
def test_an_out_that_does_not_fit_is_refused_and_left_as_it_is(out: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cast_data_device({"a": torch.ones(1), "b": torch.ones(2)}, "cpu", out)
    assert out["a"].item() == 0


def test_without_a_group_talk_is_on_the_cpu() -> None:
    assert get_comm_device() == torch.device("cpu")


@ranks(2)
def test_gloo_talks_on_the_cpu() -> None:
    assert get_comm_device() == torch.device("cpu")
