"""Starting ranks: torch's elastic agent, made quiet, local and plain-spoken.

`launch` starts a script or module on several ranks of this machine, as one of several machines if asked. Importing this
package does not import torch: each rank begins in `lockstep.launch.worker`, before the user's script has run.
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
