"""What planning a save and a load costs on many ranks: seconds and bytes of one of them, and of rank 0.

One process stands for all: it holds what one rank holds of a model that is sharded like FSDP does, by a group whose
other ranks are not there, and what the others would send differs from that only in where their shards begin.
`python -m benchmarks.scale.checkpoints` prints a table.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.checkpoint.layout import Holding, Section, decide, digest_of, keys_to_send
from lockstep.checkpoint.loading import Stored, read_plan
from lockstep.checkpoint.manifest import BLOCK, Manifest, StoredFile, dump_manifest, read_manifest

T = TypeVar("T")
KINDS = 20  # tensors of a layer, each of a shape of its own


@dataclass(frozen=True)
class Scale:
    """What was measured; seconds, bytes and counts.

    Attributes:
        ranks: number of ranks.
        tensors: number of tensors, each cut into a part for every rank.
        describe_s: seconds of every rank at each save, before anything is sent.
        plan_s: seconds of rank 0 where a plan is made.
        again_s: seconds of rank 0 where it holds.
        first_bytes: bytes that a rank sends and gets where a plan is made.
        again_bytes: bytes where it holds.
        manifest_bytes: size of the manifest.
        write_s: seconds of rank 0 to write the manifest.
        read_s: seconds of every rank to read and check it.
        load_s: seconds of a rank to plan a load under the same layout.
        load_files: number of files that it then reads.
    """

    ranks: int
    tensors: int
    describe_s: float
    plan_s: float
    again_s: float
    first_bytes: int
    again_bytes: int
    manifest_bytes: int
    write_s: float
    read_s: float
    load_s: float
    load_files: int


def measure(ranks: int, tensors: int) -> Scale:
    """Plan a save and a load for so many ranks and tensors. This process must have no process group."""
    torch_dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        model = {f"layers.{i // KINDS}.weight_{i % KINDS}": _shard(mesh, i % KINDS) for i in range(tensors)}
        holding, describe_s = _timed(lambda: Holding({"model": model}, 1, ranks))
        section = holding.sections["model"]
        sections = [_moved(section, rank) for rank in range(ranks)]
        digests = [{"model": one.digest} for one in sections]
        boxes = [{"model": one.boxes} for one in sections]
        rows = [{"model": section.rows}, *({} for _ in range(ranks - 1))]
        (stored, written), plan_s = _timed(lambda: (keys_to_send(digests), decide(digests, boxes, rows))[1])
        all_digests = [holding.digest] * ranks
        _, again_s = _timed(lambda: digest_of(all_digests))
        offer = len(pickle.dumps((holding.digest, holding.digest, digests[1])))
        bits = len(written[1])
        parts = [tensor.size_in(1) for tensor in stored.values()]
        blocks = sum(-(-part // BLOCK) for part in parts)
        file = StoredFile(sum(parts) + 4 * blocks + 64, 64, 0, blocks, 0)
        files = {f"rank_{rank}.safetensors": file for rank in range(ranks)}
        about = {"time": 1.0, "block": BLOCK}
        manifest = Manifest(about, {}, {"model": section.values}, files, stored)
        content, write_s = _timed(lambda: dump_manifest(manifest))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "manifest.json").write_bytes(content)
            found, read_s = _timed(lambda: read_manifest(Path(folder)))
            named = {f"model.{name}": tensor for name, tensor in model.items()}

            def plan_load() -> set[int]:
                places = {read.file for read in read_plan(Stored(Path(folder), found), named)}
                return {file for file in places if found.layout_of(file)}

            read_from, load_s = _timed(plan_load)
    finally:
        torch_dist.destroy_process_group()
    return Scale(
        ranks, tensors, describe_s, plan_s, again_s, offer + len(pickle.dumps(boxes[1])) + bits, offer,
        len(content), write_s, read_s, load_s, len(read_from),
    )  # fmt: skip


def _shard(mesh: torch_dist.device_mesh.DeviceMesh, kind: int) -> DTensor:
    """Return a tensor of which this rank has some rows, without memory for them."""
    rows = 4 * (1 + kind)
    local = torch.empty(1).expand(rows, 1024)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def _moved(section: Section, rank: int) -> Section:
    """Return what another rank holds."""
    boxes = [box._replace(offsets=(rank * box.lengths[0], *box.offsets[1:])) for box in section.boxes]
    return section._replace(boxes=boxes)


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    found = function()
    return found, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.checkpoints", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 32, 512, 1024])
    parser.add_argument("--tensors", type=int, nargs="+", default=[700, 10_000])
    options = parser.parse_args()
    for tensors in options.tensors:
        for ranks in options.ranks:
            found = measure(ranks, tensors)
            row = [
                f"{key} {value:,.3f}" if key.endswith("_s") else f"{key} {value:,}"
                for key, value in vars(found).items()
            ]
            print(", ".join(row), flush=True)


if __name__ == "__main__":
    main()
