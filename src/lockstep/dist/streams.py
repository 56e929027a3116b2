"""Streams of bytes between rank 0 and the other ranks of a host, past the backend."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from lockstep.dist.groups import Comm
from lockstep.dist.objects import all_gather_object, broadcast_object
from lockstep.errors import CollectiveTimeoutError, PeerError

_LENGTH = struct.Struct("<I")
# What the system is asked to keep of messages that nobody has read yet.
_KEPT_BYTES = 2**18
# torch's, for a backend that does not tell its own.
_TIMEOUT = timedelta(minutes=30)


class Stream:
    """Messages to and from one other rank, in order.

    A backend wakes threads for each message, its own and the other side's. Here the system keeps a message until
    somebody asks for it, and nobody is disturbed.

    Args:
        connection: to the other rank.
        peer: that rank.
        comm: the group, as seen from this process.
    """

    def __init__(self, connection: socket.socket, peer: int, comm: Comm) -> None:
        self._connection = connection
        self._peer = peer
        self._comm = comm
        self._timeout = _timeout_of(comm)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KEPT_BYTES)

    def send(self, message: bytes) -> None:
        """Send a message. One of up to 32 KiB does not wait for the other side, unless several lie there unread.

        Raises:
            PeerError: the rank has gone.
        """
        self._connection.settimeout(self._timeout.total_seconds())
        try:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)
        except TimeoutError as error:
            raise self._too_late("read what it was sent") from error
        except OSError as error:
            raise self._gone(str(error)) from error

    def receive(self, timeout: timedelta | None = None) -> bytes:
        """Wait for the next message; by default as long as for a collective.

        Raises:
            PeerError: the rank has gone.
            CollectiveTimeoutError: the rank has sent nothing in time.
        """
        deadline = monotonic() + (self._timeout if timeout is None else timeout).total_seconds()
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def close(self) -> None:
        """Close the stream. What has been sent still arrives."""
        with suppress(OSError):  # the other side has done so
            # The processes of a data loader hold the same socket.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int, deadline: float) -> bytes:
        data = b""
        try:
            while len(data) < count:
                # A timeout of 0 would mean not to wait at all, and end in another error.
                self._connection.settimeout(max(1e-3, deadline - monotonic()))
                part = self._connection.recv(count - len(data))
                if not part:
                    raise self._gone("it closed its stream")
                data += part
        except TimeoutError as error:
            raise self._too_late("sent what it was to send") from error
        except OSError as error:
            raise self._gone(str(error)) from error
        return data

    def _gone(self, cause: str) -> PeerError:
        return PeerError(
            f"rank {self._peer} of the group has ended or lost its connection ({self._comm.this_rank}). Look for its "
            f"own error first. The system says: {cause}",
            rank=self._peer,
            cause=cause,
        )

    def _too_late(self, what: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(f"rank {self._peer} of the group has not {what} in time ({self._comm.this_rank})")


def open_streams(comm: Comm) -> dict[int, Stream] | None:
    """Connect rank 0 with every other rank, if all are on one host.

    **Collective**: every rank of the group.

    Args:
        comm: the group, as seen from this process.

    Returns:
        Streams by rank: rank 0 has one to each other rank, each other rank has the one to rank 0. None on every rank
        where one of them cannot reach rank 0 in this way.
    """
    with ExitStack() as setting_up, ExitStack() as opened:
        listener = _listen(comm.size, setting_up) if comm.rank == 0 else None
        address = broadcast_object(None if listener is None else listener.getsockname(), group=comm.pg)
        connections: dict[int, socket.socket] = {}
        own = None if comm.rank == 0 or address is None else _connect(address, comm.rank)
        if own is not None:
            connections[0] = opened.enter_context(own)
        # Whoever has connected waits in the listener's queue by now.
        if not all(all_gather_object(comm.rank == 0 or own is not None, group=comm.pg)) or address is None:
            return None
        if listener is not None:
            for _ in range(comm.size - 1):
                connection, name = listener.accept()
                connections[int(Path(name).name)] = opened.enter_context(connection)
        opened.pop_all()
    return {peer: Stream(connections[peer], peer, comm) for peer in sorted(connections)}


def _listen(size: int, stack: ExitStack) -> socket.socket | None:
    """Return a socket that nobody but this user on this host can reach; None where there is none to be had."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    with suppress(OSError):  # no folder that can be written, or a name that is too long
        folder = stack.enter_context(TemporaryDirectory(prefix="lockstep-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(Path(folder) / "ranks"))
        listener.listen(size)
        return listener
    return None


def _connect(address: str, rank: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.bind(str(Path(address).with_name(str(rank))))  # by which rank 0 knows who it is
        connection.connect(address)
    except OSError:  # rank 0 is on another host
        connection.close()
        return None
    return connection


def _timeout_of(comm: Comm) -> timedelta:
    """Return how long a collective waits, which torch 2.13 tells in no public way."""
    backend = None if comm.pg is None else comm.pg._get_backend(comm.comm_device)
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else _TIMEOUT
