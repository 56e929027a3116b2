"""`JobSpec`: the number of ranks and nodes, and the address where nodes connect."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launch.network import LOOPBACK

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
"""What a rank may be bound to: the values of `torch.numa.binding.AffinityMode`, which is not imported here."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The number of ranks and nodes of a job, and the address where the nodes connect.

    Attributes:
        nproc: number of ranks on this node.
        nnodes: number of nodes of the job; with `least_nnodes`, the largest.
        node_rank: the number of this node.
        rdzv: ``"HOST:PORT"`` where the nodes connect; HOST is an address of node 0. None with one node.
        least_nproc: when ranks are restarted, those that were lost are left out, as long as so many remain. None keeps
            their number.
        least_nnodes: nodes that are lost are left out, and taken in again when they come back, as long as so many are
            there, node 0 among them. None needs all.

    Raises:
        ValueError: a number is out of range, or `rdzv` is missing, not valid, or given with one node.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rdzv: str | None = None
    least_nproc: int | None = None
    least_nnodes: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("--nproc", self.nproc), ("--nnodes", self.nnodes)):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {count}")
        if self.nnodes == 1 and (self.rdzv is not None or self.node_rank > 0):
            given = f"`--rdzv` is {self.rdzv!r}" if self.rdzv is not None else f"`--node-rank` is {self.node_rank}"
            raise ValueError(
                f"`--nnodes`, the number of machines, must be given for several of them, as {given}. Give --nnodes and "
                "--rdzv HOST:PORT, the same on every node, and each node its own --node-rank"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"`--node-rank` must be from 0 to {self.nnodes - 1}, since `--nnodes` is {self.nnodes}, "
                f"but is {self.node_rank}"
            )
        self.endpoint()

    def endpoint(self) -> tuple[str, int]:
        """Return host and port of `rdzv`; with one node, the loopback address and port 0 (any free port)."""
        if self.nnodes == 1:
            return LOOPBACK, 0
        host, _, port = (self.rdzv or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            given = "missing" if self.rdzv is None else repr(self.rdzv)
            raise ValueError(
                "`--rdzv` must be HOST:PORT, an address of node 0 and a free port there, the same on every node, "
                f"but is {given}. Example: --rdzv node0:29500"
            )
        return host.strip("[]"), int(port)
