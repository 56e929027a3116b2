"""Rounds of messages in which all ranks learn whether they have made the same calls."""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.dist.groups import Comm
from lockstep.dist.watch.failures import translate_error

_TAG = 0x10C6  # see `transport`
_RANGE = struct.Struct("<2q")  # lowest and highest digest of several ranks
_ROUND_BYTES = 512
# Elements of a tensor that fits behind them, however it is encoded: in at most 16 bytes for each.
MOST_SMALL = (_ROUND_BYTES - _RANGE.size) // 16


class Rounds:
    """Memory for a message of one size to one rank, and from one, in as many rounds as it takes to hear of all ranks.

    In round k, rank r sends to rank r + 2**k what it has heard so far, and receives from rank r - 2**k: after the last
    round it knows whether the digests of all ranks are the same.

    Attributes:
        steps: 2**k of each round.
    """

    def __init__(self, comm: Comm) -> None:
        self._own, self._other = bytearray(_ROUND_BYTES), bytearray(_ROUND_BYTES)
        self._sent = [torch.frombuffer(self._own, dtype=torch.uint8)]
        self._received = [torch.frombuffer(self._other, dtype=torch.uint8)]
        self.steps = [1 << k for k in range((comm.size - 1).bit_length())]
        self._payloads: dict[tuple[torch.dtype, torch.Size], tuple[Tensor, Tensor]] = {}

    def start(self, pg: ProcessGroup, comm: Comm, step: int = 1, *, with_own: bool = True) -> list[Work]:
        """Start one round."""
        if with_own:
            digest = 0 if comm.calls is None else comm.calls.digest
            _RANGE.pack_into(self._own, 0, digest, digest)
        try:
            return [
                pg.recv(self._received, (comm.rank - step) % comm.size, _TAG),
                pg.send(self._sent, (comm.rank + step) % comm.size, _TAG),
            ]
        except RuntimeError as error:  # gloo refuses to send to a rank that it knows to be gone
            raise translate_error(error, comm) from error

    def merge(self) -> bool:
        """Add what has been received to what is sent next; return whether all agree so far."""
        low, high = _RANGE.unpack_from(self._own)
        other_low, other_high = _RANGE.unpack_from(self._other)
        low, high = min(low, other_low), max(high, other_high)
        _RANGE.pack_into(self._own, 0, low, high)
        return bool(low == high)

    def payload(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return tensors like `data` in the messages that are sent and received."""
        key = (data.dtype, data.shape)
        views = self._payloads.get(key)
        if views is None:
            sent, received = (
                x[_RANGE.size : _RANGE.size + data.nbytes].view(data.dtype).view(data.shape)
                for x in (*self._sent, *self._received)
            )
            views = self._payloads[key] = sent, received
        return views
