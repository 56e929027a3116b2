"""The ranks of one task: processes of their own, forked from one that has imported everything."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lockstep.testing.pool import free_port

GRACE_S = 3.0  # for the other ranks to say how it went for them, once one has
DEVICE = "MODELS_DEVICE"  # cpu, or sim for the simulated accelerator of tests/device
PRELOADED = "MODELS_PRELOADED"  # names of the rows that are made before processes are forked, a line each
ENDING_S = 20.0  # beyond the time of a task: to start, and to say where it hangs

Outcome = dict[str, Any]
Body = Callable[[], Mapping[str, Any]]


@cache
def _forkserver() -> ForkServerContext:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.models.preload"])
    return context


def run_on_ranks(nproc: int, body: Callable[..., Outcome], arguments: tuple[Any, ...], timeout_s: float) -> Outcome:
    """Call a function on each of some ranks, and return how it went.

    Args:
        nproc: number of ranks; each finds in its environment what torchrun would put there.
        body: returns figures, or a dict with the reason under `refused` or `failed`. The figures of rank 0 count.
        arguments: of the function.
        timeout_s: after which the ranks say where they are and end.
    """
    with tempfile.TemporaryDirectory(prefix="models-ranks-") as folder:
        files, port = Path(folder), free_port()
        processes: list[BaseProcess] = [
            _forkserver().Process(target=_run_rank, args=(rank, nproc, port, files, body, arguments, timeout_s))
            for rank in range(nproc)
        ]
        for process in processes:
            process.start()
        _wait_for(processes, timeout_s + ENDING_S)
        return _agreed(files, [process.exitcode for process in processes])


def _wait_for(processes: list[BaseProcess], timeout_s: float) -> None:
    """Wait until all have ended; where one has failed, the others have little time left."""
    deadline = time.monotonic() + timeout_s
    while running := [process for process in processes if process.exitcode is None]:
        if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            break
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    for process in processes:
        process.kill()
        process.join()


def _run_rank(
    rank: int,
    nproc: int,
    port: int,
    files: Path,
    body: Callable[..., Outcome],
    arguments: tuple[Any, ...],
    timeout_s: float,
) -> None:
    """Be one rank."""
    import faulthandler

    with (files / f"output.{rank}").open("w") as output, (files / f"stack.{rank}").open("w") as stack:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        if os.environ.get(DEVICE) == "sim":
            sys.path.append(str(Path(__file__).parents[2] / "tests" / "device"))
            from sim import simulator

            simulator()  # torch takes it for this machine's accelerator from now on
        outcome = body(*arguments)
        draft = files / f"draft.{rank}"
        draft.write_text(json.dumps(outcome))
        draft.rename(files / f"rank.{rank}")
        _wait_for_others(files, nproc)
        os._exit("failed" in outcome)  # whatever threads and handlers a failed training has left


def _wait_for_others(files: Path, nproc: int) -> None:
    """Wait until all ranks have said how it went: those behind may still need this one, which may host the store."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and not all((files / f"rank.{rank}").exists() for rank in range(nproc)):
        time.sleep(0.01)


def _agreed(files: Path, exit_codes: list[int | None]) -> Outcome:
    """Return how it went for all ranks together."""
    nproc = len(exit_codes)
    known: dict[int, Outcome] = {
        rank: json.loads(text) for rank in range(nproc) if (text := _read(files / f"rank.{rank}"))
    }
    failed = {rank: outcome["failed"] for rank, outcome in known.items() if "failed" in outcome}
    if failed:
        # A rank that lost its peer says less than the peer.
        rank = min(failed, key=lambda rank: ("closed by peer" in failed[rank], "PeerError" in failed[rank]))
        return {"failed": failed[rank], "rank": rank}
    for rank in range(nproc):
        if rank not in known and (stack := _read(files / f"stack.{rank}")):
            return {"failed": f"hangs\n{stack}", "rank": rank}
    for rank in range(nproc):
        if rank not in known:
            output = _read(files / f"output.{rank}")[-4000:]
            return {"failed": f"crashed with exit code {exit_codes[rank]}\n{output}", "rank": rank}
    refused = [outcome["refused"] for outcome in known.values() if "refused" in outcome]
    if 0 < len(refused) < nproc:
        return {"failed": f"refused on {len(refused)} of {nproc} ranks alone\n{refused[0]}"}
    return known[0]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
