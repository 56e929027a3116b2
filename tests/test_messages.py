"""`make messages` misses no message."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("messages", Path(__file__).parents[1] / "tools" / "messages.py")
SOURCE = '''
"""A module."""
REMEDY = "Start the ranks with torchrun"

def check(x: int) -> None:
    """Check `x`, which must be small."""
    if x > 3:
        raise ValueError(f"`x` must be at most 3, but is {x!r} "
                         f"(rank {RANK})")
    logger.warning("`x` is %d, which is nearly too much", x)
    names = {"short": 1}
'''


def test_what_is_raised_logged_or_put_together_elsewhere_is_found(tmp_path: Path) -> None:
    messages = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(messages)
    (tmp_path / "room.py").write_text(SOURCE)
    assert messages.all_messages(tmp_path) == [
        ("room.py", 3, "part", "Start the ranks with torchrun"),
        ("room.py", 8, "ValueError", "`x` must be at most 3, but is {x} (rank {RANK})"),
        ("room.py", 10, "warning", "`x` is %d, which is nearly too much"),
    ]
    assert len(messages.all_messages()) > 900  # of the package itself
