"""Numbers that every rank has, brought to rank 0 while all of them go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

from lockstep.dist.groups import GroupLike, resolve
from lockstep.dist.objects import gather_object
from lockstep.dist.streams import open_streams

# What a stream takes in any case, whether or not the other side reads it meanwhile.
_AT_ONCE_BYTES = 2**15


class NumbersOfRanks:
    """Gathers a dict of numbers from each rank in two moments: `send`, and later `receive`.

    Where all ranks are on one host, nobody waits between them: a rank that is a little late, as every rank is now and
    then, holds up no other. Elsewhere all is done in `receive`, which is best called at once.

    **Collective**: every rank makes one, and calls both methods in turn.

    **Cost**: on one host about 25 bytes per number from each rank to rank 0, which no backend takes part in; else a
    `gather_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> numbers = NumbersOfRanks()
        >>> numbers.send({"time": 0.5 + get_rank()})
        >>> received = numbers.receive()
        >>> received == ([{"time": 0.5}, {"time": 1.5}] if get_rank() == 0 else None)
        True
        >>> numbers.close()

    Attributes:
        travels_beside: whether numbers travel while the ranks go on.
    """

    def __init__(self, group: GroupLike = None) -> None:
        self._comm = resolve(group)
        self._streams = open_streams(self._comm) if self._comm.size > 1 else None
        self.travels_beside = self._streams is not None
        self._numbers: Mapping[str, float] = {}
        self._unsent = b""

    def send(self, numbers: Mapping[str, float]) -> None:
        """Send this rank's numbers, and go on at once.

        Raises:
            PeerError: rank 0 has gone.
        """
        self._numbers = numbers
        if self._streams is None or self._comm.rank == 0:
            return
        message = json.dumps(dict(numbers)).encode()
        if len(message) > _AT_ONCE_BYTES:
            self._unsent = message
        else:
            self._streams[0].send(message)

    def receive(self, timeout: timedelta | None = None) -> list[Mapping[str, float]] | None:
        """Return what was sent, in the order of ranks; None on all ranks but 0.

        Raises:
            PeerError: a rank has gone.
            CollectiveTimeoutError: a rank has not sent anything in time.
        """
        if self._streams is None:
            return gather_object(self._numbers, group=self._comm.pg)
        if self._comm.rank == 0:
            return [self._numbers, *(json.loads(stream.receive(timeout)) for stream in self._streams.values())]
        if self._unsent:
            message, self._unsent = self._unsent, b""
            self._streams[0].send(message)
        return None

    def close(self) -> None:
        """Let go of the other ranks. What has been sent still arrives."""
        for stream in (self._streams or {}).values():
            stream.close()
