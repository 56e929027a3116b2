"""Starting ranks with torch's elastic agent: with little output, on one address, and with readable errors.

`launch` runs a script or module on several ranks of this machine, which may be one of several machines. Importing this
package does not import torch, because each rank begins in `lockstep.launch.worker`, before the user's script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.launch.job_spec import JobSpec

if TYPE_CHECKING:
    from lockstep.launch.elastic import launch as launch

__all__ = ["JobSpec", "launch"]


def __getattr__(name: str) -> Any:
    if name == "launch":
        from lockstep.launch.elastic import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
