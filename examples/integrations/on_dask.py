"""Each dask worker runs one rank, as a task: `python on_dask.py`."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import sleep
from urllib.parse import urlsplit

from dask.distributed import Client, LocalCluster, wait
from small import by_runner

from lockstep.dist import destroy_dist
from lockstep.errors import PeerError


def as_rank(variables: dict[str, str], train: Callable[[], object]) -> object:
    os.environ.update(variables)
    try:
        return train()
    finally:
        destroy_dist()  # the worker's process goes on


def free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]


def run_ranks(client: Client, train: Callable[[], object]) -> list:
    """Call a function on each worker as a rank, and return what it returns, in the ranks' order."""
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    hosts = [urlsplit(worker).hostname for worker in workers]
    port = client.submit(free_port, hosts[0], workers=workers[:1], pure=False).result()
    ranks = []
    for rank, (worker, host) in enumerate(zip(workers, hosts, strict=True)):
        variables = {
            "RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": hosts[:rank].count(host),
            "LOCAL_WORLD_SIZE": hosts.count(host), "GROUP_RANK": sorted(set(hosts)).index(host),
            "MASTER_ADDR": hosts[0], "MASTER_PORT": port,
        }  # fmt: skip
        named = {name: str(value) for name, value in variables.items()}
        # Dask must neither move a rank to another worker, nor take an earlier call's result for it.
        ranks.append(client.submit(as_rank, named, train, workers=[worker], pure=False, retries=0))
    while not all(rank.done() for rank in ranks) and not any(rank.status == "error" for rank in ranks):
        sleep(0.1)
    with suppress(TimeoutError):
        wait(ranks, timeout=10)  # where one has failed, the others fail soon; one whose worker is gone never ends
    client.cancel([rank for rank in ranks if not rank.done()])
    errors = [rank.exception() for rank in ranks if rank.status == "error"]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):  # it says only that another is gone
        raise error
    return client.gather(ranks)


if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1") as cluster, Client(cluster) as client:
        run_ranks(client, partial(by_runner, "work_dirs/small"))
