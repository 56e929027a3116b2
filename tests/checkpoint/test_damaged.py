"""Checkpoints that are damaged or do not fit: every rank says which file or entry, and what to do."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lockstep.checkpoint import load_state, read_meta, save_state, verify, verifying
from lockstep.checkpoint.manifest import dump_manifest, read_manifest
from lockstep.checkpoint.verifying import Block, read_block
from lockstep.dist import get_rank, get_world_size, main_process_first
from lockstep.errors import ConfigError
from lockstep.testing import ranks

VALUES = torch.arange(600.0)


def written(path: Path) -> dict[str, Any]:
    """Write a checkpoint of which each rank has a share; return what asks for it."""
    entries = {f"w{rank}": {"exp_avg": VALUES + rank, "step": torch.tensor(3.0)} for rank in range(get_world_size())}
    optimizer = {"state": entries, "param_groups": [{"lr": 0.1, "params": sorted(entries)}]}
    save_state(path, {"model": dict.fromkeys(entries, VALUES), "optimizer": optimizer}, {"n": 1})
    return {"model": {name: torch.zeros_like(VALUES) for name in entries}, "optimizer": {}}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, place: float = 0.5, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link(path: Path) -> None:
    moved = path.rename(path.parent.with_name(f"elsewhere_{path.name}"))
    path.symlink_to(moved)


DAMAGED = "The checkpoint is damaged: copy it again"


@ranks(1, 2)
@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rank_{last}.safetensors", Path.unlink, rf"must have \d+ bytes, but is not there. {DAMAGED}"),
        ("rank_{last}.safetensors", cut, rf"must have \d+ bytes, but has \d+\. {DAMAGED}"),
        ("rank_{last}.safetensors", empty, rf"must have \d+ bytes, but has 0\. {DAMAGED}"),
        ("rank_{last}.safetensors", lengthen, rf"must have \d+ bytes, but has \d+\. {DAMAGED}"),
        ("rank_{last}.safetensors", flip, rf"has wrong bytes between \d+ and \d+: .*checksum.*{DAMAGED}"),
        ("rank_{last}.safetensors", link, "must be a file, but is a link: links are not followed"),
        ("manifest.json", cut, f"must be a manifest of a checkpoint, but cannot be read. {DAMAGED}"),
        ("manifest.json", empty, f"must be a manifest of a checkpoint, but cannot be read. {DAMAGED}"),
        ("manifest.json", flip, DAMAGED),
        ("manifest.json", link, "must be a file, but is a link: links are not followed"),
        ("manifest.json", Path.unlink, "three has none"),
    ],
)
def test_a_damaged_file_is_named_on_every_rank(name: str, damage: Callable[[Path], None], message: str, tmp_path: Path):
    wanted, name = written(tmp_path / "three"), name.format(last=get_world_size() - 1)
    with main_process_first():
        if get_rank() == 0:
            damage(tmp_path / "three" / name)
    with pytest.raises(ConfigError, match=message) as loading:
        load_state(tmp_path / "three", wanted)
    assert name in str(loading.value)
    with pytest.raises(ConfigError, match=message):
        verify(tmp_path / "three")


@pytest.mark.parametrize("name", ["rank_0.safetensors", "manifest.json"])
def test_no_flipped_bit_goes_unnoticed(name: str, tmp_path: Path):
    written(tmp_path / "three")
    path, rng = tmp_path / "three" / name, random.Random(0)
    good = path.read_bytes()
    bits = {rng.randrange(8 * len(good)) for _ in range(200)}
    # The ends: of the header's length, of the header, of the digest of the manifest.
    bits |= {*range(16), *range(8 * len(good) - 8 * 75, 8 * len(good), 7)}
    for bit in bits:
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            verify(tmp_path / "three")
    path.write_bytes(good)
    verify(tmp_path / "three")


@ranks(2)
def test_checksums_of_another_file_are_refused_by_name(tmp_path: Path):
    """The end of a file has the checksums of its blocks, and one itself."""
    wanted = written(tmp_path / "three")
    with main_process_first():
        if get_rank() == 0:
            last, other = (tmp_path / "three" / f"rank_{rank}.safetensors" for rank in (1, 0))
            last.write_bytes(last.read_bytes()[:-4] + other.read_bytes()[-4:])
    with pytest.raises(ConfigError, match=rf"rank_1.safetensors has wrong bytes between \d+ and \d+: .*{DAMAGED}"):
        load_state(tmp_path / "three", wanted)


@ranks(2)
def test_files_of_other_lengths_than_the_tensors_in_them_are_refused_by_name(tmp_path: Path):
    """What is missing in one file may be too much in another one, so that the sum is right."""
    wanted = written(tmp_path / "three")
    with main_process_first():
        if get_rank() == 0:
            manifest = read_manifest(tmp_path / "three")
            headers = zip(manifest.files.items(), (8, -8), strict=True)
            files = {name: replace(file, header=file.header + more) for (name, file), more in headers}
            (tmp_path / "three" / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=files)))
    says = r"manifest.json contradicts itself: rank_\d.safetensors does not have the size of the parts of tensors"
    with pytest.raises(ConfigError, match=says):
        load_state(tmp_path / "three", wanted)
    with pytest.raises(ConfigError, match=says):
        verify(tmp_path / "three")


def test_a_verification_reads_all_bytes_once(tmp_path: Path):
    state = {"model": {name: torch.ones(50_000) for name in "ab"}}
    save_state(tmp_path / "one", state, {})
    manifest = read_manifest(tmp_path / "one")
    read: list[tuple[str, int, int]] = []

    def counted(file: Any, block: Block, into: memoryview) -> None:
        read.append((Path(file.name).name, block.start, block.size))
        read_block(file, block, into)

    with patch.object(verifying, "read_block", counted):
        verify(tmp_path / "one")
    ends = {(name, file.size - 4 * file.blocks, 4 * file.blocks) for name, file in manifest.files.items()}
    others = [one for one in read if one not in ends]  # whoever reads of a file reads its checksums
    assert len(others) == len(set(others)) == sum(1 + file.blocks for file in manifest.files.values())
    assert sum(length for *_, length in {*others, *ends}) == sum(file.size for file in manifest.files.values())


@ranks(2)
def test_a_fault_that_one_rank_reads_is_raised_on_all(tmp_path: Path):
    wanted = written(tmp_path / "three")
    with main_process_first():
        if get_rank() == 0:
            flip(tmp_path / "three" / "rank_1.safetensors", 0.9)
    name = f"w{get_rank()}"
    with pytest.raises(ConfigError, match=r"rank_1.safetensors has wrong bytes"):
        load_state(tmp_path / "three", {"model": {name: wanted["model"][name]}, "optimizer": {}})


@ranks(1, 2)
def test_what_is_not_there_is_named_with_a_remedy(tmp_path: Path):
    wanted = written(tmp_path / "three")
    wanted["model"]["head"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"three does not fit: there is no `model.head` in it.*load what fits of the"):
        load_state(tmp_path / "three", wanted)
    wanted["model"] = {"w0": torch.zeros(2)}
    with pytest.raises(ConfigError, match=r"`model.w0` has the shape \[600\] in it, but is of \[2\] here.*`load_from`"):
        load_state(tmp_path / "three", wanted)


@ranks(1, 2)
def test_the_optimizers_state_is_read_as_it_was_saved(tmp_path: Path):
    entry = {"exp_avg": VALUES, "lists": [[VALUES, None], [VALUES[:0]]], "none": None, "betas": (0.9, 0.1)}
    group = {"lr": torch.tensor(0.1), "params": ["a.b"], "names": []}
    saved = {"state": {"a.b": entry}, "param_groups": [group, {"lr": 0.2, "params": []}]}
    save_state(tmp_path / "four", {"optimizer": saved}, {})
    (read,) = load_state(tmp_path / "four", {"optimizer": {"state": {"x": 1}}}).values()
    found = read["state"]["a.b"]
    assert {name: list(part) for name, part in read.items()} == {"state": ["a.b"], "param_groups": read["param_groups"]}
    assert torch.equal(found["exp_avg"], VALUES)
    assert found["lists"][0][1] is None
    assert torch.equal(found["lists"][0][0], VALUES)
    assert found["lists"][1][0].shape == (0,)
    assert (found["none"], found["betas"]) == (None, (0.9, 0.1))
    assert read["param_groups"] == saved["param_groups"]
    save_state(tmp_path / "five", {"optimizer": {"state": {}, "param_groups": [{"lr": 0.2, "params": ["a"]}]}}, {})
    (read,) = load_state(tmp_path / "five", {"optimizer": {}}).values()
    assert read == {"state": {}, "param_groups": [{"lr": 0.2, "params": ["a"]}]}


@pytest.mark.parametrize("number", [0, 2, 99, "3", None])
def test_an_unknown_format_is_refused(number: Any, tmp_path: Path):
    written(tmp_path / "three")
    path = tmp_path / "three" / "manifest.json"
    shown = {None: "null", "3": '"3"'}.get(number, str(number))
    path.write_text(path.read_text().replace('"format": 3', f'"format": {shown}'))
    with pytest.raises(
        ConfigError, match=rf"manifest.json must have the format 3, but has {number!r}.*update lockstep"
    ):
        read_meta(tmp_path / "three")
