"""Where this process stands among the ranks and nodes of its job, by the variables that its launcher set.

Importing this package does not import torch, nor anything else of lockstep but its errors.
"""

from __future__ import annotations

from lockstep.topology.environ import LauncherName, Topology, infer_launcher, read_topology

__all__ = ["LauncherName", "Topology", "infer_launcher", "read_topology"]
