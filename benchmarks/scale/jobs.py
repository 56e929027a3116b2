"""Starting a counted job: the store and the ranks are forked from a process that has imported torch."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import TCPStore

from benchmarks.scale import ranks
from benchmarks.scale.sockets import Counts, Sent

PATIENCE = 300.0  # seconds until a job counts as hanging
_SECONDS_FOR_FAILING = 1.5  # after the others have ended
for _name in ("torch._dynamo", "torch.distributed.fsdp"):  # each rank would import them in its first counted call
    importlib.import_module(_name)
PER_NODE = 8  # ranks: so that what is done by node is seen


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        size: number of ranks.
        sent: what each process has sent, by what was counted; the last one served the store.
        codes: the exit codes of the ranks; None for one that had to be killed.
        errors: what ranks have raised, as "class: text".
        seconds: from a fault to the last error.
    """

    size: int
    sent: dict[str, list[Sent]]
    codes: list[int | None]
    errors: dict[int, str]
    seconds: float = 0.0


def run(name: str, size: int, timeout: float = 600.0) -> Outcome:
    """Run a job.

    Args:
        name: `lockstep`, `torch`, or one of `ranks.FAULTS`.
        size: number of ranks.
        timeout: of collectives, in seconds.
    """
    # Not a TemporaryDirectory, which each rank would remove at its end.
    folder = Path(tempfile.mkdtemp(prefix="lockstep-scale-"))
    try:
        return _run_in(folder, name, size, timeout)
    finally:
        shutil.rmtree(folder)


def _run_in(folder: Path, name: str, size: int, timeout: float) -> Outcome:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:
        port = server.getsockname()[1]
        counts = Counts(size + 1, 2 * len(ranks.CALLS))

        def serve() -> None:
            counts.count(size, port)
            listening = os.dup(server.fileno())
            store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening,
                timeout=timedelta(seconds=PATIENCE),
            )  # fmt: skip
            time.sleep(2 * PATIENCE)
            del store

        def rank_of(rank: int) -> Callable[[], None]:
            def take_part() -> None:
                server.close()
                os.environ.update(_environment(rank, size, port))
                counts.count(rank, port)
                try:
                    ranks.run(ranks.Job(counts, rank, folder, timeout), name)
                except BaseException as error:
                    counts.stamp(rank, ranks.RAISED)
                    (folder / f"error_{rank}").write_text(f"{type(error).__name__}: {error}")
                    raise

            return take_part

        store = _fork(serve, folder / "output_store")
        pids = [_fork(rank_of(rank), folder / f"output_{rank}") for rank in range(size)]
        failing = {ranks.FAILING} if name in ranks.FAULTS else set[int]()
        codes = dict[int, int]()
        _await(pids, codes, set(range(size)) - failing, PATIENCE)
        _await(pids, codes, failing, _SECONDS_FOR_FAILING)
        for pid in (*pids, store):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        known = [codes.get(rank) for rank in range(size)]
        _await(pids, codes, set(range(size)), PATIENCE)
        os.waitpid(store, 0)
        errors = {rank: path.read_text() for rank in range(size) if (path := folder / f"error_{rank}").exists()}
        if name not in ranks.FAULTS and known != [0] * size:
            said = "\n".join((folder / f"output_{rank}").read_text() for rank in range(size))
            raise RuntimeError(f"{name} on {size} ranks: exit codes {known}\n{said[-4000:]}")
        begun = [counts.stamped(rank, ranks.FAULT) for rank in range(size)]
        ended = [counts.stamped(rank, ranks.RAISED) for rank in range(size)]
        return Outcome(size, _sent(name, counts), known, errors, max(ended) - max(begun))


def _sent(name: str, counts: Counts) -> dict[str, list[Sent]]:
    if name in ranks.FAULTS:  # up to the end, by all threads
        return {name: counts.between(ranks.moments(name)[0], None, background=True)}
    counted = {}
    for what in ranks.CALLS:
        begin, end = ranks.moments(what)
        counted[what] = counts.between(begin, end, background=what == "at rest, a second")
    return counted


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    node, local_rank = divmod(rank, PER_NODE)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": min(size - node * PER_NODE, PER_NODE),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": -(-size // PER_NODE),
        "MASTER_PORT": port,
    }
    words = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under `lockstep launch`: no rank serves the store
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: str(number) for name, number in numbers.items()} | words


def _fork(act: Callable[[], None], output: Path) -> int:
    """Fork a process that acts and ends as a new interpreter would; return its number here."""
    sys.stdout.flush()
    return os.fork() or _become(act, output)


def _become(act: Callable[[], None], output: Path) -> NoReturn:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    try:
        act()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        sys.last_value, code = error, 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _await(pids: list[int], codes: dict[int, int], which: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not which <= codes.keys() and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
