"""A data loader that gives no batch."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from lockstep.dataset import waiting
from lockstep.dataset.position import batches_from
from lockstep.dist import get_rank, get_world_size, init_dist
from lockstep.testing import ranks


class Slow(Dataset):
    """Waits with its second sample until a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        while index == 1 and not self.file.exists():
            time.sleep(0.01)
        return index


class Listener(logging.Handler):
    """Lets the sample be there once the second message has come."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.said = file, []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if len(self.said) == 2:
            self.file.touch()


@ranks(1, 2, fresh=True)
def test_a_batch_that_does_not_come_is_told(tmp_path):
    init_dist("pytorch")
    rank = f"(rank {get_rank()} of {get_world_size()})"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_SECONDS_TO_SAY", 0.2)
        for workers, named in ((0, "without workers"), (2, "of 2 workers")):
            listener = Listener(tmp_path / f"{workers}_of_rank_{get_rank()}")
            logging.getLogger("lockstep.dataset.waiting").addHandler(listener)
            loader = DataLoader(Slow(listener.file), num_workers=workers)
            assert [int(batch) for batch in batches_from(loader)] == [0, 1]
            logging.getLogger("lockstep.dataset.waiting").removeHandler(listener)
            assert len(listener.said) >= 2
            for message in listener.said:
                assert message.startswith("waiting ")
                assert f" s for a batch of the data loader over Slow, {named} {rank}. " in message
