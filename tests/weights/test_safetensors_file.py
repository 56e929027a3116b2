"""Files of weights: safetensors and torch.save's, whole, cut, hostile, and no files of weights at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.location import locate
from lockstep.weights import load_checkpoint, open_source
from lockstep.weights.safetensors_file import SafetensorsFile, SafetensorsWriter, TensorInfo, plan_shards, read_size

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip
MMENGINE = Path(__file__).with_name("mmengine_0_10_7.pth")  # by its own Runner: two epochs, with EMAHook


def write(path: Path | str, tensors: dict[str, Tensor], **options: Any) -> None:
    """Write tensors as an exporter does."""
    infos = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    shards = plan_shards(infos, "model", options.pop("most", 1 << 40))
    writer = SafetensorsWriter(locate(str(path)), shards, infos, {}, **options)
    for name in (name for names in shards.values() for name in names):
        writer.write(tensors[name])
    writer.finish()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


class KilledError(BaseException):
    pass


def test_a_process_that_is_killed_while_it_overwrites_leaves_no_index_of_former_and_new_parts(tmp_path: Path) -> None:
    def index() -> Path:
        return tmp_path / "out" / "model.safetensors.index.json"

    (tmp_path / "out").mkdir()
    write(tmp_path / "out", {"a": torch.zeros(4), "b": torch.zeros(4)}, most=16)
    assert index().exists()
    whole, replace = [*tmp_path.joinpath("out").iterdir()], Path.replace

    def cut(path: Path, target: Path) -> Path:
        if "00002" in target.name:
            raise KilledError
        return replace(path, target)

    with patch.object(Path, "replace", cut), pytest.raises(KilledError):
        write(tmp_path / "out", {"a": torch.ones(4), "b": torch.ones(4)}, most=16)
    assert not index().exists()
    write(tmp_path / "out", {"a": torch.ones(4), "b": torch.ones(4)}, most=16)
    assert sorted(tmp_path.joinpath("out").iterdir()) == sorted(whole)
    assert torch.equal(open_source(tmp_path / "out").read("b"), torch.ones(4))


def test_behind_a_url_neither() -> None:
    out = locate("memory://overwritten")
    write(str(out), {"a": torch.zeros(4), "b": torch.zeros(4)}, most=16)
    infos = {name: TensorInfo((4,), torch.float32) for name in "ab"}
    SafetensorsWriter(out, plan_shards(infos, "model", 16), infos, {}).write(torch.ones(4))  # killed after this
    assert sorted(file.name for file in out.iterdir()) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 200),
)
def test_what_is_written_is_read_in_whole_and_in_rows(kinds: list[tuple[torch.dtype, list[int]]], most: int) -> None:
    tensors = {f"w{n}": torch.randint(0, 2, shape).to(dtype) for n, (dtype, shape) in enumerate(kinds)}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        write(path, tensors, most=most)
        source = open_source(path)
        assert {name: source.read(name).shape for name in source.tensors} == {n: t.shape for n, t in tensors.items()}
        for name, tensor in tensors.items():
            assert same(source.read(name), tensor)
            if tensor.dim():
                assert same(source.read(name, slice(1, 3)), tensor[1:3])
        assert sorted(os.listdir(folder)) == ["out"]


def test_what_is_not_contiguous_is_written_as_it_looks(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    write(tmp_path / "one.safetensors", {"w": tensor}, single=True)
    assert same(SafetensorsFile(tmp_path / "one.safetensors").read("w"), tensor.contiguous())


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_a_view_that_computes_its_values_is_written_as_it_looks(kind: str, tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    if kind == "negative":
        tensor = tensor.imag
    assert tensor.is_contiguous()
    write(tmp_path / "one.safetensors", {"w": tensor}, single=True)
    assert SafetensorsFile(tmp_path / "one.safetensors").read("w").tolist() == tensor.tolist()


def header(entries: dict[str, Any]) -> bytes:
    content = json.dumps(entries).encode()
    return len(content).to_bytes(8, "little") + content


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it has only 0 bytes"),
        (b"12345678", "its header would have 4050765991979987505 bytes"),
        (header({"w": ENTRY}) + b"1234", r"it must have 8 bytes after its header, but has 4"),
        (header({"w": ENTRY})[:-3], r"its header would have \d+ bytes"),
        ((8).to_bytes(8, "little") + b"notjson!", "its header is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not a dict"),
        (header({"w": {**ENTRY, "data_offsets": [4, 8]}}) + b"12345678", "`w` has 4 bytes for 8"),
        (header({"w": {**ENTRY, "data_offsets": [-8, 0]}}) + b"12345678", "its header says of `w`"),
        (header({"w": {**ENTRY, "shape": ["2"]}}) + b"12345678", "its header says of `w`"),
        (header({"w": {**ENTRY, "shape": [True]}}) + b"1234", "its header says of `w`"),
        (header({"w": [1]}) + b"1234", "its header says of `w`"),
        (header({"w": {**ENTRY, "dtype": "F4"}}) + b"12345678", "must have a dtype of torch's, but has 'F4'"),
        (header({"w": {**ENTRY, "dtype": ["F32"]}}) + b"12345678", r"must have a dtype of torch's, but has \['F32'\]"),
        (header({"w": {**ENTRY, "shape": [1 << 62, 1 << 62, 0]}}) + b"12345678", "its header says of `w`"),
        (header({"w": ENTRY, "v": ENTRY}) + b"12345678", "`w` overlaps another tensor"),
        (
            header({"w": ENTRY, "v": {**ENTRY, "data_offsets": [4, 12]}}) + b"123456789012",
            "`v` overlaps another tensor",
        ),
        (
            header({"w": {**ENTRY, "data_offsets": [4, 12]}}) + b"123456789012",
            "`w` comes after bytes that belong to no",
        ),
        (header({"w": ENTRY}) + b"123456789012", "it must have 8 bytes after its header, but has 12"),
        (header({"w\x1b[2J\nok": [1]}) + b"1234", r"its header says of `w\\x1b\[2J\\nok`"),
        (header({"w": eval("[" * 80 + "]" * 80)}) + b"1234", "its header says of `w`"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.safetensors.*{says}"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "bad.safetensors")


@given(st.binary(max_size=60))
def test_whatever_the_bytes_a_safetensors_file_is_named(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "garbage.safetensors"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"garbage\.safetensors"):
            load_checkpoint(nn.Linear(1, 1), path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).relu())


def test_a_checkpoint_of_mmengine_is_loaded_and_its_objects_are_left_out() -> None:
    net = Net()
    assert "HistoryBuffer" in str(torch.serialization.get_unsafe_globals_in_checkpoint(MMENGINE))
    load_checkpoint(net, MMENGINE, strict=True)
    expected = torch.tensor([[0.4525469243526459, 0.33352312445640564]])
    torch.testing.assert_close(net(torch.ones(1, 4)), expected, rtol=0, atol=1e-6)


class Harm:
    """What runs `touch` where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_text_is_refused_without_torchs_advice_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "notes.pth").write_text("not weights")
    with pytest.raises(ConfigError, match=r"notes\.pth must be a file .* cannot be read: Unsupported operand 110$"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "notes.pth")


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("where", ["beside", "among"])
def test_code_in_a_file_does_not_run(new: bool, where: str, tmp_path: Path) -> None:
    state: dict[str, Any] = nn.Linear(1, 1).state_dict()
    harm = Harm(tmp_path / "harmed")
    content = {"state_dict": state, "hub": harm} if where == "beside" else {"state_dict": {**state, "hub": harm}}
    torch.save(content, tmp_path / "harm.pth", _use_new_zipfile_serialization=new)
    with pytest.raises(ConfigError, match=r"harm\.pth must be a file that torch\.save has written, but cannot be read"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "harm.pth")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "it is an empty dict"),
        (nn.Linear(1, 1), "it is an object of another class, such as a whole model. Save its state_dict"),
        ({"state_dict": {}, "epoch": 3}, "its 'state_dict' is an empty dict"),
        ({"model": {"a": torch.ones(2), "b": 3}}, "its 'model' holds what is no named tensor: 'b'"),
        ({"epoch": 3, "net": nn.Linear(1, 1).state_dict()}, "it holds what is no named tensor: 'epoch', 'net'"),
        ([torch.ones(2)], "it is a list"),
        (torch.ones(2), "it is a Tensor"),
        ({n: n for n in range(9)}, r"it holds what is no named tensor: 0, 1, 2, 3, 4, 5 and 3 more"),
    ],
)
def test_a_file_without_weights_says_what_it_holds(content: Any, says: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "none.pth")
    with pytest.raises(ConfigError, match=rf"none\.pth must hold weights, as a dict of tensors, .*, but {says}"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "none.pth")


def test_of_two_dicts_the_one_with_weights_is_taken(tmp_path: Path) -> None:
    state, other = nn.Linear(1, 1).state_dict(), nn.Linear(1, 1)
    torch.save({"state_dict": {}, "model": state}, tmp_path / "two.pth")
    load_checkpoint(other, tmp_path / "two.pth")
    assert torch.equal(other.weight, state["weight"])


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(1, 1).to_sparse(), "has the layout torch.sparse_coo"),
        (torch.ones(1, 1, device="meta"), "is on the meta"),
    ],
)
def test_a_tensor_that_cannot_be_copied_is_named(tensor: Tensor, says: str, tmp_path: Path) -> None:
    torch.save({"weight": tensor, "bias": torch.ones(1)}, tmp_path / "net.pth")
    with pytest.raises(ConfigError, match=rf"`weight` in .*net\.pth must be a dense tensor with values, but {says}"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "net.pth")


def sharded(folder: Path, **places: str) -> None:
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/passwd", "s3://bucket/x.safetensors", "..\\x.safetensors"]
)
def test_an_index_cannot_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"weight": torch.ones(1, 1)}, single=True)
    sharded(tmp_path / "folder", weight=name)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json must name files of its folder, but names"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "folder")


def test_a_file_that_an_index_names_and_that_is_gone_is_named(tmp_path: Path) -> None:
    sharded(tmp_path / "folder", weight="model-1.safetensors")
    with pytest.raises(ConfigError, match=r"folder/model-1\.safetensors must be a file of weights, but is not there"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "folder")
    write(tmp_path / "folder" / "model-1.safetensors", {"bias": torch.ones(1)}, single=True)
    with pytest.raises(ConfigError, match=r"model-1\.safetensors must hold `weight`, as model\.safetensors\.index"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / "folder")
    for content in ("{", "[]", '{"weight_map": [1]}', '{"weight_map": {"w": 1}}', "{}"):
        (tmp_path / "folder" / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ConfigError, match=r"index\.json must be JSON with a `weight_map`, but cannot be read"):
            load_checkpoint(nn.Linear(1, 1), tmp_path / "folder")


def test_a_folder_with_an_adapter_alone_says_how_to_load_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has an adapter alone. Load it with peft\.PeftModel\.from_pretrained"):
        load_checkpoint(nn.Linear(1, 1), tmp_path)


@pytest.mark.parametrize("size", ["0", "-1GB", "five", "5XB", "", "GB"])
def test_a_size_must_be_one(size: str) -> None:
    with pytest.raises(ConfigError, match=r"`max_shard_size` must be a size as 5GB, 500MB or 2GiB, but is"):
        read_size(size)
