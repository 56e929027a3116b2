"""Printing errors that the user can fix: one message, no traceback, once per node."""

from __future__ import annotations

import os
import time

from lockstep.errors import message_of
from lockstep.masking import mask_text, printable
from lockstep.topology import topology_if_known

_SECONDS_FOR_RANK_0 = 3.0


def print_error(error: Exception) -> None:
    """Print an input error once per node: usually every rank of a job raises the same one."""
    from rich.console import Console
    from rich.text import Text

    if topology_if_known(os.environ).local_rank > 0:
        # Local rank 0 prints the error and exits, and then most launchers stop the others. A rank that is still running
        # after that has a different error.
        time.sleep(_SECONDS_FOR_RANK_0)
    notes = getattr(error, "__notes__", ())
    text = Text.assemble(
        ("error: ", "bold red"), printable(mask_text("\n".join([message_of(error), *map(str, notes)])))
    )
    Console(stderr=True, soft_wrap=True).print(text)
