"""The position of a process among ranks and nodes: checks a launcher's numbers, and derives missing ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import TopologyError, counted


class Stated(NamedTuple):
    """A number, and the variable that states it."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Statement:
    """The numbers that a launcher states about one process, not yet checked; None for a number that it does not state.

    Attributes:
        rank: the number of this process among all.
        world_size: number of processes.
        local_rank: the number of this process among those of its node.
        local_size: number of processes on this node.
        node_rank: the number of this node among all.
        num_nodes: number of nodes.
        one_host: whether all processes run on this machine, judged by the address of rank 0.
        remedy: how to start processes so that the numbers are right.
    """

    rank: Stated
    world_size: Stated
    local_rank: Stated | None
    local_size: Stated | None
    node_rank: Stated | None
    num_nodes: Stated | None
    one_host: bool
    remedy: str

    def contradiction(self, must: str) -> TopologyError:
        """Return an error with the text `must`, the rank and the remedy."""
        return TopologyError(f"{must} (rank {self.rank.value} of {self.world_size.value}). {self.remedy}")


def derive_placement(statement: Statement) -> tuple[int, int, int, int]:
    """Check the numbers that are stated, and derive those that are not.

    Returns local rank, number of ranks on this node, node rank and number of nodes.

    If no node rank is stated, ranks are assumed to fill one node after the other, with equally many on each.

    **Raises**: TopologyError if numbers contradict each other, or allow more than one answer.
    """
    rank, world_size = statement.rank.value, statement.world_size
    for count in (world_size, statement.local_size, statement.num_nodes):
        if count is not None and count.value < 1:
            raise statement.contradiction(f"{count.name} must be at least 1, but is {count.value}")
    local_size, num_nodes = _derive_sizes(statement)
    if statement.node_rank is not None and statement.local_rank is None and num_nodes.value > 1 < local_size.value:
        raise statement.contradiction(
            f"LOCAL_RANK must be set where {statement.node_rank.name} says which node this is: ranks may be numbered "
            f"across {num_nodes.value} nodes of {local_size.value} ranks in several ways"
        )
    # With one node both are the rank itself; with several, ranks fill one node after the other.
    in_order = divmod(rank, local_size.value)
    node_rank = statement.node_rank or Stated("the node that follows from the rank", in_order[0])
    local_rank = statement.local_rank or Stated("the local rank that follows from the rank", in_order[1])
    for index, count in ((statement.rank, world_size), (local_rank, local_size), (node_rank, num_nodes)):
        if index.value >= count.value:
            raise statement.contradiction(
                f"{index.name} must be below {count.name}, {count.value}, but is {index.value}"
            )
    if statement.node_rank is None and local_rank.value != in_order[1]:
        raise statement.contradiction(
            f"{local_rank.name} must be {in_order[1]} where ranks fill one node after the other, {local_size.value} "
            f"each, but is {local_rank.value}, and nothing says which node this is. Number ranks node by node (mpirun "
            "--map-by slot), or export GROUP_RANK and GROUP_WORLD_SIZE: the number of the node, and how many there are"
        )
    return local_rank.value, local_size.value, node_rank.value, num_nodes.value


def _derive_sizes(statement: Statement) -> tuple[Stated, Stated]:
    """Return the number of ranks on this node and the number of nodes."""
    world, nodes, local = statement.world_size, statement.num_nodes, statement.local_size
    if local is None:
        if world.value > 1 and not (statement.one_host if nodes is None else nodes.value == 1):
            raise statement.contradiction(
                f"LOCAL_WORLD_SIZE must be set, because nothing says how many of the {world.value} ranks run on this "
                "node. Export LOCAL_RANK and LOCAL_WORLD_SIZE, e.g. 0 and 1 where each node runs one rank"
            )
        local = Stated("the number of ranks on this node", world.value)
    # Every other node holds at least one rank.
    most = world.value - (nodes.value - 1 if nodes is not None else 0)
    if local.value > most or (nodes is not None and nodes.value == 1 and local.value != world.value):
        on_nodes = f" on {nodes.value} nodes ({nodes.name})" if nodes is not None else ""
        raise statement.contradiction(
            f"{local.name} must fit {world.name}, {world.value}{on_nodes}, but is {local.value}"
        )
    is_even = world.value % local.value == 0 if nodes is None else local.value * nodes.value == world.value
    if not is_even and (statement.node_rank is None or nodes is None):
        what = "which node this is" if statement.node_rank is None else "how many nodes there are"
        number = "" if nodes is None else f" evenly over {nodes.value} nodes ({nodes.name})"
        raise statement.contradiction(
            f"{local.name} must divide {world.name}, {world.value},{number} where nothing says {what}, but is "
            f"{local.value}. Start as many ranks on every node, or export GROUP_RANK and GROUP_WORLD_SIZE: the "
            "number of the node, and how many there are"
        )
    if nodes is None:
        title = f"the number of nodes ({counted(world.value, 'rank')}, {local.value} on each)"
        nodes = Stated(title, world.value // local.value)
    return local, nodes
