"""Forged checkpoints, drawn from a grammar, through every way of reading one.

A forged manifest has the digest that it says it has: it is what a stranger would send, not what a disk damages. By
default 100 are drawn, always the same; `FORGED_CHECKPOINTS=1000` draws as many others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import nn
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.errors import CheckpointError, ConfigError
from lockstep.runner import Runner, load_checkpoint

EXAMPLES = int(os.environ.get("FORGED_CHECKPOINTS", "100"))
# Of a checkpoint that is whole, but of another model or another run than the one that resumes.
OF_ANOTHER_RUN = ("does not fit", "must have", "the optimizer", "must update", "must be")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def train(work_dir: Path, epochs: int, **arguments: Any) -> Runner:
    x = torch.ones(4, 3)
    runner = Runner(
        net(),
        work_dir,
        loss=nn.MSELoss(),
        train_dataloader={"dataset": torch.utils.data.TensorDataset(x, x[:, :1]), "batch_size": 2},
        train_cfg={"max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.01}},
        param_scheduler={"type": "LinearLR", "start_factor": 0.1, "by_epoch": True},
        custom_hooks=[{"type": "EMAHook"}],
        default_hooks={"progress": None, "nan_check": None},  # whose weights a stranger chooses may train to nothing
        visualizer=[],
        **arguments,
    )
    runner.train()
    return runner


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a work_dir with two checkpoints, as a run leaves them."""
    work_dir = tmp_path_factory.mktemp("template") / "work"
    run_dir = train(work_dir, 2).run_dir
    for path in run_dir.iterdir():
        if path.is_file():
            path.unlink()
    return work_dir


nested: Any = 1
for _ in range(800):
    nested = [nested]

VALUES = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 3, 2**63, 10**40, 0.5, -0.0, 1e300, -1e300, float("nan"), float("inf"), "", "x"),
        *(".", "..", "../../victim", "{sandbox}/victim", "a\nFORGED: all is whole", "\x1b[2J\x1b[31mFORGED", "\x00"),
        *(
            "\ud800",
            "float32",
            "rank_0.safetensors",
            "x" * 5000,
            [],
            {},
            [[]],
            ["F32"],
            [0, 0],
            [2**62, 2**62],
            [1, "a"],
        ),
        *(nested, {"x": nested}, {"$tensor": "nope"}, {"$tensor": "model.0.weight"}, {"$tensor": 1}, {"$what": 1}),
        *({"$tensor": ["model.0.weight"]}, {"$array": "ema.0.weight"}, {"$tuple": [1, 2]}, {"$tuple": 3}, {"": ""}),
        *({"$dict": [[[1], 2]]}, {"$dict": [[1, 2]]}, {"$dict": [1]}, {"$float": "nan"}, {"$float": 3}, "00000000"),
        *({"$dtype": "float32"}, {"$dtype": "nn"}, {"$item": "x"}),
    ]
)
KEYS = st.sampled_from(
    ["", "x", "..", "../../victim", "{sandbox}/victim", "a\nFORGED", "\x1b[2J", "$tensor", "params", "manifest.json"]
)
FILES = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from(["", "0.", "nope.", 3]),
        "stem": st.sampled_from(["model", "../../victim", "{sandbox}/victim", "a/b", "", "..", "x" * 300]),
        "files": st.dictionaries(
            st.sampled_from(
                ["config.json", "../../victim", "{sandbox}/victim", "a/b.json", "x.py", "model.safetensors"]
            ),
            st.sampled_from([{}, {"a": 1}, "text", None, {"dtype": None}]),
            max_size=2,
        ),
        "names": st.sampled_from([None, {}, {"0.weight": "w"}, {"0.weight": "w", "0.bias": "w"}, {"0.weight": 3}, 1]),
    }
)
CHANGES = st.one_of(
    *[st.tuples(st.just("set"), st.integers(0, 10**6), VALUES)] * 4,
    *[st.tuples(st.just("cut"), st.integers(0, 10**6))] * 2,
    st.tuples(st.just("name"), st.integers(0, 10**6), KEYS),
    *[st.tuples(st.just("swap"), st.integers(0, 10**6), st.integers(0, 10**6))] * 2,
    st.tuples(st.just("describe"), FILES),
    st.tuples(st.just("time"), st.sampled_from([float("nan"), float("inf"), 1e300, -1e300, 1e12, "x", None, 2e9])),
    st.tuples(st.just("bytes"), st.integers(0, 10**6), st.binary(min_size=4, max_size=4)),
)
LAST = st.sampled_from(
    [b"", b"x", b"\x00\n", b"a\x00b\n", b"x" * 5000 + b"\n", b"x/" * 4000 + b"\n", b"../../victim\n", b"/etc/passwd\n",
     b"\xff\xfe\n", b"\x1b[2J\n", b".\n", b"..\n", b"a\nFORGED: all is whole\n"]
)  # fmt: skip
MANIFESTS = st.sampled_from([b"", b"[" * 100_000, b"{}", b"null", b"[]", b'{"format": 3}', b'{"format": []}', b"\xff"])
FORGERIES = st.one_of(
    *[st.tuples(st.just("manifest"), st.lists(CHANGES, min_size=1, max_size=3))] * 8,
    st.tuples(st.just("pointer"), LAST),
    st.tuples(st.just("text"), MANIFESTS),
    st.tuples(st.just("sparse"), st.sampled_from(["manifest.json", "rank_0.safetensors"])),
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each dict or list within JSON, and each key or index in it."""
    waiting = [node]
    while waiting:
        holder = waiting.pop()
        for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield holder, key
            if isinstance(item, dict | list):
                waiting.append(item)


def placed(text: Any, sandbox: Path) -> Any:
    return json.loads(json.dumps(text).replace("{sandbox}", str(sandbox)))


def change(content: dict[str, Any], directory: Path, sandbox: Path, words: tuple[Any, ...]) -> None:
    what, *rest = words
    if what == "describe":
        content["meta"] = {**content["meta"], "weights": {"pretrained": [placed(rest[0], sandbox)]}}
    elif what == "time":
        content["written"] = {**content["written"], "time": rest[0]}
    elif what == "bytes":
        path = directory / "rank_0.safetensors"
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        *spans, (end, _) = sorted(one["data_offsets"] for name, one in header.items() if name != "__metadata__")
        number = rest[0] % len(spans)
        first, last = (begin + place for place in spans[number])
        data[first : first + len(rest[1])] = rest[1]
        checksum = begin + end + 4 * number  # each of these tensors is one block
        data[checksum : checksum + 4] = zlib.crc32(data[first:last]).to_bytes(4, "little")
        path.write_bytes(data)
        content["files"][path.name]["blocks_crc32"] = zlib.crc32(data[begin + end :])
    else:
        all_places = list(places(content))
        holder, key = all_places[rest[0] % len(all_places)]
        if what == "set":
            holder[key] = placed(rest[1], sandbox)
        elif what == "cut":
            del holder[key]
        elif what == "name" and isinstance(holder, dict):
            holder[placed(rest[1], sandbox)] = holder.pop(key)
        elif what == "swap":
            other, its = all_places[rest[1] % len(all_places)]
            holder[key], other[its] = json.loads(json.dumps([other[its], holder[key]]))


def forge(directory: Path, sandbox: Path, forgery: tuple[str, Any]) -> None:
    what, how = forgery
    manifest = directory / "manifest.json"
    if what == "pointer":
        digest = b"sha256 " + hashlib.sha256(how[:-1]).hexdigest().encode() + b"\n" if how.endswith(b"\n") else b""
        (directory.parents[1] / "last_checkpoint").write_bytes(how + digest)
    elif what == "text":
        manifest.write_bytes(how)
    elif what == "sparse":
        os.truncate(directory / how, 200 << 30)
    else:
        content = json.loads(manifest.read_text())
        del content["sha256"]
        for words in how:
            try:
                change(content, directory, sandbox, words)
            except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
                continue  # an earlier change has taken away what this one would change
        body = json.dumps({"format": content.pop("format", 2), **content}).encode().removesuffix(b"}")
        digest = hashlib.sha256(body).hexdigest()
        manifest.write_bytes(body + f',\n  "sha256": "{digest}"\n}}\n'.encode())


def call(*words: object) -> None:
    """Run a command, which may refuse, but neither crash nor let foreign text steer the terminal."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
    assert result.exit_code in (0, 1)
    assert not {"\x1b", "\x00", "\r"} & set(result.output)
    assert not any(line.lstrip("│ ").startswith("FORGED") for line in result.output.splitlines())


def resumed_from(work_dir: Path) -> str:
    """Return the name of the checkpoint that a run resumes from, or why it does not, although one is whole."""
    try:
        resumed = train(work_dir, 3, resume=True).run.resume_from
    except CheckpointError:
        raise  # the older one is whole
    except ConfigError as error:
        return str(error)
    assert resumed is not None
    return resumed.name


@seed(29)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate] if EXAMPLES > 100 else [Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(forgery=FORGERIES)
def test_a_forged_checkpoint_is_refused_by_name(forgery: Any, template: Path, tmp_path: Path):
    sandbox = tmp_path / "sandbox"
    shutil.rmtree(sandbox, ignore_errors=True)
    work_dir = sandbox / "in" / "work"
    shutil.copytree(template, work_dir)
    (sandbox / "victim").write_text("untouched")
    (directory,) = work_dir.glob("*/epoch_2")
    with chdir(sandbox):
        forge(directory, sandbox, forgery)
        call("checkpoints", work_dir)
        call("checkpoints", "list", work_dir, "--verify")
        call("checkpoints", "show", directory)
        for to in ("safetensors", "hf", "torch"):
            call("export", directory, sandbox / "out" / "deep" / to, "--to", to)
        with suppress(ConfigError):
            load_checkpoint(net(), directory)
        outcome = resumed_from(work_dir)
    assert outcome in ("epoch_1", "epoch_2") or any(words in outcome for words in OF_ANOTHER_RUN)
    left = {path.relative_to(sandbox).parts[:2] for path in sandbox.rglob("*") if path.is_file()}
    assert left <= {("victim",), ("in", "work"), ("out", "deep")}
    assert (sandbox / "victim").read_text() == "untouched"
