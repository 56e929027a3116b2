"""Which nodes take part in an attempt, in a job that may lose nodes and take them in again (`--nnodes MIN:MAX`).

Node 0 serves the store, and decides. Each other node shows by a heartbeat in the store that it is alive. At the
beginning of an attempt node 0 waits for the nodes that are; whoever is not there then is left out, and may come again
later: it waits until the ranks are restarted for whatever reason, and takes part from then on.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic import rendezvous

from lockstep.launch.job_spec import JobSpec

_SECONDS_PER_BEAT = 1.0
_SECONDS_UNTIL_LOST = 10.0  # without a heartbeat
_SECONDS_FOR_MORE = 30.0  # at the beginning of a job, when enough nodes have come
_MEMBERS = "members"


class Membership:
    """The nodes of each attempt, as one node sees them.

    Args:
        job: the job, with `least_nnodes`.
        store: the agents' store.
        connect: opens another connection to it.

    Raises:
        RendezvousError: another living node has the same `--node-rank`.
    """

    def __init__(self, job: JobSpec, store: TCPStore, connect: Callable[[], TCPStore]) -> None:
        assert job.least_nnodes is not None
        self._least, self._most, self._node = job.least_nnodes, job.nnodes, job.node_rank
        self._store = store
        self._token = uuid.uuid4().hex  # of this launcher: one that comes again is another one
        self._beats: dict[int, tuple[str, float]] = {}  # the last heartbeat of a node, and when it came
        self._is_ended = threading.Event()
        self._is_member = True
        if self._node != 0:
            self._require_alone()
            threading.Thread(target=self._beat, args=(connect(),), name="lockstep-heartbeat", daemon=True).start()

    def claim(self, attempt: PrefixStore) -> None:
        """Say that this node has come to an attempt; if it takes part in the job, the others are to come, too."""
        attempt.compare_set(f"node_{self._node}", "", self._token)
        if self._is_member:
            attempt.set("begun", "")

    def missing(self, attempt: PrefixStore, begun: float, *, is_first: bool) -> str:
        """On node 0: return for whom to wait; "" if the attempt can begin.

        Args:
            attempt: the store of the attempt.
            begun: when node 0 came to it, on the monotonic clock.
            is_first: nodes may still be starting.
        """
        now = time.monotonic()
        alive = {node for node in range(1, self._most) if self._is_alive(node, now)}
        here = {0, *(node for node in alive if attempt.check([f"node_{node}"]))}
        late = alive - here
        if len(here) < self._least or (is_first and now < begun + _SECONDS_FOR_MORE):
            late = set(range(self._most)) - here
        if late:
            return f"node {', '.join(map(str, sorted(late)))}"
        attempt.set(_MEMBERS, json.dumps({node: attempt.get(f"node_{node}").decode() for node in sorted(here)}))
        return ""

    def of(self, attempt: PrefixStore) -> Sequence[int]:
        """Return the nodes of an attempt that has begun; empty if this one is not among them."""
        tokens: dict[str, str] = json.loads(attempt.get(_MEMBERS))
        self._is_member = tokens.get(str(self._node)) == self._token
        return [int(node) for node in tokens] if self._is_member else []

    def close(self) -> None:
        """End the heartbeat."""
        self._is_ended.set()

    def _is_alive(self, node: int, now: float) -> bool:
        beat = self._read_beat(node)
        if not beat:
            return False
        before, when = self._beats.get(node, ("", now))
        if beat != before:
            when = now
        self._beats[node] = beat, when
        return now < when + _SECONDS_UNTIL_LOST

    def _read_beat(self, node: int) -> str:
        key = f"beat_{node}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _beat(self, store: TCPStore) -> None:
        count = 0
        with suppress(Exception):  # node 0 is gone, which the main thread notices, too
            while True:
                store.set(f"beat_{self._node}", f"{self._token} {count}")
                count += 1
                if self._is_ended.wait(_SECONDS_PER_BEAT):
                    return

    def _require_alone(self) -> None:
        if before := self._read_beat(self._node):
            time.sleep(3 * _SECONDS_PER_BEAT)
            if self._read_beat(self._node) != before:
                raise rendezvous.RendezvousError(
                    f"`--node-rank` must be different on each node, but is {self._node} on two of them"
                )
