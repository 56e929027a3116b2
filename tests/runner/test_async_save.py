"""Checkpoints that are written while the training goes on, and those that an operator asks for."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session, dist
from lockstep.checkpoint import background, find_checkpoints, load_state, saving, verify
from lockstep.checkpoint.background import BackgroundSaver, StoreExchange
from lockstep.errors import CollectiveTimeoutError, DistError
from lockstep.hooks import CheckpointHook, Hook
from lockstep.runner import preemption
from lockstep.testing import ranks


class Slow(Hook):
    """Notes when checkpoints are complete, and lets iterations take time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.losses: list[float] = []
        self.names: list[tuple[int, list[str]]] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        time.sleep(self.seconds)
        self.losses.append(float(outputs["loss"]))
        self.names.append((runner.iter + 1, names_in(runner.run_dir)))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if (path / "manifest.json").exists() and path.name[0] != ".")


def train(folder, *hooks, resume=False, checkpoint=None, iterations=12, **settings):
    """Train a small model, and return the runner."""
    torch.manual_seed(0)
    inputs = torch.randn(48, 4)
    runner = Runner(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        folder,
        loss=nn.MSELoss(),
        train_dataloader=DataLoader(
            TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8 // dist.get_world_size(), shuffle=True
        ),
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.01}},
        train_cfg={"by_epoch": False, "max_iters": iterations},
        default_hooks={"checkpoint": checkpoint, "progress": None},
        custom_hooks=list(hooks),
        randomness={"seed": 1},
        resume=resume,
        log_level="WARNING",
        visualizer=[],
        **settings,
    )
    runner.train()
    return runner


@contextmanager
def slow_writes(seconds):
    """Let each file take a while; yield the threads that wrote one."""
    threads, write = [], saving.write_share

    def slow(plan):
        threads.append(threading.current_thread().name)
        time.sleep(seconds)
        return write(plan)

    with patch.object(saving, "write_share", slow):
        yield threads


EVERY_FOURTH = {"by_epoch": False, "interval": 4, "async_save": True}


@ranks(1, 2)
def test_training_goes_on_while_a_checkpoint_is_written_and_resumes_from_it_exactly(tmp_path):
    whole = Slow(0.03)
    with slow_writes(0.2) as threads:
        run = train(tmp_path / "whole", whole, checkpoint=EVERY_FOURTH).run
    assert threads == ["lockstep-save"] * 3
    assert dict(whole.names)[5] == []  # it is being written
    assert names_in(run.run_dir) == ["iter_12", "iter_4", "iter_8"]
    assert run.message_hub.get_info("last_ckpt") == str(run.run_dir / "iter_12")
    resumed = Slow()
    train(tmp_path / "resumed", resumed, load_from=run.run_dir / "iter_4", resume=True)
    assert resumed.losses == whole.losses[4:]
    verify(run.run_dir / "iter_8")


def check_resumes_exactly(folder, strategy, tolerance=0.0):
    """Check that a checkpoint that was written while training went on holds the iteration that it is named after."""
    whole, resumed = Slow(), Slow()
    with slow_writes(0.2) as threads:
        run = train(folder / "whole", whole, checkpoint=EVERY_FOURTH, strategy=strategy).run
    assert set(threads) == {"lockstep-save"}
    train(folder / "resumed", resumed, load_from=run.run_dir / "iter_4", resume=True, strategy=strategy)
    assert resumed.losses == pytest.approx(whole.losses[4:], rel=0, abs=tolerance)


@pytest.mark.parametrize("strategy", ["fsdp", {"type": "FSDPStrategy", "reshard_after_forward": False}], ids=str)
@ranks(2)
def test_sharded_states_are_copied_whole(tmp_path, strategy):
    check_resumes_exactly(tmp_path, strategy)


@ranks(2)
def test_a_state_may_change_as_soon_as_the_save_has_begun(tmp_path):
    saver = BackgroundSaver()
    own = torch.full((1000,), float(dist.get_rank()))
    state = {"own": {str(dist.get_rank()): own}, "odd": torch.ones(3, dtype=torch.bool), "none": torch.empty(0, 2)}
    state["turned"] = torch.arange(6.0).view(2, 3).t()
    state["scalar"] = torch.tensor(7, dtype=torch.int16)
    for name, value in (("a", 0.0), ("b", 10.0)):
        own.fill_(dist.get_rank() + value)
        saver.start(tmp_path / name, state, {"name": name})
        own.fill_(-1)
        saver.wait()
    for name, value in (("a", 0.0), ("b", 10.0)):
        read = load_state(
            tmp_path / name, {"own": {"0": own, "1": own.clone()}, "odd": None, "turned": None, "scalar": None}
        )
        assert read["own"]["0"].unique().tolist() == [value]
        assert read["own"]["1"].unique().tolist() == [1 + value]
        assert read["odd"].tolist() == [True] * 3
        assert read["turned"].tolist() == state["turned"].tolist()
        assert read["scalar"].item() == 7


@ranks(1, 2)
def test_memory_of_a_save_is_used_again_and_is_taken_in_bounded_blocks(tmp_path):
    saver = BackgroundSaver()
    state = {"own": {f"{dist.get_rank()}.{i}": torch.full((n,), float(i)) for i, n in enumerate((1000, 5000, 900, 9))}}
    places = []
    with patch.object(background, "_BLOCK", 8192):
        for name in "abc":
            saver.start(tmp_path / name, state, {})
            saver.wait()
            places.append([block.data_ptr() for block in saver._memory])
    assert places[1:] == places[:-1]
    assert [block.nbytes for block in saver._memory] == [4032, 20032, 3648 + 64]
    assert all(map(torch.equal, load_state(tmp_path / "c", state)["own"].values(), state["own"].values()))


@ranks(1)
def test_a_save_that_was_waited_for_has_left_no_thread(tmp_path):
    """The thread frees tensors, which aborts the process where the interpreter shuts down meanwhile."""
    saver, state = BackgroundSaver(), {"model": {"weight": torch.ones(3)}}
    for ends in (saver.wait, saver.abandon):
        saver.start(tmp_path / ends.__name__, state, {}).add_done_callback(lambda job: time.sleep(0.3))
        ends()
        assert "lockstep-save" not in {thread.name for thread in threading.enumerate()}


def test_a_save_of_which_the_wait_was_interrupted_keeps_what_it_has_copied(tmp_path):
    """As in a notebook, where the next save would put later weights into the first checkpoint."""
    saver, weight = BackgroundSaver(), torch.ones(3)
    with slow_writes(0.5):
        saver.start(tmp_path / "first", {"model": {"weight": weight}}, {})
        with patch.object(saver._thread, "join", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            saver.wait()
        saver.start(tmp_path / "second", {"model": {"weight": weight.fill_(2.0)}}, {})
        with patch.object(saver._thread, "join", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            saver.wait()
        saver.abandon()
    saved = [load_state(tmp_path / name, {"model": {"weight": torch.empty(3)}}) for name in ("first", "second")]
    assert [one["model"]["weight"].tolist() for one in saved] == [[1.0] * 3, [2.0] * 3]


def test_a_save_of_which_the_wait_was_interrupted_counts_when_it_has_ended(tmp_path):
    interrupted = []

    class Interrupts(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            saver = runner.saving._background
            if runner.iter == 1 and saver.job is not None:
                interrupt = patch.object(saver._thread, "join", side_effect=KeyboardInterrupt)
                with interrupt, pytest.raises(KeyboardInterrupt):
                    runner.saving.finish()
                interrupted.append(runner.saving.begun_iter)

    with slow_writes(0.2):
        train(
            tmp_path,
            Interrupts(),
            checkpoint={"by_epoch": False, "interval": 1, "async_save": True, "max_keep_ckpts": 1},
        )
    assert interrupted == [1]
    run_dir = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert len([name for name in names_in(run_dir) if name.startswith("iter_")]) == 1


@contextmanager
def fails_on(rank):
    write = saving.write_share

    def fail(plan):
        if dist.get_rank() == rank and "iter_4" in str(plan.path):
            raise OSError(errno.EIO, "the disk is broken", str(plan.path))
        return write(plan)

    with patch.object(saving, "write_share", fail):
        yield


@pytest.mark.parametrize("rank", [0, 1])
@ranks(2)
def test_a_failure_on_any_rank_ends_the_training_on_all_after_the_same_iteration(tmp_path, rank):
    slow = Slow(0.03)
    with (
        fails_on(rank),
        pytest.raises(OSError, match=rf"iter_4 could not be written: rank {rank}: .*the disk is broken"),
    ):
        train(tmp_path, slow, checkpoint=EVERY_FOURTH | {"interval": 2}, iterations=100)
    counts = dist.all_gather_object(len(slow.losses))
    assert len(set(counts)) == 1
    assert 4 <= counts[0] < 50
    run_dir = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert names_in(run_dir) == ["iter_2"]
    assert not list(run_dir.glob(".*draft*"))


@ranks(1, 2)
def test_a_failure_can_be_a_warning(tmp_path):
    hook = EVERY_FOURTH | {"on_save_error": "warn", "max_keep_ckpts": 2}
    with fails_on(dist.get_world_size() - 1):
        run = train(tmp_path, checkpoint=hook, iterations=16).run
    dist.barrier()  # rank 0 removes
    assert names_in(run.run_dir) == ["iter_12", "iter_16"]
    if dist.get_rank() == 0:
        assert "iter_4 could not be written" in (run.run_dir / "log.txt").read_text()


@ranks(2)
def test_a_rank_that_is_silent_is_no_failure_of_the_disk(tmp_path):
    late = CollectiveTimeoutError("rank 1 did not say what it has written")
    raises = patch.object(StoreExchange, "_await", side_effect=late) if dist.get_rank() == 0 else nullcontext()
    with raises, pytest.raises(DistError, match="rank 1 did not say what it has written"):
        train(tmp_path, checkpoint=EVERY_FOURTH | {"on_save_error": "warn"})


@ranks(2)
def test_ranks_without_a_store_to_share_save_at_once_and_are_told_so(tmp_path):
    no_store = DistError("the ranks have no store that can be shared")
    with slow_writes(0.0) as threads, patch.object(preemption, "side_store", side_effect=no_store):
        run = train(tmp_path, checkpoint=EVERY_FOURTH).run
    assert set(threads) == {"MainThread"}
    assert names_in(run.run_dir) == ["iter_12", "iter_4", "iter_8"]
    if dist.get_rank() == 0:
        log = (run.run_dir / "log.txt").read_text()
        assert log.count("no store that can be shared") == log.count("`async_save` has no effect") == 1


@ranks(1, 2)
def test_an_old_checkpoint_is_removed_only_when_the_new_one_is_complete(tmp_path):
    slow = Slow(0.02)
    with slow_writes(0.1):
        run = train(tmp_path, slow, checkpoint=EVERY_FOURTH | {"max_keep_ckpts": 1}, iterations=16).run
    seen = [names for done, names in slow.names if done > 8]
    assert all(1 <= len(names) <= 2 for names in seen)
    dist.barrier()  # rank 0 removes
    assert names_in(run.run_dir) == ["iter_16"]


@ranks(2)
def test_a_training_that_fails_completes_the_save_in_progress(tmp_path):
    class Fails(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter + 1 == 5:
                raise ValueError("broken")

    with slow_writes(0.5), pytest.raises(ValueError, match="broken"):
        train(tmp_path, Fails(), checkpoint=EVERY_FOURTH)
    dist.barrier()
    assert [found.name for found in find_checkpoints([tmp_path])] == ["iter_4"]


def test_a_save_that_was_given_up_does_not_come_later(tmp_path, monkeypatch):
    """As over the checkpoints of the next training in this process."""
    monkeypatch.setattr(background, "_SECONDS_TO_GIVE_UP", 0.05)
    ended = threading.Event()
    saver = BackgroundSaver()
    with slow_writes(0.5):
        job = saver.start(tmp_path / "late", {"model": {"weight": torch.ones(3)}}, {})
        job.add_done_callback(lambda job: ended.set())
        saver.abandon()
        assert ended.wait(30)
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_is_waited_for_in_vain_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "_SECONDS_TO_GIVE_UP", 0.1)
    exchange = background.StoreExchange(torch.distributed.HashStore(), "x", 0, 2)
    exchange.is_abandoned.set()
    with pytest.raises(TimeoutError, match="rank 1 did not say what it has written"):
        exchange.gather(None)


def test_what_ranks_have_to_say_comes_from_each_and_leaves_nothing():
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    said = {"words": ["häß\udcff"] * 1_000}
    main, other = (background.StoreExchange(store, "x", rank, 2) for rank in range(2))
    assert other.gather(said) is None
    assert main.gather("short") == ["short", said]
    assert main.scatter(["mine", said]) == "mine"
    assert other.scatter(None) == said
    assert not store.check(["x/result/1"])


def test_ranks_that_write_slowly_are_waited_for_longer_than_a_collective_is():
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    main, other = (background.StoreExchange(store, "x", rank, 2) for rank in range(2))
    writes = threading.Timer(0.5, other.gather, ["late"])
    writes.start()
    assert main.gather("soon") == ["soon", "late"]
    writes.join()


def test_a_rank_that_comes_when_rank_0_has_given_up_is_told(monkeypatch):
    monkeypatch.setattr(background, "_MOST_WAITED", timedelta(seconds=0.1))
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    main, other = (background.StoreExchange(store, "x", rank, 2) for rank in range(2))
    with pytest.raises(TimeoutError, match="rank 1 did not say"):
        main.gather("soon")
    other.gather("late")
    with pytest.raises(DistError, match=r"rank 0 has given up: .*rank 1 did not say what it has written"):
        other.scatter(None)


def test_what_is_read_from_the_store_runs_no_code(tmp_path):
    class Runs:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    store.set("x/result/1", pickle.dumps(Runs()))
    with pytest.raises(ValueError, match="decode"):
        background.StoreExchange(store, "x", 0, 2).gather({})
    assert not (tmp_path / "ran").exists()


@ranks(1, 2)
def test_a_session_saves_while_it_goes_on(tmp_path):
    def losses(**start):
        torch.manual_seed(0)
        inputs = torch.randn(48, 4)
        model = nn.Linear(4, 1)
        found = []
        with Session(tmp_path, **start, randomness={"seed": 1}, log_level="WARNING") as session:
            loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=8 // session.world_size, shuffle=True)
            model, _, loader = session.prepare(model, torch.optim.AdamW(model.parameters()), loader)
            for _ in session.epochs(2):
                for x, y in loader:
                    loss = nn.functional.mse_loss(model(x)[:, 0], y)
                    session.step(loss)
                    found.append(loss.item())
                    if len(found) == 4 and not start:
                        session.save(async_save=True)
        return found

    with slow_writes(0.1):
        whole = losses()
    saved = next(found for found in find_checkpoints([tmp_path]) if found.name == "iter_4")
    assert losses(load_from=saved, resume=True) == whole[4:]


def test_a_hook_is_told_by_its_arguments():
    assert CheckpointHook(async_save=True).async_save


@ranks(2, fresh=True)
def test_processes_that_have_saved_differently_often_before_save_together(tmp_path):
    """As those of a pool that outlives jobs, some of which had other ranks."""
    saver, state = BackgroundSaver(), {"model": {"weight": torch.ones(3)}}
    if os.environ["RANK"] == "0":
        saver.start(tmp_path / "alone", state, {})
        saver.wait()
    dist.init_dist()
    with patch.object(background, "_MOST_WAITED", timedelta(seconds=5)):
        saver.start(tmp_path / "together", state, {})
        saver.wait()
    verify(tmp_path / "together")


@ranks(2)
def test_where_one_rank_has_no_store_no_rank_begins_to_save(tmp_path):
    saver, no_store = BackgroundSaver(), DistError("the ranks have no store that can be shared")
    lacks = patch.object(background, "side_store", side_effect=no_store) if dist.get_rank() == 1 else nullcontext()
    with lacks, pytest.raises(DistError, match=r"rank 1: .*no store that can be shared"):
        saver.start(tmp_path / "one", {"model": {}}, {})
    saver.wait()
    assert names_in(tmp_path) == []
    saver.start(tmp_path / "two", {"model": {"weight": torch.ones(3)}}, {})
    saver.wait()
    verify(tmp_path / "two")


def test_a_rank_that_waits_for_others_says_nothing_meanwhile(capfd):
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    main, other = (background.StoreExchange(store, "x", rank, 2) for rank in range(2))
    writes = threading.Timer(1.5, other.gather, ["late"])
    writes.start()
    assert main.gather("soon") == ["soon", "late"]
    writes.join()
    assert capfd.readouterr().err == ""
