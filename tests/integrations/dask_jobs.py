"""Ranks as tasks of two dask workers: a training, a rank that fails, one that is killed, and a training after it."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import Any

from dask.distributed import Client, LocalCluster
from on_dask import run_ranks
from small import by_hand, by_runner

from lockstep.hooks import Hook


class Fails(Hook):
    """Raises an error on rank 1, or kills it."""

    def __init__(self, by_signal: bool) -> None:
        self._by_signal = by_signal

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.rank == 1 and runner.iter == 3:
            if self._by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad luck")


def error_of(client: Client, by_signal: bool) -> str:
    try:
        run_ranks(client, partial(by_hand, "work_dirs/failing", (Fails(by_signal),)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    one = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    with LocalCluster(**one) as cluster, Client(cluster) as client:
        run_ranks(client, partial(by_runner, "work_dirs/first"))
        errors = [error_of(client, by_signal=False), error_of(client, by_signal=True)]
        client.wait_for_workers(2)  # dask starts another in the place of the one that was killed
        run_ranks(client, partial(by_runner, "work_dirs/again"))
    print(json.dumps(errors))
