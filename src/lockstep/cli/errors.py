"""How an error that the user has to put right is printed: one message, no traceback, once for each node."""

from __future__ import annotations

import os
import time

from lockstep.errors import TopologyError
from lockstep.topology import infer_launcher, read_topology

_SECONDS_FOR_THE_FIRST_RANK = 3.0


def tell(error: Exception) -> None:
    """Print an error of input, which all ranks of a job tend to meet alike, once for each node."""
    from rich.console import Console
    from rich.text import Text

    if _local_rank() > 0:
        # The first rank tells it and ends, and with it most launchers the others; who is still here is alone with it.
        time.sleep(_SECONDS_FOR_THE_FIRST_RANK)
    notes = getattr(error, "__notes__", ())
    text = Text.assemble(("error: ", "bold red"), "\n".join([str(error), *notes]))
    Console(stderr=True, soft_wrap=True).print(text)


def _local_rank() -> int:
    try:
        return read_topology(os.environ, infer_launcher(os.environ)).local_rank
    except TopologyError:
        return 0
