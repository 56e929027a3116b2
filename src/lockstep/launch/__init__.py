"""Starting ranks with torch's elastic agent: with little output, on one address, and with readable errors.

`launch` runs a script or module on several ranks of this machine, which may be one of several machines. Importing this
package does not import torch, because each rank begins in `lockstep.launch.worker`, before the user's script.
"""

from __future__ import annotations

from lockstep.launch.job import NUMA_MODES, JobSpec
from lockstep.launch.start import launch

__all__ = ["NUMA_MODES", "JobSpec", "launch"]
