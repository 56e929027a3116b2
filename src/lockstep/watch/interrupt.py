"""Ends calls that hang or have failed: those of a group on the host and on a device; as a last resort the process."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, NoReturn

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, distributed_c10d

from lockstep.errors import PEER_IS_GONE
from lockstep.groups import Comm, control_groups, known_groups

_SECONDS_TO_ABORT = 2.0  # how long torch's `abort` is waited for
_SECONDS_TO_FLUSH = 2.0
_TAG = 0x10C7  # of a receive for which no rank sends anything
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def interrupt(*comms: Comm) -> None:
    """Make the collectives of groups fail: the one that the main thread waits for, and those that run on a device."""
    for comm in comms:
        if comm.pg is not None:
            _interrupt_on_host(comm, comm.pg)
    # In threads of their own, because `abort` may never return on a device that hangs, and that of one group may wait
    # for another's.
    on_devices = [comm.pg for comm in comms if comm.pg is not None and comm.devices - {"cpu"}]
    aborting = [threading.Thread(target=_abort, args=(pg,), name="lockstep-abort", daemon=True) for pg in on_devices]
    for thread in aborting:
        thread.start()
    deadline = monotonic() + _SECONDS_TO_ABORT
    for thread in aborting:
        thread.join(max(0.0, deadline - monotonic()))


def interrupt_all() -> None:
    """End what this rank has begun and others never join: the end of a group waits for that, until the timeout."""
    interrupt(*known_groups())


def _interrupt_on_host(comm: Comm, pg: ProcessGroup) -> None:
    control_group = control_groups.get(pg)
    gloo = pg if control_group is None else control_group()
    if gloo is not None and (control_group is not None or "cpu" in comm.devices):
        # A receive that times out is what ends gloo's waits, by closing all connections of the group. Its `abort` and
        # `shutdown` don't (torch 2.13). A receive from a rank that is gone fails without that.
        for step in range(1, comm.size):
            source = (comm.rank + step) % comm.size
            try:
                work: Any = torch_dist.irecv(torch.empty(1, device="cpu"), group=gloo, group_src=source, tag=_TAG)
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if any(words in str(error) for words in PEER_IS_GONE):
                    continue
            break


def _abort(pg: ProcessGroup) -> None:
    with suppress(Exception):  # it has been aborted, or its device has failed
        pg.abort()


def groups_in_error() -> dict[ProcessGroup, str]:
    """Return those of torch's groups in which a device's backend has met an error, with torch's word for it.

    When NCCL loses the connection to a rank, its calls end, with wrong results, and torch's functions raise nothing
    (2.11: its watchdog notes the error, and waits for a minute, in which `destroy_process_group` hangs, before it ends
    the process by SIGABRT). The watchdog looks at calls that were queued, ten times a second: not at those that a CUDA
    graph repeats, nor at any under TORCH_NCCL_BLOCKING_WAIT.

    **Cost**: a read of the host's memory for each group with a device.
    """
    found: dict[ProcessGroup, str] = {}
    # torch has no public list of the groups of a process, nor a public way to their backends (2.13).
    for pg in list(distributed_c10d._world.pg_map):
        with suppress(Exception):  # the backend does not tell, or the group is another package's
            for device in pg._device_types:
                if device.type != "cpu" and (error := pg._get_backend(device).get_error().name) != "SUCCESS":
                    found[pg] = error
    return found


def let_graphs_be_captured(device_index: int | None) -> None:
    """Let this thread query CUDA events while another one captures a graph. Without this, a query ends the capture.

    Call it before each query. It changes a mode of the thread in CUDA's runtime, for which torch has no function.

    Args:
        device_index: the device on which calls run, which becomes the thread's own: else CUDA would make a context on
            the first one, of half a gigabyte for each rank of the machine. None if there were no calls on a device yet.
    """
    if device_index is not None and torch.version.cuda is not None:
        torch.accelerator.set_device_index(device_index)
        with suppress(OSError, AttributeError):  # the runtime library has another name
            runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def end_process(error: BaseException) -> NoReturn:
    """Show an error that nothing can catch, and end the process, whatever its main thread waits for."""
    with suppress(Exception):  # the hook may be the user's
        sys.excepthook(type(error), error, None)
    leave_process()


def leave_process() -> NoReturn:
    """End the process with exit code 1, whatever its threads wait for."""
    with suppress(RuntimeError):  # no thread can be started
        # A thread that hangs may hold the lock of a stream, or a pipe be full.
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(_SECONDS_TO_FLUSH)
    os._exit(1)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # of a stream that was closed before the start, None
            stream.flush()
