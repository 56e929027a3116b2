"""What a user writes for data sets of other packages, as docs/data-packages.md shows it, and what goes wrong otherwise.

Each recipe takes the folder with the data, and the number of workers; it returns what a Runner or a Session is given.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lockstep.dist import get_rank, get_world_size

SAMPLES = 24
# Parts of Mosaic's package that need torchvision, of which PyPI has no build for a torch of the CPU.
for _part in ("text", "vision", "multimodal"):
    sys.modules.setdefault(f"streaming.{_part}", ModuleType(f"streaming.{_part}"))

import datasets  # noqa: E402
import litdata  # noqa: E402
import streaming  # noqa: E402
import torchdata.nodes  # noqa: E402
import webdataset as wds  # noqa: E402
from datasets.distributed import split_dataset_by_node  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402


def write_data(folder: Path) -> None:
    """Write the numbers from 0 to 23 in the form of each package, in six files of four."""
    for part in range(6):
        numbers = range(4 * part, 4 * part + 4)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))
        with tarfile.open(folder / f"{part}.tar", "w") as file:
            for number in numbers:
                entry = tarfile.TarInfo(f"{number:04d}.json")
                content = json.dumps({"n": number}).encode()
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    with streaming.MDSWriter(out=str(folder / "mds"), columns={"n": "int"}, size_limit=80) as writer:
        for number in range(SAMPLES):
            writer.write({"n": number})
    litdata.optimize(
        fn=_row, inputs=list(range(SAMPLES)), output_dir=str(folder / "lit"), chunk_size=4, num_workers=1,
        start_method="fork",
    )  # fmt: skip


def _row(number: int) -> dict[str, int]:
    return {"n": number}


class Numbers(IterableDataset[dict[str, int]]):
    """A stream of a user's own."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return map(_row, range(SAMPLES))


def tars(folder: Path, count: int = 6) -> list[str]:
    return [str(folder / f"{part}.tar") for part in range(count)]


def json_of(sample: dict[str, Any]) -> Any:
    return json.loads(sample["json"])


def rows(folder: Path) -> Any:
    files = [str(folder / f"{part}.jsonl") for part in range(6)]
    return datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "cache"))


def stream(folder: Path, shards: int = 6) -> Any:
    return rows(folder).to_iterable_dataset(num_shards=shards)


def map_style(folder: Path, workers: int) -> Any:
    data = rows(folder)
    # [start:map-style]
    loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
    # [end:map-style]
    return loader


def over_ranks(folder: Path, workers: int, shards: int = 6) -> Any:
    data = stream(folder, shards)
    # [start:huggingface]
    loader = dict(dataset=data, batch_size=2, num_workers=workers, split="ranks")
    # [end:huggingface]
    return loader


def by_node(folder: Path, workers: int, shards: int = 6) -> Any:
    data = stream(folder, shards)
    # [start:split_dataset_by_node]
    part = split_dataset_by_node(data, rank=get_rank(), world_size=get_world_size())
    loader = dict(dataset=part, batch_size=2, num_workers=workers, split=False)
    # [end:split_dataset_by_node]
    return loader


def webdataset(folder: Path, workers: int) -> Any:
    files = tars(folder)
    # [start:webdataset]
    data = wds.WebDataset(files, shardshuffle=False, nodesplitter=wds.split_by_node).map(json_of)
    loader = dict(dataset=data, batch_size=2, num_workers=workers, split=False)
    # [end:webdataset]
    return loader


def webdataset_of_few_files(folder: Path, workers: int) -> Any:
    files = tars(folder)
    # [start:few]
    data = wds.WebDataset(files, shardshuffle=False, nodesplitter=None, workersplitter=None, seed=0).map(json_of)
    loader = dict(dataset=data, batch_size=2, num_workers=workers)
    # [end:few]
    return loader


def lit(folder: Path, workers: int) -> Any:
    # [start:litdata]
    data = litdata.StreamingDataset(str(folder / "lit"))
    loader = litdata.StreamingDataLoader(data, batch_size=2, num_workers=workers)
    # [end:litdata]
    return loader


def mosaic(folder: Path, workers: int) -> Any:
    # [start:mosaic]
    data = streaming.StreamingDataset(local=str(folder / "mds"), batch_size=2, shuffle=True)
    loader = streaming.StreamingDataLoader(data, batch_size=2, num_workers=workers)
    # [end:mosaic]
    return loader


def stateful(folder: Path, workers: int) -> Any:
    data = [_row(number) for number in range(SAMPLES)]
    # [start:torchdata]
    loader = StatefulDataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
    # [end:torchdata]
    return loader


def nodes(folder: Path, workers: int) -> Any:
    data = list(range(SAMPLES))
    # [start:nodes]
    part = torchdata.nodes.IterableWrapper(data[get_rank() :: get_world_size()])
    batches = torchdata.nodes.Batcher(part, batch_size=2, drop_last=False)
    loader = torchdata.nodes.Loader(torchdata.nodes.Mapper(batches, collated))
    # [end:nodes]
    return loader


def collated(numbers: list[int]) -> dict[str, Any]:
    from torch import tensor

    return {"n": tensor(numbers)}


RECIPES: dict[str, Callable[[Path, int], Any]] = {
    "HuggingFace `Dataset`": map_style,
    'HuggingFace stream of 6 shards, `split="ranks"`': over_ranks,
    'HuggingFace stream of 1 shard, `split="ranks"`': lambda folder, workers: over_ranks(folder, workers, 1),
    'HuggingFace stream that is shuffled, `split="ranks"`': lambda folder, workers: {
        **over_ranks(folder, workers),
        "dataset": stream(folder).shuffle(seed=0, buffer_size=7),
    },
    "HuggingFace stream of 6 shards, `split_dataset_by_node`": by_node,
    "HuggingFace stream of 1 shard, `split_dataset_by_node`": lambda folder, workers: by_node(folder, workers, 1),
    "webdataset, `split_by_node`": webdataset,
    "webdataset, split by lockstep": webdataset_of_few_files,
    "litdata": lit,
    "Mosaic": mosaic,
    "torchdata `StatefulDataLoader`": stateful,
    "torchdata `nodes`": nodes,
    "a stream of your own": lambda folder, workers: dict(dataset=Numbers(), batch_size=2, num_workers=workers),
}

MISTAKES: dict[str, Callable[[Path, int], Any]] = {
    "`DataLoader` of a HuggingFace stream": lambda folder, workers: DataLoader(
        stream(folder), batch_size=2, num_workers=workers
    ),
    "HuggingFace stream in a config, without `split`": lambda folder, workers: dict(
        dataset=stream(folder), batch_size=2, num_workers=workers
    ),
    "HuggingFace stream in a config, `split=False`": lambda folder, workers: dict(
        dataset=stream(folder), batch_size=2, num_workers=workers, split=False
    ),
    "HuggingFace stream in a config, `split=True`": lambda folder, workers: dict(
        dataset=stream(folder), batch_size=2, num_workers=workers, split=True
    ),
    "`DataLoader` of a webdataset that no node splits": lambda folder, workers: DataLoader(
        wds.WebDataset(tars(folder), shardshuffle=False, nodesplitter=None).map(json_of),
        batch_size=2,
        num_workers=workers,
    ),
    "`WebLoader` of one": lambda folder, workers: wds.WebLoader(
        wds.WebDataset(tars(folder), shardshuffle=False, nodesplitter=None).map(json_of),
        batch_size=2,
        num_workers=workers,
    ),
    "litdata in a config, without `split`": lambda folder, workers: dict(
        dataset=litdata.StreamingDataset(str(folder / "lit")), batch_size=2, num_workers=workers
    ),
    "Mosaic in a config, without `split`": lambda folder, workers: dict(
        dataset=streaming.StreamingDataset(local=str(folder / "mds"), batch_size=2), batch_size=2, num_workers=workers
    ),
    "`StatefulDataLoader` of a stream": lambda folder, workers: StatefulDataLoader(
        Numbers(), batch_size=2, num_workers=workers
    ),
    "`nodes` of all data": lambda folder, workers: torchdata.nodes.Loader(
        torchdata.nodes.Mapper(torchdata.nodes.Batcher(torchdata.nodes.IterableWrapper(range(SAMPLES)), 2), collated)
    ),
    "`DataLoader` of a stream of your own": lambda folder, workers: DataLoader(
        Numbers(), batch_size=2, num_workers=workers
    ),
}
