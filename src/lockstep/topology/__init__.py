"""The position of this process among the ranks and nodes of its job, from the variables that its launcher set.

Importing this package imports neither torch nor any other part of lockstep except its errors.
"""

from __future__ import annotations

from lockstep.topology.environ import LauncherName, Topology, infer_launcher, read_topology, topology_if_known

__all__ = ["LauncherName", "Topology", "infer_launcher", "read_topology", "topology_if_known"]
