"""Objects taken apart and put together again: what travels beside the pickle, and what becomes of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lockstep.dist.pickling import dump, load
from lockstep.groups import SOLO

from .drawn_objects import LARGE, SHAPES, assert_same, every_array, every_tensor, made, plans

SEGMENT_BYTES = 64 * 1024


def travelled(obj: Any) -> Any:
    """Return what arrives of an object: its parts come in memory of their own."""
    return load([part.clone() for part in dump(obj, SOLO)])


@given(plans())
@settings(max_examples=100)
def test_any_object_is_put_together_as_it_was(plan: Any) -> None:
    obj = made(plan)
    assert_same(travelled(obj), obj)


@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str)
@pytest.mark.parametrize("every", [every_tensor, every_array])
def test_every_dtype_and_layout_is_put_together_as_it_was(
    every: Callable[[tuple[int, ...]], dict[str, Any]], shape: tuple[int, ...]
) -> None:
    data = every(shape)
    assert_same(travelled(data), data)


@pytest.mark.parametrize("make", [torch.zeros, lambda n, **_: np.zeros(n, np.uint8)], ids=["tensor", "array"])
def test_from_64_kib_on_data_travel_beside_the_pickle(make: Callable[..., Any]) -> None:
    for nbytes, num_segments in [(SEGMENT_BYTES - 1, 0), (SEGMENT_BYTES, 1), (SEGMENT_BYTES + 1, 1)]:
        pickled, *segments = dump({"mask": make(nbytes, dtype=torch.uint8)}, SOLO)
        assert len(segments) == num_segments
        assert (pickled.numel() < 1024) == (num_segments == 1)


@pytest.mark.parametrize("data", [torch.zeros(2**17), np.zeros(2**17), np.zeros((512, 512), order="F")])
def test_large_contiguous_data_are_not_copied_on_the_way_out(data: Any) -> None:
    _, segment = dump([data], SOLO)
    address = data.data_ptr() if isinstance(data, Tensor) else data.ctypes.data
    assert segment.data_ptr() == address


def test_data_are_built_upon_the_memory_they_arrived_in() -> None:
    landing = [part.clone() for part in dump([torch.zeros(2**17), np.zeros(2**17)], SOLO)]
    tensor, array = load(landing)
    assert [tensor.data_ptr(), array.ctypes.data] == [part.data_ptr() for part in landing[1:]]


@pytest.mark.parametrize("nbytes", [16, 2 * SEGMENT_BYTES])
def test_one_tensor_in_two_places_stays_one(nbytes: int) -> None:
    tensor, weight = torch.zeros(nbytes, dtype=torch.uint8), torch.nn.Parameter(torch.zeros(nbytes))
    obj = {"a": tensor, "b": [tensor, weight], "c": weight}
    assert len(dump(obj, SOLO)) == 1 + (2 if nbytes >= SEGMENT_BYTES else 0)
    arrived = travelled(obj)
    assert arrived["a"] is arrived["b"][0]
    assert arrived["b"][1] is arrived["c"]


@pytest.mark.parametrize("num_elements", [4, 2**16])
def test_attributes_of_tensors_are_kept(num_elements: int) -> None:
    tensor, weight = torch.zeros(num_elements), torch.nn.Parameter(torch.zeros(num_elements))
    buffer = torch.nn.Buffer(torch.zeros(num_elements), persistent=False)
    tensor.scale, weight.is_sharded = 0.5, True
    arrived = travelled([tensor, weight, buffer])
    assert [vars(x) for x in arrived] == [{"scale": 0.5}, {"is_sharded": True}, vars(buffer)]
    assert isinstance(arrived[2], torch.nn.Buffer)


def test_a_module_arrives_with_its_weights() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    arrived = travelled(module)
    assert_same(dict(arrived.state_dict()), dict(module.state_dict()))
    assert all(isinstance(weight, torch.nn.Parameter) and weight.requires_grad for weight in arrived.parameters())


class Result:
    """What a user keeps his masks in."""

    def __init__(self) -> None:
        self.masks = [torch.zeros(2**17), np.zeros(2**17)]


def test_nothing_keeps_an_object_alive_that_has_been_taken_apart_or_put_together() -> None:
    sent, arrived = Result(), travelled(Result())
    dump([sent], SOLO)
    references = weakref.ref(sent), weakref.ref(arrived)
    gc.disable()
    try:
        del sent, arrived
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("data", [torch.eye(3).to_sparse(), torch.empty(2**20, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_plain_memory_travel_as_torch_pickles_them(data: Tensor) -> None:
    arrived = travelled(data)
    assert (arrived.layout, arrived.device, arrived.shape) == (data.layout, data.device, data.shape)
    assert data.is_meta or torch.equal(arrived.to_dense(), data.to_dense())


def test_the_default_device_is_for_tensors_of_the_user_alone() -> None:
    obj = [torch.ones(3), torch.ones(0), torch.ones(2**17)]
    with torch.device("meta"):
        arrived = travelled(obj)
    assert_same(arrived, obj)


class Stubborn:
    """Refuses to be pickled, with an error of its own."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def endless() -> list[Any]:
    """Return a list nested too deeply for pickle."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        lambda: lambda: 0,
        lambda: Stubborn(ValueError("not today")),
        lambda: Stubborn(RuntimeError("not today")),
        lambda: Stubborn(KeyError("not today")),
        endless,
        lambda: memoryview(b"abc")[::2],
    ],
    ids=["lock", "lambda", "ValueError", "RuntimeError", "KeyError", "endless", "memoryview"],
)
def test_whatever_keeps_an_object_from_being_pickled_is_a_type_error_with_its_cause(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"must be picklable, but dict is not: .* \(rank 0 of 1\)") as caught:
        dump({"entry": make()}, SOLO)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError, MemoryError])
def test_an_error_of_memory_or_a_device_is_not_taken_for_one_of_the_object(error: type[BaseException]) -> None:
    class Full:
        def __reduce__(self) -> Any:
            raise error("of the device")

    with pytest.raises(error, match="of the device"):
        dump(Full(), SOLO)
