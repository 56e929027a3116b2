"""Checkpoints in a bucket: saved, resumed on a fresh machine, replaced and removed so that one is always there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from lockstep.checkpoint import (
    drafts,
    find_checkpoints,
    find_last_checkpoint,
    load_state,
    read_tensors,
    remove,
    remove_dead_drafts,
    save_state,
    verify,
)
from lockstep.checkpoint.drafts import BucketDraft, drafts_in, is_owned
from lockstep.checkpoint.search import candidates
from lockstep.cli.main import app
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError, Preempted
from lockstep.hooks import Hook
from lockstep.location import RangeFile, locate, require_disk
from lockstep.runner import Runner, start
from lockstep.runner.resume_from import find_resumption
from lockstep.session import Session
from lockstep.testing import ranks
from lockstep.weights import export_checkpoint, load_checkpoint

from ..runs import RESUMABLE, Losses
from .bucket import Bucket, watched
from .test_attacks import pointer_to

# Does the same again and again in new processes, each of which dies before its K-th change of the bucket.
DYING = """
import os, signal, sys
from itertools import count
import torch
from torch.distributed.checkpoint import default_planner
from lockstep.checkpoint import remove, save_state
from lockstep.location import RangeFile, locate, require_disk
from tests.checkpoint.bucket import Bucket

folder, case = sys.argv[1:]

def state(value):
    return {"model": {"w": torch.full((3000,), float(value))}}

def work(root, last):
    changes = 0

    def before(verb, path):
        nonlocal changes
        changes += 1
        if changes > last:
            os.kill(os.getpid(), signal.SIGKILL)

    run = root / "20260101_000000"
    for number in (1, 2):
        save_state(run / f"epoch_{number}", state(number), {"n": number}, last_of=root)
    Bucket.before = staticmethod(before)
    if case == "new":
        save_state(run / "epoch_3", state(3), {"n": 3}, last_of=root)
    elif case == "replaced":
        save_state(run / "epoch_2", state(3), {"n": 3}, last_of=root)
    else:
        remove(run / "epoch_1")

for last in count():
    child = os.fork()
    if child == 0:
        work(locate(f"bucket://{folder}/{last}"), last)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        print(last)
        sys.exit(status)
"""


def at(path: Path) -> Any:
    return locate(f"bucket://{path}")


def names(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}


def values(directory: Any) -> set[float]:
    return set(load_state(directory, {"model": {"w": torch.zeros(3000)}})["model"]["w"].tolist())


@pytest.mark.parametrize(("case", "least"), [("new", 9), ("replaced", 10), ("removed", 4)])
def test_a_kill_before_any_change_leaves_a_checkpoint(case: str, least: int, tmp_path: Path):
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", DYING, str(tmp_path), case]
    done = subprocess.run(words, env=os.environ, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number = int(done.stdout)
    assert number >= least
    outcomes = set()
    for after in range(number):
        root = at(tmp_path / str(after))
        run = root / "20260101_000000"
        found = list(candidates(root))
        assert [fault for _, fault in found if fault] == [], after
        directory = found[0][0]
        verify(directory)
        assert len(values(directory)) == 1, after
        outcomes |= values(directory)
        drafts = list(drafts_in(root))
        assert remove_dead_drafts([root]) == drafts
        assert list(drafts_in(root)) == []
        # Nothing is left that no manifest names.
        complete = {one.name for one in find_checkpoints([root])}
        wanted = {f"20260101_000000/{one}/{file}" for one in complete for file in ("manifest.json", "rank_0")}
        present = {name.replace(".2.safetensors", "").replace(".safetensors", "") for name in names(Path(root.path))}
        assert present == wanted | {"last_checkpoint"}, after
        save_state(run / "epoch_2", {"model": {"w": torch.full((3000,), 4.0)}}, {}, last_of=root)
        assert values(run / "epoch_2") == {4.0}
        assert len(list((run / "epoch_2").iterdir())) == 2
    assert outcomes == ({2.0, 3.0} if case == "replaced" else {2.0})  # a new one counts when the pointer is written


def data() -> tuple[TensorDataset, nn.Module]:
    torch.manual_seed(0)
    x = torch.randn(16, 3)
    return TensorDataset(x, x.sum(1, keepdim=True)), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def train(work_dir: Path, epochs: int, *hooks: Hook, stop_after: int | None = None, **changes: Any) -> Runner:
    dataset, net = data()
    losses = Losses(stop_after)
    arguments = {
        "loss": nn.MSELoss(),
        "train_dataloader": {"dataset": dataset, "batch_size": 2, "sampler": {"shuffle": True}},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.05}},
        "train_cfg": {"max_epochs": epochs},
        "randomness": {"seed": 1},
        **changes,
    }
    runner = Runner(net, work_dir, custom_hooks=[*hooks, losses], **arguments)
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    runner.losses = losses.by_iter
    return runner


def saving(path: Path, **options: Any) -> dict[str, Any]:
    return {"default_hooks": {"checkpoint": {"interval": 1, "out_dir": f"bucket://{path}", **options}}}


def regular(root: Any) -> list[str]:
    all_gather_object(None)  # rank 0 removes
    return [one.name for one in reversed(find_checkpoints([root]))]


@ranks(1, 2)
@pytest.mark.parametrize(("strategy", "async_save"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_a_run_goes_on_on_a_fresh_machine(strategy: str, async_save: bool, tmp_path: Path):
    strategy = strategy if get_world_size() > 1 else "single"
    options = {**saving(tmp_path / "runs", max_keep_ckpts=2, async_save=async_save), "strategy": strategy}
    whole = train(tmp_path / "whole" / "net", 5, strategy=strategy).losses
    per_epoch = 8 // get_world_size()
    first = train(tmp_path / "one" / "net", 5, stop_after=3 * per_epoch + 1, **options)
    root = at(tmp_path / "runs" / "net")
    # The end came before an asynchronous save of the third was known to be complete.
    assert regular(root) == [*(["epoch_1"] if async_save else []), "epoch_2", "epoch_3"]
    assert find_last_checkpoint(root).relative_to(root).parts == (first.run_dir.name, "epoch_3")
    assert list(drafts_in(root)) == []
    files = {one.name for one in find_last_checkpoint(root).iterdir()}
    shared = strategy == "ddp"  # rank 0 may write all
    assert files - ({"rank_1.safetensors"} if shared else set()) == (
        {"manifest.json", "rank_0.safetensors"} | ({"rank_1.safetensors"} if strategy == "fsdp" else set())
    )
    assert not list(first.run_dir.glob("**/manifest.json"))
    second = train(tmp_path / "two" / "net", 5, resume=True, **options)
    assert min(second.losses) == 3 * per_epoch
    assert second.losses == pytest.approx({i: whole[i] for i in second.losses}, rel=1e-6)
    assert regular(root) == ["epoch_4", "epoch_5"]
    assert {path.parts[-3] for path in Path(root.path).glob("*/*/manifest.json")} == {second.run_dir.name}
    # By name: the checkpoint, the folder of a run, the folder of runs.
    for place in (root, root / second.run_dir.name, find_last_checkpoint(root)):
        third = train(tmp_path / "three" / "net", 6, resume=True, load_from=str(place), strategy=strategy)
        assert min(third.losses) == 5 * per_epoch


def saved(root: Any, *numbers: int) -> None:
    for number in numbers:
        state = {"model": {"w": torch.full((3000,), float(number))}}
        save_state(root / "run" / f"epoch_{number}", state, RESUMABLE, last_of=root)


@pytest.mark.parametrize("on_disk", [1, 9])
def test_the_newest_of_two_pointers_counts(on_disk: int, tmp_path: Path):
    disk, bucket = tmp_path / "net", at(tmp_path / "runs" / "net")
    for number in sorted([on_disk, 2, 3]):
        saved(disk if number == on_disk else bucket, number)
    order = [int(path.name[6:]) for path, _ in candidates(disk, [bucket])]
    assert order == ([3, 1, 2] if on_disk == 1 else [9, 3, 2])
    found, _ = find_resumption(None, [disk, bucket])
    assert found is not None
    assert found.directory == (disk if on_disk == 9 else bucket) / "run" / f"epoch_{order[0]}"


@ranks(2)
def test_damage_is_named_and_passed_over(tmp_path: Path):
    options = saving(tmp_path / "runs")
    first = train(tmp_path / "one" / "net", 3, **options)
    root = at(tmp_path / "runs" / "net")
    if get_rank() == 0:
        for number, name in ((3, "rank_0.safetensors"), (2, "manifest.json")):
            file = Path(root.path) / first.run_dir.name / f"epoch_{number}" / name
            content = bytearray(file.read_bytes())
            content[-1 if number == 3 else len(content) // 2] ^= 1
            file.write_bytes(content)
    all_gather_object(None)
    second = train(tmp_path / "two" / "net", 4, resume=True, **options)
    assert second.run.resume_from == root / first.run_dir.name / "epoch_1"
    log = next((tmp_path / "two" / "net").glob("*/log*.txt")).read_text()
    assert "epoch_3/rank_0.safetensors has wrong bytes between" in log
    assert "epoch_2/manifest.json" in log


@ranks(2)
def test_the_best_and_what_hooks_save_go_there_too(tmp_path: Path):
    class Asking(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if runner.iter == 1:
                path = runner.save_checkpoint(runner.checkpoint_dir, "mine")
                again = runner.save_checkpoint(f"bucket://{tmp_path}/elsewhere", is_last=False)
                assert (path.name, again.name) == ("mine", "elsewhere")

    dataset, _ = data()
    validation = {"val_dataloader": {"dataset": dataset, "batch_size": 4}, "val_cfg": {}}
    options = saving(tmp_path / "runs", save_best="loss", rule="less", max_keep_ckpts=1)
    runner = train(tmp_path / "net", 3, Asking(), **options, **validation)
    root = at(tmp_path / "runs" / "net")
    assert {name.rpartition("_")[0] for name in regular(root)} == {"", "epoch", "best_loss_epoch"}
    assert sum(name.startswith("best") for name in regular(root)) == 1
    assert str(runner.message_hub.get_info("best_ckpt")).startswith(f"bucket://{tmp_path}/runs/net/")
    verify(at(tmp_path / "elsewhere"))


def test_a_run_that_a_signal_stops_is_saved_there(tmp_path: Path):
    class Signal(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if runner.iter == 2 and runner.resume_from is None:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)  # until the ranks have agreed, also on a busy machine

    with pytest.raises(Preempted):
        train(tmp_path / "one" / "net", 2, Signal(), **saving(tmp_path / "runs"))
    assert min(train(tmp_path / "two" / "net", 2, Signal(), resume=True, **saving(tmp_path / "runs")).losses) in (3, 4)


def test_a_session_saves_there(tmp_path: Path):
    dataset, net = data()
    session = Session(tmp_path / "net", **saving(tmp_path / "runs"))
    session.prepare(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(dataset))
    session.save("begin")
    assert [one.name for one in find_checkpoints([at(tmp_path / "runs" / "net")])] == ["begin"]


@ranks(2)
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_a_connection_that_breaks_in_a_save_is_said_on_every_rank(choice: str, async_save: bool, tmp_path: Path):
    def before(verb: str, path: str) -> None:
        if verb == "put" and path.endswith("epoch_2/rank_1.safetensors"):
            raise ConnectionError("it broke")

    options = {**saving(tmp_path / "runs", on_save_error=choice, async_save=async_save), "strategy": "fsdp"}
    root = at(tmp_path / "runs" / "net")
    says = r"epoch_2 could not be written: rank 1: bucket://.*/rank_1.safetensors cannot be reached: Conn.*it broke"
    with watched(before), pytest.raises(OSError, match=says) if choice == "raise" else nullcontext():
        train(tmp_path / "net", 3, **options)
    assert regular(root) == (["epoch_1"] if choice == "raise" else ["epoch_1", "epoch_3"])
    assert not list(Path(root.path).glob("*/epoch_2/*"))
    assert list(drafts_in(root)) == []


@ranks(2)
def test_a_bucket_that_cannot_be_written_to_is_named_before_the_training(tmp_path: Path):
    def before(verb: str, path: str) -> None:
        if get_rank() == 1:
            raise PermissionError("no")

    says = (
        r"`out_dir` of CheckpointHook must be writable, but bucket://.*/runs/net/.written_by_rank_1 cannot be reached: "
        r"PermissionError: no\. Check that the bucket exists, .* \(rank 1 of 2\)"
    )
    with watched(before), pytest.raises(ConfigError, match=says):
        train(tmp_path / "net", 1, **saving(tmp_path / "runs"))
    assert not (tmp_path / "net").exists()
    dataset, net = data()
    validation = {"val_dataloader": {"dataset": dataset, "batch_size": 4}, "val_cfg": {}}
    with watched(before):
        Runner(net, tmp_path / "net", loss=nn.MSELoss(), **saving(tmp_path / "runs"), **validation).val()


def test_a_manifest_that_may_have_arrived_is_not_left_without_its_data(tmp_path: Path):
    def before(verb: str, path: str) -> None:
        if path.endswith("last_checkpoint"):
            raise ConnectionError("it broke")

    root = at(tmp_path)
    with watched(before), pytest.raises(OSError, match="it broke"):
        save_state(root / "run" / "epoch_1", {"w": torch.ones(3)}, {}, last_of=root)
    verify(root / "run" / "epoch_1")
    assert list(drafts_in(root)) == []


def test_a_save_whose_files_are_removed_fails(tmp_path: Path):
    def before(verb: str, path: str) -> None:
        if verb == "put" and path.endswith("rank_0.safetensors"):
            sent.append(path)

    sent: list[str] = []
    root = at(tmp_path)
    publish = BucketDraft.publish

    def late(self: BucketDraft, *arguments: Any) -> None:
        Path(sent[0]).unlink()
        publish(self, *arguments)

    with (
        watched(before),
        patch.object(BucketDraft, "publish", late),
        pytest.raises(OSError, match="is not there: something else has"),
    ):
        save_state(root / "run" / "epoch_1", {"w": torch.ones(3)}, {}, last_of=root)
    assert names(tmp_path) == set()


def test_marks_say_whose_a_save_is(tmp_path: Path):
    run = tmp_path / "run"
    draft = BucketDraft(at(run / "epoch_1"))
    (mark,) = drafts_in(at(tmp_path))
    assert is_owned(mark)
    assert draft.folder == at(run / "epoch_1")
    draft.discard()
    marks = {
        "dead": ".epoch_1.draft.4194303.1.here",
        "young": ".epoch_2.draft.4194303.1.elsewhere",
        "abandoned": ".epoch_3.draft.4194303.1.elsewhere",
        "shared": ".epoch_4.draft.4194303.1.here",
        "sharing": ".epoch_4.draft.4194303.1.elsewhere",
    }
    for number in range(1, 6):
        (run / f"epoch_{number}").mkdir(parents=True)
        (run / f"epoch_{number}" / "rank_0.safetensors").write_bytes(b"x")
        (run / f"epoch_{number}" / "notes.txt").write_bytes(b"x")
    for name in marks.values():
        (run / name).write_bytes(b"")
    for path in (run / marks["abandoned"], run / "epoch_3" / "rank_0.safetensors", run / "epoch_3" / "notes.txt"):
        os.utime(path, (1, 1))
    with patch.object(drafts, "_host", lambda: "here"):
        removed = remove_dead_drafts([at(tmp_path)])
    assert {one.name for one in removed} == {marks["dead"], marks["abandoned"]}
    left = {number for number in range(1, 6) if (run / f"epoch_{number}" / "rank_0.safetensors").exists()}
    assert left == {2, 4, 5}  # nothing marks the fifth
    assert len(list(run.glob("*/notes.txt"))) == 5
    assert {path.name for path in run.glob(".*")} == {marks["young"], marks["shared"], marks["sharing"]}
    # Those of a bucket that is not there.
    assert remove_dead_drafts([at(tmp_path / "nowhere")]) == []


def test_a_damaged_manifest_does_not_lose_the_data(tmp_path: Path):
    run = tmp_path / "run"
    save_state(at(run / "epoch_1"), {"w": torch.ones(3)}, {})
    (run / "epoch_1" / "manifest.json").write_bytes(b"{")
    (run / ".epoch_1.draft.4194303.1.here").write_bytes(b"")
    with patch.object(drafts, "_host", lambda: "here"):
        assert len(remove_dead_drafts([at(tmp_path)])) == 1
    assert (run / "epoch_1" / "rank_0.safetensors").exists()


def test_a_pointer_leads_nowhere_else(tmp_path: Path):
    save_state(at(tmp_path / "a" / "run" / "epoch_1"), {"w": torch.ones(3)}, {}, last_of=at(tmp_path / "a"))
    pointer = tmp_path / "a" / "last_checkpoint"
    for line in ("../b/epoch_1", "/b/epoch_1", "run/../../b"):
        pointer.write_bytes(pointer_to(line))
        with pytest.raises(ConfigError, match="leads out of it"):
            find_last_checkpoint(at(tmp_path / "a"))
    pointer.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is damaged"):
        find_last_checkpoint(at(tmp_path / "a"))
    assert [fault is None for _, fault in candidates(tmp_path / "none", [at(tmp_path / "a")])] == [False, True]


@ranks(2)
def test_a_rank_reads_only_what_it_needs(tmp_path: Path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor, empty

    mesh = init_device_mesh("cpu", (get_world_size(),))
    torch.manual_seed(0)
    large = torch.randn(2, 6_000_000)  # 24 MB to each rank
    small = {f"s{i}": torch.full((100,), float(i)) for i in range(500)}
    sharded = distribute_tensor(large, mesh, [Shard(0)])
    directory = at(tmp_path / "epoch_1")
    save_state(directory, {"model": {"large": sharded, **small}}, {})
    Bucket.ranges.clear()
    target = empty(2, 6_000_000, device_mesh=mesh, placements=[Shard(0)])
    wanted = {"large": target, **{name: torch.zeros(100) for name in small}}
    loaded = load_state(directory, {"model": wanted})["model"]
    assert torch.equal(loaded["large"].to_local(), sharded.to_local())
    assert all(torch.equal(loaded[name], value) for name, value in small.items())
    assert sum(end - start for _, start, end in Bucket.ranges) < 24_000_000 + 10 * 2**20
    assert len(Bucket.ranges) < 12
    assert max(end - start for _, start, end in Bucket.ranges) == 4 * 2**20
    if get_rank() == 0:
        Bucket.ranges.clear()
        ((_, tensor),) = read_tensors(directory, "model", ["s77"])
        assert tensor.tolist() == small["s77"].tolist()
        assert len(Bucket.ranges) == 1


def called(*words: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, words)], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def test_the_commands_take_urls(tmp_path: Path):
    root = at(tmp_path)
    for number in (1, 2, 3):
        model = {"weight": torch.full((300, 40), float(number))}
        meta = {"epoch": number, "iter": 10 * number, "strategy": "FSDPStrategy"}
        save_state(root / "run" / f"epoch_{number}", {"model": model}, meta, last_of=root)
    code, shown = called(root, "--verify")
    assert code == 0
    assert [line.split()[0] for line in shown.splitlines() if "run/" in line] == [f"run/epoch_{n}" for n in (3, 2, 1)]
    assert "run/epoch_3 (last)" in shown
    code, shown = called("show", root / "run" / "epoch_1")
    assert code == 0
    assert "12,000" in shown
    (tmp_path / "run" / ".epoch_4.draft.4194303.1.here").write_bytes(b"")
    (tmp_path / "run" / "epoch_4").mkdir()
    (tmp_path / "run" / "epoch_4" / "rank_0.safetensors").write_bytes(b"four")
    with patch.object(drafts, "_host", lambda: "here"):
        code, shown = called(root)
        assert code == 0
        assert "run/.epoch_4.draft.4194303.1.here was left by an interrupted save" in shown
        code, shown = called("prune", root, "--keep", 1, "--yes")
    assert code == 0
    assert "run/.epoch_4.draft.4194303.1.here  4 bytes" in shown
    assert names(tmp_path) == {"last_checkpoint", "run/epoch_3/manifest.json", "run/epoch_3/rank_0.safetensors"}
    data = tmp_path / "run" / "epoch_3" / "rank_0.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    code, shown = called(root)
    assert code == 1
    assert f"bucket://{data} must have " in shown
    for words, says in [((at(tmp_path / "no"),), "does not exist"), (("nosuch://a",), "that fsspec can open")]:
        result = CliRunner().invoke(app, ["checkpoints", *map(str, words)])
        assert result.exit_code == 1
        assert says in result.output


def test_weights_are_exported_and_loaded_from_there(tmp_path: Path):
    runner = train(tmp_path / "net", 1, **saving(tmp_path / "runs"))
    root = at(tmp_path / "runs" / "net")
    done = export_checkpoint(str(root), tmp_path / "out")
    assert str(done.checkpoint).endswith("/epoch_1")
    for source in (str(root), str(tmp_path / "out")):
        _, net = data()
        load_checkpoint(net, source)
        expected = runner.run.model.state_dict()
        assert all(torch.equal(net.state_dict()[name], expected[name]) for name in expected)


@pytest.mark.parametrize("url", ["s3://bucket/runs", Path("s3://bucket/runs"), "bucket:///x"])
def test_the_work_dir_is_on_a_disk(url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"`work_dir` must be a folder on a disk, but is .*by the `out_dir` of Check"):
        train(url, 1)
    (tmp_path / "config.py").write_text("")
    result = CliRunner().invoke(app, ["train", "config.py", "--work-dir", str(url)])
    assert "`work_dir` must be a folder on a disk" in result.output
    assert names(tmp_path) == {"config.py"}


def test_a_run_never_takes_the_name_of_another_in_the_bucket(tmp_path: Path):
    class Noon:
        @staticmethod
        def now() -> datetime:
            return datetime(2026, 1, 1, 12)

    with patch.object(start, "datetime", Noon):
        for machine in ("one", "two", "three"):
            train(tmp_path / machine / "net", 2, resume=True, **saving(tmp_path / "runs", max_keep_ckpts=1))
    assert names(tmp_path / "runs") == {
        "net/last_checkpoint",
        *(f"net/20260101_120000/epoch_2/{file}" for file in ("manifest.json", "rank_0.safetensors")),
    }
    # The second and the third had nothing to do, and saved nothing; now there is something.
    with patch.object(start, "datetime", Noon):
        train(tmp_path / "four" / "net", 3, resume=True, **saving(tmp_path / "runs", max_keep_ckpts=1))
    assert find_last_checkpoint(at(tmp_path / "runs" / "net")).parent.name == "20260101_120000_1"
    assert len(names(tmp_path / "runs")) == 3


@pytest.mark.parametrize("size", [None, 300])
@pytest.mark.parametrize(("start", "length"), [(90, 20), (200, 20), (50, 2**20)], ids=["short", "beyond", "long"])
def test_a_file_that_ends_before_a_range_is_named(size: int | None, start: int, length: int):
    location: Any = locate("memory://bucket/short")
    location.write_bytes(bytes(range(100)))
    file, target = RangeFile(location, size), bytearray(length)
    file.seek(start)
    with pytest.raises(OSError, match=r"memory://bucket/short ends (before|at) byte"):
        file.readinto(target)
    file.seek(80)
    assert file.readinto(memoryview(target)[:20]) == 20
    assert bytes(target[:20]) == bytes(range(80, 100))


def test_a_url_is_a_path_on_the_disk_or_a_string(tmp_path: Path):
    assert locate(f"file://{tmp_path}/a") == tmp_path / "a"
    with pytest.raises(ConfigError, match=r"a URL must be given as a string, but is PosixPath\('s3:/runs/x'\)"):
        train(tmp_path / "net", 1, default_hooks={"checkpoint": {"out_dir": Path("s3://runs/x")}})
    with pytest.raises(ConfigError, match="s3:// must name a bucket, as in s3://BUCKET/NAME"):
        locate("s3://")
    assert str(locate("memory://a/b/")) == "memory://a/b"
    assert str(locate("memory://a/b").parent / "c") == "memory://a/c"
    assert locate("memory://a").parent == locate("memory://a")
    assert remove.__module__ == "lockstep.checkpoint.drafts"


@pytest.mark.parametrize("path", ["simplecache::memory://b/x", "zip://a.txt::memory://b/x.zip"])
def test_a_chain_of_urls_is_no_folder_of_that_name(path: str) -> None:
    with pytest.raises(ConfigError, match=r"must be one URL, but is a chain of them"):
        locate(path)
    with pytest.raises(ConfigError, match="`work_dir` must be a folder on a disk"):
        require_disk(path, "work_dir")


def test_a_file_holds_no_files():
    folder = locate("memory://bucket/of-one")
    (folder / "one").write_bytes(b"1")
    assert [str(path) for path in folder.files()] == ["memory://bucket/of-one/one"]
    assert (folder / "one").files() == []
