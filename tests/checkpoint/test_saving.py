"""What can be saved comes back as it was; what can't is refused by name."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import OrderedDict
from contextlib import nullcontext
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from lockstep.checkpoint import Planner, layout, load_state, read_meta, read_shapes, save_state, verify
from lockstep.checkpoint.manifest import BLOCK, ITEM_SIZES
from lockstep.checkpoint.values import NUMBER, decode, encode
from lockstep.dist import get_rank, get_world_size
from lockstep.errors import CollectiveTimeoutError, ConfigError, DistError
from lockstep.testing import ranks

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(torch.bfloat16),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["$tensor", "$tuple"]), inner)
    ),
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any):
    text = json.dumps(encode(value), allow_nan=False)
    back = decode(json.loads(text))
    assert back == value
    assert repr(back) == repr(value)  # and of the same types


def test_what_json_does_not_have_is_kept():
    value = {"nan": math.nan, "numpy": numpy.float32(0.5), "order": OrderedDict(b=1, a=2), "size": torch.Size([2])}
    back = decode(json.loads(json.dumps(encode(value))))
    assert math.isnan(back.pop("nan"))
    assert back == {"numpy": 0.5, "order": {"b": 1, "a": 2}, "size": (2,)}
    assert type(back["numpy"]) is float


class Colour(str, Enum):  # noqa: UP042  # not a StrEnum, whose text is its value
    RED = "red"


def test_of_an_enum_of_strings_or_numbers_the_value_is_kept():
    assert encode([Colour.RED, HTTPStatus.OK, {Colour.RED: 1}]) == ["red", 200, {"$dict": [["red", 1]]}]


def test_arrays_of_another_byte_order_and_the_largest_number_are_kept():
    tensors: dict[str, torch.Tensor] = {}
    encode({"swapped": numpy.array([[1.5, 2.0]], dtype=">f8")[:, ::-1]}, tensors=tensors)
    assert tensors["swapped"].tolist() == [[2.0, 1.5]]
    assert NUMBER.fits(-sys.float_info.max)
    assert not NUMBER.fits(10**400)


@ranks(1, 2)
@pytest.mark.parametrize(
    "value",
    [
        *({1, 2}, object(), b"bytes", Path("x"), torch.device("cpu"), numpy.array(["a"])),
        *(numpy.zeros(2, numpy.longdouble), numpy.ma.masked_array([1, 2], [True, False])),
        *(numpy.datetime64("NaT", "ns"), numpy.datetime64(1, "ns"), numpy.timedelta64(1, "ns")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_value_is_refused_by_name_on_every_rank(value: Any, tmp_path: Path):
    mine = {"list": [0, value if get_rank() == get_world_size() - 1 else 0]}
    with pytest.raises(ConfigError, match=r"`mine.list.1` must be a tensor, a number, .* but is a .*Convert it where"):
        save_state(tmp_path / "state", {"w": torch.ones(1), "mine": mine}, {})
    assert list(tmp_path.iterdir()) == []
    if get_rank() == 0:
        with pytest.raises(ConfigError, match="`note` must be a number"):
            encode({"note": torch.ones(1)})


@ranks(2)
@pytest.mark.parametrize("kind", [RuntimeError, CollectiveTimeoutError])  # the latter is an OSError, too
def test_a_tensor_that_one_rank_cannot_give_is_an_error_on_every_rank(kind: type[Exception], tmp_path: Path):
    lost = patch.object(layout, "pieces_of", side_effect=kind("it is lost"))
    says = rf"state could not be written: rank 1: {kind.__name__}: it is lost"
    with lost if get_rank() == 1 else nullcontext(), pytest.raises(DistError, match=says):
        save_state(tmp_path / "state", {"model": {"w": torch.ones(2)}}, {})
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_a_tensor_that_is_not_reduced_yet_is_refused_by_name(tmp_path: Path):
    part = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(
        ConfigError, match=r"`model.w` must be reduced over ranks .* are \(Partial\(sum\),\)\. Save its"
    ):
        save_state(tmp_path / "state", {"model": {"v": torch.ones(1), "w": part}}, {})


def test_a_tensor_of_another_kind_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"`model.w` must be a dense tensor of a usual dtype to be saved, but is"):
        save_state(tmp_path / "state", {"model": {"w": torch.eye(2).to_sparse()}}, {})
    with pytest.raises(ConfigError, match=r"two are called a.b.c"):
        save_state(tmp_path / "state", {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_made_of_others_is_refused_by_name(tmp_path: Path):
    kinds = pytest.importorskip("torchao.optim.subclass_8bit")  # an extra
    quantized = kinds.OptimState8bit.zeros((64, 64), True, 256)
    says = r"`optimizer.state.w.exp_avg` must be a plain tensor .* is a torchao.*OptimState8bit, .*save_optimizer=False"
    with pytest.raises(ConfigError, match=says):
        save_state(tmp_path / "state", {"optimizer": {"state": {"w": {"exp_avg": quantized}}}}, {})
    assert list(tmp_path.iterdir()) == []


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (6, 4, 32), dtype=torch.uint8, generator=generator)
    found = {name: raw.clone().view(getattr(torch, name)) for name in ITEM_SIZES if name != "bool"}
    found |= {"bool": raw > 100, "scalar": torch.tensor(3), "empty": torch.zeros(0, 3), "nothing": torch.zeros(3, 0)}
    found |= {"turned": torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1), "every second": torch.arange(9)[::2]}
    found |= {"expanded": torch.ones(1).expand(7), "conj": torch.tensor([1 + 2j, 3 - 4j]).conj()}
    found |= {"two blocks": torch.arange(BLOCK // 4 + 5), "long": torch.arange(BLOCK // 4 * 3).view(3, -1).t()}
    return found


@ranks(1, 2)
def test_tensors_of_every_kind_come_back_bit_by_bit(tmp_path: Path):
    saved = tensors()
    save_state(tmp_path / "state", {"model": saved}, {})
    places = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in saved.items()}
    places["turned"] = torch.empty(4, 5, 3).permute(1, 2, 0)  # not contiguous either
    read = load_state(tmp_path / "state", {"model": places})["model"]
    for name, value in saved.items():
        assert read[name] is places[name]
        same = [x.contiguous().resolve_conj().reshape(-1).view(torch.uint8) for x in (value, read[name])]
        assert torch.equal(*same), name
    assert read_shapes(tmp_path / "state", "model") == {name: tuple(value.shape) for name, value in saved.items()}
    verify(tmp_path / "state")


def test_a_file_is_one_of_safetensors(tmp_path: Path):
    saved = tensors()
    save_state(tmp_path / "state", {"model": saved}, {})
    data = (tmp_path / "state" / "rank_0.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        begin, until = entry["data_offsets"]
        assert begin == end  # no gaps
        assert begin % sizes.get(entry["dtype"], 1) == 0
        assert until - begin == math.prod(entry["shape"]) * sizes.get(entry["dtype"], 1)
        end = until
    assert 8 + length + end == len(data)
    begin, until = header["model.float32"]["data_offsets"]
    values = torch.frombuffer(bytearray(data[8 + length + begin : 8 + length + until]), dtype=torch.float32)
    assert torch.equal(values.view(torch.uint8), saved["float32"].reshape(-1).view(torch.uint8))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.data())
def test_a_part_of_a_chunk_is_read_from_its_blocks(rows: int, columns: int, data: st.DataObject):
    import tempfile
    from unittest.mock import patch

    from lockstep.checkpoint import loading, saving

    value = torch.arange(rows * columns * 2).view(rows, columns, 2)
    box = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(sum)) for n in value.shape]
    offsets = tuple(begin for begin, _ in box)
    lengths = [min(length, n - begin) for (begin, length), n in zip(box, value.shape, strict=True)]
    with tempfile.TemporaryDirectory() as folder, patch.object(saving, "BLOCK", 24):
        save_state(Path(folder) / "state", {"x": value}, {})
        stored = loading.open_checkpoint(Path(folder) / "state")
        target = torch.zeros(lengths, dtype=torch.int64)
        (read,) = loading._reads_of(stored, "x", offsets, target)
        stored.read(read)
        stored.close()
    wanted = value[tuple(slice(begin, begin + n) for begin, n in zip(offsets, lengths, strict=True))]
    assert torch.equal(target, wanted)


@ranks(1, 2)
def test_each_rank_gets_back_what_is_its_own(tmp_path: Path):
    own = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    own["rank"] = get_rank()
    save_state(tmp_path / "state", {"w": torch.ones(1), "ranks": {str(get_rank()): own}}, {"note": (1, math.inf)})
    read = load_state(tmp_path / "state", {"ranks": {str(get_rank()): None}})["ranks"][str(get_rank())]
    random.setstate(read["python"])
    numpy.random.set_state(read["numpy"])
    torch.set_rng_state(read["torch"])
    assert read["rank"] == get_rank()
    assert read["python"] == own["python"]
    assert numpy.array_equal(read["numpy"][1], own["numpy"][1])
    assert read_meta(tmp_path / "state") == {"note": (1, math.inf)}


@ranks(2)
def test_what_each_rank_gives_under_its_number_is_kept(tmp_path: Path):
    """As a hook may: numbers are no keys of JSON; rank 0 has nothing at all under `late`."""
    rank = get_rank()
    mine = {"seen": {rank: torch.ones(1) * rank, "both": rank}, "late": {1: "b"} if rank else {}}
    save_state(tmp_path / "state", {"mine": mine}, {})
    read = load_state(tmp_path / "state", {"mine": None})["mine"]
    assert read == {"seen": {0: torch.zeros(1), 1: torch.ones(1), "both": 0}, "late": {1: "b"}}


@ranks(1, 2)
def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path):
    """As where the disk of the work_dir is no longer there: the checkpoint would land on another one, alone."""
    run, planner = tmp_path / "run", Planner([tmp_path / "run"])
    state = {"model": {"weight": torch.ones(3)}}
    with pytest.raises(OSError, match=r"could not be written: .*has been moved or removed since the run began"):
        save_state(run / "iter_1", state, {}, None, planner)
    save_state(tmp_path / "elsewhere" / "iter_1", state, {}, None, planner)
    assert not run.exists()
